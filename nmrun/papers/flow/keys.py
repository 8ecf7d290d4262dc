"""The keys of optical flow's data sets and models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from nmrun.lab.keys.datasets import SHARE, Dataset, Fractions, Seeded
from nmrun.lab.keys.groups import Group
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

    split_seed: Annotated[int, "which pairs; not changed by the run's seed"] = 0
    crop: Annotated[
        Sequence[int] | None,
        SIDES,
        "height and width of the part of a training pair that is learned; null = all of it",
    ] = None
    flip: Annotated[
        bool,
        FLAG,
        "left and right in every second training pair, upside down in every tenth",
    ] = True


@dataclass(frozen=True)
class Films(Group):
    """Frames that are read from files."""

    workers: Annotated[
        int | None,
        whole(0, optional=True),
        "processes that read frames; null = one for each core",
    ] = None


@dataclass(frozen=True)
class GeneratedMotion(Moving, Dataset):
    """Generated pairs of frames: a texture that moves behind a square that moves elsewhere; no
    films.
    """

    data: ClassVar[str] = FRAMES
    builder: ClassVar[str] = "nmrun.papers.flow.generated_motion.build"

    size: Annotated[
        int, whole(1), "training pairs; 8 others are for validation and 8 for the test"
    ] = 64
    split_seed: Annotated[int, "which pairs are generated; not changed by the run's seed"] = 0
    resolution: Annotated[int, whole(32), "pixels a side; RAFT takes 128 or more"] = 128


@dataclass(frozen=True)
class Sintel(Films, Fractions, Moving, Dataset):
    """Sintel (Butler et al. 2012), films with optical flow: the folder Sintel/training, by
    torchvision.
    """

    data: ClassVar[str] = FRAMES
    builder: ClassVar[str] = "nmrun.papers.flow.films.sintel"

    path: Annotated[
        str | None, OPTIONAL_TEXT, "the folder that Sintel is in; null = NMRUN_DATA"
    ] = None
    rendering: Annotated[str, one_of("clean", "final", "both"), "clean, final, or both"] = "clean"
    val_fraction: Annotated[float, "of the scenes, for validation"] = 0.1
    test_fraction: Annotated[
        float, "of the scenes, for the test: the flow of Sintel's own test is not public"
    ] = 0.1
    split_seed: Annotated[int, "which scenes; not changed by the run's seed"] = 0
    crop: Annotated[
        Sequence[int] | None,
        "height and width of the part of a training pair that is learned, such as [368,768]; null = "
        "all of it",
    ] = None


@dataclass(frozen=True)
class FlyingChairs(Films, Moving, Dataset):
    """FlyingChairs (Dosovitskiy et al. 2015), rendered chairs with optical flow: the folder
    FlyingChairs, by torchvision.
    """

    data: ClassVar[str] = FRAMES
    builder: ClassVar[str] = "nmrun.papers.flow.films.flying_chairs"

    path: Annotated[
        str | None, OPTIONAL_TEXT, "the folder that FlyingChairs is in; null = NMRUN_DATA"
    ] = None
    held_out: Annotated[
        float,
        SHARE,
        "of the training pairs, for validation; the 640 validation pairs are the test",
    ] = 0.03
    crop: Sequence[int] | None = (368, 496)


@dataclass(frozen=True)
class Raft(Model):
    """RAFT (Teed and Deng 2020)."""

    data: ClassVar[str] = FRAMES
    builder: ClassVar[str] = "nmrun.papers.flow.raft.build"

    updates: Annotated[int, whole(1), "of the flow, in training"] = 12
    evaluated_updates: Annotated[
        int, whole(1), "and in evaluation, as in the authors' code on FlyingChairs"
    ] = 24
    exclude: Annotated[
        Sequence[str] | None,
        "none stays dense, as in SR-STE's code, but for those with two or three inputs",
    ] = None


@dataclass(frozen=True)
class RaftSmall(Raft):
    """torchvision's RAFT, the small one (Teed and Deng 2020)."""


@dataclass(frozen=True)
class RaftLarge(Raft):
    """torchvision's RAFT, the large one, which the paper calls RAFT (Teed and Deng 2020)."""
