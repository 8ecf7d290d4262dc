"""The keys of translation's data sets and models, and what the package says of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from nmrun.lab.keys.data_groups import Dataset, Seeded
from nmrun.lab.keys.groups import Group
from nmrun.lab.keys.installed import Entry
from nmrun.lab.keys.models import Transformer
from nmrun.ranges import FLAG, FRACTION, OPTIONAL_TEXT, PATH, TEXT, number, one_of, whole

PAIRS = "pairs of sentences"


@dataclass(frozen=True)
class Translated(Group):
    """Batches and beam search of translation."""

    max_tokens: Annotated[int, whole(1)]
    beam: Annotated[int, whole(1)]
    length_penalty: Annotated[float, number(0)]


@dataclass(frozen=True)
class CopyReverse(Translated, Seeded, Dataset):
    """Generated sentences to be copied or reversed."""

    data: ClassVar[str] = PAIRS

    version: Annotated[int, whole(2, 2)]
    size: Annotated[int, whole(1)]
    val_size: Annotated[int, whole(1)]
    test_size: Annotated[int, whole(1)]
    words: Annotated[int, whole(1)]
    longest: Annotated[int, whole(2)]


@dataclass(frozen=True)
class Multi30k(Translated, Dataset):
    """Multi30k."""

    data: ClassVar[str] = PAIRS

    source: Annotated[str, TEXT]
    target: Annotated[str, TEXT]
    test: Annotated[str, TEXT]
    vocabulary: Annotated[int, whole(4)]


@dataclass(frozen=True)
class Fairseq(Translated, Dataset):
    """A folder of fairseq-preprocess."""

    data: ClassVar[str] = PAIRS
    places: ClassVar[tuple[str, ...]] = ("path",)

    path: Annotated[str, PATH]
    source: Annotated[str | None, OPTIONAL_TEXT]
    target: Annotated[str | None, OPTIONAL_TEXT]
    train: Annotated[str, PATH]
    val: Annotated[str | None, OPTIONAL_TEXT]
    test: Annotated[str | None, OPTIONAL_TEXT]
    subwords: Annotated[str, one_of("none", "sentencepiece", "subword_nmt")]
    moses: Annotated[bool, FLAG]


@dataclass(frozen=True)
class FairseqTransformer(Transformer):
    """fairseq's Transformer."""

    decays: ClassVar[str] = "all"  # as fairseq-train
    data: ClassVar[str] = PAIRS

    ffn: Annotated[int, whole(1)]
    attention_dropout: Annotated[float, FRACTION]
    activation_dropout: Annotated[float, FRACTION]
    share_embeddings: Annotated[str, one_of("auto", "none", "decoder", "all")]


CONF = "nmrun.papers.conf"
COPY_REVERSE = Entry(CopyReverse, "nmrun.papers.translation.copy_reverse.build", CONF)
MULTI30K = Entry(Multi30k, "nmrun.papers.translation.multi30k.build", CONF)
FAIRSEQ = Entry(Fairseq, "nmrun.papers.translation.fairseq_folder.build", CONF)
TRANSFORMER = Entry(FairseqTransformer, "nmrun.papers.translation.fairseq_transformer.build", CONF)
