"""The keys of optical flow's data sets and models, and what the package says of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from nmrun.lab.keys.data_groups import SHARE, Dataset, Fractions, Seeded
from nmrun.lab.keys.installed import Entry
from nmrun.lab.keys.models import Model
from nmrun.ranges import FLAG, OPTIONAL_TEXT, SIDES, one_of, whole

FRAMES = "pairs of frames with optical flow"


@dataclass(frozen=True)
class Moving(Seeded):
    """Pairs of frames."""

    crop: Annotated[list[int] | None, SIDES]
    flip: Annotated[bool, FLAG]


@dataclass(frozen=True)
class GeneratedMotion(Moving, Dataset):
    """Generated pairs of frames."""

    data: ClassVar[str] = FRAMES

    size: Annotated[int, whole(1)]
    resolution: Annotated[int, whole(32)]


@dataclass(frozen=True)
class Sintel(Fractions, Moving, Dataset):
    """Sintel."""

    data: ClassVar[str] = FRAMES

    path: Annotated[str | None, OPTIONAL_TEXT]
    rendering: Annotated[str, one_of("clean", "final", "both")]
    workers: Annotated[int | None, whole(0, optional=True)]


@dataclass(frozen=True)
class FlyingChairs(Moving, Dataset):
    """FlyingChairs."""

    data: ClassVar[str] = FRAMES

    path: Annotated[str | None, OPTIONAL_TEXT]
    held_out: Annotated[float, SHARE]
    workers: Annotated[int | None, whole(0, optional=True)]


@dataclass(frozen=True)
class Raft(Model):
    """RAFT."""

    data: ClassVar[str] = FRAMES

    updates: Annotated[int, whole(1)]
    evaluated_updates: Annotated[int, whole(1)]


CONF = "nmrun.papers.conf"
MOTION = Entry(GeneratedMotion, "nmrun.papers.flow.generated_motion.build", CONF)
SINTEL = Entry(Sintel, "nmrun.papers.flow.films.sintel", CONF)
FLYING_CHAIRS = Entry(FlyingChairs, "nmrun.papers.flow.films.flying_chairs", CONF)
RAFT = Entry(Raft, "nmrun.papers.flow.raft.build", CONF)
