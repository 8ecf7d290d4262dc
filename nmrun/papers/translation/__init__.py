"""Pairs of sentences, and fairseq's Transformer: tables of STEP, S-STE and the gradient-flow
recipes. It needs fairseq (``nmrun[translation]``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from nmrun.lab.keys.datasets import Dataset, Seeded
from nmrun.lab.keys.groups import Group
from nmrun.lab.keys.models import Transformer
from nmrun.ranges import FRACTION, PATH, TEXT, number, one_of, whole

PAIRS = "pairs of sentences"


@dataclass(frozen=True)
class Translated(Group):
    """Batches and beam search of translation."""

    max_tokens: Annotated[
        int,
        whole(1),
        "tokens of a batch, of source or target, padding included (trainer.batch_size is not used)",
    ] = 4096
    beam: Annotated[int, whole(1), "width of the beam search"] = 5
    length_penalty: Annotated[
        float, number(0), "exponent of the length that a translation's score is divided by"
    ] = 1.0


@dataclass(frozen=True)
class CopyReverse(Translated, Seeded, Dataset):
    """A small generated translation task: a sentence's first word says whether to copy or reverse
    the rest.
    """

    data: ClassVar[str] = PAIRS
    builder: ClassVar[str] = "nmrun.papers.translation.data.copy_reverse"

    split_seed: Annotated[int, "which sentences are generated; not changed by the run's seed"] = 0
    size: Annotated[int, whole(1), "training sentences"] = 8000
    val_size: Annotated[int, whole(1), "validation sentences"] = 200
    test_size: Annotated[int, whole(1), "test sentences"] = 200
    words: Annotated[int, whole(1), "different words, beside the two orders"] = 16
    longest: Annotated[int, whole(2), "largest number of words in a sentence"] = 6
    max_tokens: int = 512


@dataclass(frozen=True)
class Multi30k(Translated, Dataset):
    """Multi30k, NMRUN_DATA/multi30k/{train,val,test_2016_flickr}.{de,en}[.gz]: 29,000 image
    descriptions with their translations.
    """

    data: ClassVar[str] = PAIRS
    builder: ClassVar[str] = "nmrun.papers.translation.data.multi30k"

    source: Annotated[str, TEXT, "language to translate from: de, en, fr, cs"] = "de"
    target: Annotated[str, TEXT, "language to translate into"] = "en"
    test: Annotated[
        str,
        TEXT,
        "test texts: test_2016_flickr, test_2017_flickr, test_2017_mscoco or test_2018_flickr",
    ] = "test_2016_flickr"
    vocabulary: Annotated[int, whole(4), "subwords of the BPE that both languages share"] = 8000


@dataclass(frozen=True, kw_only=True)
class Fairseq(Translated, Dataset):
    """Any folder of fairseq-preprocess or nmrun prepare."""

    data: ClassVar[str] = PAIRS
    builder: ClassVar[str] = "nmrun.papers.translation.data.fairseq_folder"
    places: ClassVar[tuple[str, ...]] = ("path",)

    path: Annotated[str, PATH, "the folder, such as data-bin/iwslt14.tokenized.de-en"]
    subwords: Annotated[
        str,
        one_of("none", "sentencepiece", "subword_nmt"),
        "how the text was split, to undo it for BLEU: none, sentencepiece, subword_nmt",
    ] = "none"


@dataclass(frozen=True)
class FairseqTransformer(Transformer):
    """fairseq's Transformer (Vaswani et al. 2017) in the size of its transformer_tiny."""

    decays: ClassVar[str] = "all"  # as fairseq-train
    data: ClassVar[str] = PAIRS
    builder: ClassVar[str] = "nmrun.papers.translation.fairseq.transformer"

    width: Annotated[int, "width of the embeddings"] = 64
    ffn: Annotated[int, whole(1), "width of the feed-forward networks"] = 64
    layers: Annotated[int, "layers of the encoder, and of the decoder"] = 2
    heads: Annotated[int, "heads of every attention"] = 2
    dropout: Annotated[float, "dropout of embeddings and of each block's output"] = 0.1
    attention_dropout: Annotated[float, FRACTION, "dropout of the attention weights"] = 0.0
    activation_dropout: Annotated[
        float, FRACTION, "dropout inside the feed-forward networks, after their activation"
    ] = 0.0
    share_embeddings: Annotated[
        str,
        one_of("auto", "none", "decoder", "all"),
        "embeddings that are one: decoder (its input and output), all (the encoder's too) or "
        "none. auto = all with one dictionary, else decoder",
    ] = "auto"
    include: Annotated[
        Sequence[str] | None,
        "regular expressions for whole module names that may be sparse; null = all; "
        r"'.*\.fc[12]' = feed-forward only",
    ] = None


@dataclass(frozen=True)
class FairseqTransformerBase(FairseqTransformer):
    """fairseq's Transformer (Vaswani et al. 2017) in the size of its transformer_wmt_en_de."""

    width: int = 512
    ffn: int = 2048
    layers: int = 6
    heads: int = 8


@dataclass(frozen=True)
class FairseqTransformerIWSLT(FairseqTransformerBase):
    """fairseq's Transformer (Vaswani et al. 2017) in the size of its transformer_iwslt_de_en."""

    ffn: int = 1024
    heads: int = 4
