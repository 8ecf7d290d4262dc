"""The keys of data sets that are long texts, of which a model learns the next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from nmrun.lab.keys.data_groups import RUNNING_TEXT, Context, Dataset, Fractions, Tokenized
from nmrun.lab.keys.groups import Group
from nmrun.ranges import OPTIONAL_TEXT, PATH, TEXT, whole


@dataclass(frozen=True)
class Strided(Group):
    """How a long text is evaluated."""

    stride: Annotated[int | None, whole(1, optional=True)]


@dataclass(frozen=True)
class StdlibText(Strided, Context, Dataset):
    """The source of Python's standard library."""

    data: ClassVar[str] = RUNNING_TEXT

    sha256: Annotated[str, TEXT]


@dataclass(frozen=True)
class WikiText(Strided, Tokenized, Dataset):
    """WikiText-2 and WikiText-103."""

    data: ClassVar[str] = RUNNING_TEXT


@dataclass(frozen=True)
class Shakespeare(Strided, Fractions, Tokenized, Dataset):
    """Tiny Shakespeare."""

    data: ClassVar[str] = RUNNING_TEXT


@dataclass(frozen=True)
class TextFiles(Strided, Fractions, Tokenized, Dataset):
    """Any text files."""

    data: ClassVar[str] = RUNNING_TEXT
    places: ClassVar[tuple[str, ...]] = ("train", "val", "test")

    train: Annotated[str, PATH]
    val: Annotated[str | None, OPTIONAL_TEXT]
    test: Annotated[str | None, OPTIONAL_TEXT]


@dataclass(frozen=True)
class HubText(Strided, Tokenized, Dataset):
    """Texts that Hugging Face's datasets loads."""

    data: ClassVar[str] = RUNNING_TEXT

    path: Annotated[str, TEXT]
    subset: Annotated[str | None, OPTIONAL_TEXT]
    files: Annotated[str | None, OPTIONAL_TEXT]
    column: Annotated[str, TEXT]
    train: Annotated[str, TEXT]
    val: Annotated[str, TEXT]
    test: Annotated[str | None, OPTIONAL_TEXT]


@dataclass(frozen=True)
class TokenBin(Strided, Context, Dataset):
    """Files of tokens."""

    data: ClassVar[str] = RUNNING_TEXT
    places: ClassVar[tuple[str, ...]] = ("folder",)

    folder: Annotated[str, PATH]
    vocabulary: Annotated[int, whole(4)]
