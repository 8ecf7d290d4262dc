"""The keys of optical flow's data sets and models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from nmrun.lab.keys.datasets import SHARE, Dataset, Fractions, FromDisk, Seeded
from nmrun.lab.keys.models import Model
from nmrun.ranges import FLAG, OPTIONAL_TEXT, Check, one_of, whole

FRAMES = "pairs of frames with optical flow"
SIDES = Check(
    "null or height and width, multiples of 8 such as [368,496]",
    lambda value: (
        value is None
        or (
            isinstance(value, list)
            and len(value) == 2
            and all(whole(8).holds(side) and side % 8 == 0 for side in value)
        )
    ),
)


@dataclass(frozen=True)
class Moving(Seeded):
    """Pairs of frames."""

    split_seed: Annotated[int, "which pairs are held out; not changed by the run's seed"] = 0
    crop: Annotated[
        Sequence[int] | None,
        SIDES,
        "height and width of a random crop of a training pair; null = all of it",
    ] = None
    flip: Annotated[
        bool,
        FLAG,
        "mirror every second training pair left to right, and every tenth upside down",
    ] = True


@dataclass(frozen=True)
class GeneratedMotion(Moving, Dataset):
    """Generated pairs of frames: a texture moves behind a square that moves elsewhere; no films."""

    data: ClassVar[str] = FRAMES
    builder: ClassVar[str] = "nmrun.papers.flow.data.generated_motion"

    size: Annotated[
        int, whole(1), "training pairs; 8 others are for validation and 8 for the test"
    ] = 64
    split_seed: Annotated[int, "which pairs are generated; not changed by the run's seed"] = 0
    resolution: Annotated[int, whole(32), "pixels a side; RAFT takes 128 or more"] = 128


@dataclass(frozen=True)
class Sintel(FromDisk, Fractions, Moving, Dataset):
    """Sintel (Butler et al. 2012), films with optical flow: the folder Sintel/training, by
    torchvision.
    """

    data: ClassVar[str] = FRAMES
    builder: ClassVar[str] = "nmrun.papers.flow.data.sintel"

    path: Annotated[str | None, OPTIONAL_TEXT, "folder that Sintel is in; null = NMRUN_DATA"] = None
    rendering: Annotated[str, one_of("clean", "final", "both"), "clean, final, or both"] = "clean"
    val_fraction: Annotated[float, "share of the scenes that is for validation"] = 0.1
    test_fraction: Annotated[
        float,
        "share of the scenes that is for the test: the flow of Sintel's own test is not public",
    ] = 0.1
    split_seed: Annotated[int, "which scenes are held out; not changed by the run's seed"] = 0
    crop: Annotated[
        Sequence[int] | None,
        "height and width of a random crop of a training pair, such as [368,768]; null = all of it",
    ] = None


@dataclass(frozen=True)
class FlyingChairs(FromDisk, Moving, Dataset):
    """FlyingChairs (Dosovitskiy et al. 2015), rendered chairs with optical flow: the folder
    FlyingChairs, by torchvision.
    """

    data: ClassVar[str] = FRAMES
    builder: ClassVar[str] = "nmrun.papers.flow.data.flying_chairs"

    path: Annotated[
        str | None, OPTIONAL_TEXT, "folder that FlyingChairs is in; null = NMRUN_DATA"
    ] = None
    held_out: Annotated[
        float,
        SHARE,
        "share of the training pairs that is for validation; the 640 validation pairs are the test",
    ] = 0.03
    crop: Sequence[int] | None = (368, 496)


@dataclass(frozen=True)
class Raft(Model):
    """RAFT (Teed and Deng 2020)."""

    data: ClassVar[str] = FRAMES
    builder: ClassVar[str] = "nmrun.papers.flow.task.raft"

    updates: Annotated[int, whole(1), "updates of the flow in training"] = 12
    evaluated_updates: Annotated[
        int, whole(1), "updates in evaluation, as many as in the authors' code on FlyingChairs"
    ] = 24
    exclude: Annotated[
        Sequence[str] | None,
        "no layer stays dense, as in SR-STE's code, except those with two or three inputs",
    ] = None


@dataclass(frozen=True)
class RaftSmall(Raft):
    """torchvision's RAFT, the small one (Teed and Deng 2020)."""


@dataclass(frozen=True)
class RaftLarge(Raft):
    """torchvision's RAFT, the large one, which the paper calls RAFT (Teed and Deng 2020)."""
