"""The keys of data sets of texts: with labels, and long ones whose next token a model learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from nmrun.lab.keys.datasets import RUNNING_TEXT, TEXTS, Dataset, Fractions, Seeded
from nmrun.lab.keys.groups import Group
from nmrun.lab.keys.ranges import PATH
from nmrun.ranges import OPTIONAL_TEXT, TEXT, number, one_of, whole

MODELS_OWN = "${oc.select:model.pretrained,words}"  # the tokenizer that a model came with


@dataclass(frozen=True)
class Encoding(Group):
    """Texts for classification."""

    max_length: Annotated[int, whole(8), "tokens at most; longer texts are cut"] = 128
    tokenizer: Annotated[
        str,
        TEXT,
        "words (hashed), or a Hugging Face tokenizer by name or folder; default: the model's own",
    ] = MODELS_OWN
    vocabulary: Annotated[int, whole(4), "numbers that words are hashed to"] = 8192


@dataclass(frozen=True)
class GeneratedText(Encoding, Seeded, Dataset):
    """Generated sentences of made-up reviews, good or bad, where "not" turns the next verdict
    around; not real language.
    """

    data: ClassVar[str] = TEXTS

    size: Annotated[
        int,
        whole(1),
        "training texts; 500 others are for validation and 500 for the test",
    ] = 4000
    split_seed: Annotated[int, "which sentences are generated; not changed by the run's seed"] = 0
    max_length: int = 32
    vocabulary: int = 1024


@dataclass(frozen=True)
class Glue(Encoding, Seeded, Dataset):
    """One of GLUE's tasks, from its TSV files in NMRUN_DATA/glue, or by Hugging Face's datasets
    where that is installed.
    """

    data: ClassVar[str] = TEXTS

    task: Annotated[
        str,
        one_of("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"),
        "cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli",
    ] = "sst2"
    held_out: Annotated[
        float,
        number(0, 0.5),
        "of the training texts, for validation; 0 = the development set, which else is the test, is "
        "for validation, and there is no test",
    ] = 0.05
    split_seed: Annotated[int, "which texts are held out; not changed by the run's seed"] = 0
    limit: Annotated[
        int | None,
        whole(1, optional=True),
        "training texts that are used, those at the beginning of a shuffle; null = all",
    ] = None


@dataclass(frozen=True)
class Context(Group):
    """What language models look back on."""

    context: Annotated[int, whole(1), "tokens that a prediction can look back on"] = 64


@dataclass(frozen=True)
class Tokenized(Context):
    """A text that is made into tokens."""

    tokenizer: Annotated[
        str,
        TEXT,
        "byte, character, word, or a Hugging Face tokenizer: tokenizer.json, its folder, or a name "
        "such as gpt2",
    ] = "byte"


@dataclass(frozen=True)
class Strided(Group):
    """How a long text is evaluated."""

    stride: Annotated[
        int | None,
        whole(1, optional=True),
        "tokens that an evaluation's window moves on, at most context; null = context, windows "
        "side by side",
    ] = None


@dataclass(frozen=True)
class StdlibText(Strided, Context, Dataset):
    """Source of some modules of Python's standard library as bytes (about 1.1 MB): real program
    text that needs no download.
    """

    data: ClassVar[str] = RUNNING_TEXT

    sha256: Annotated[str, TEXT, "of the text, which another version of Python has otherwise"] = (
        "${stdlib_sha256:}"
    )


@dataclass(frozen=True)
class WikiText2(Strided, Tokenized, Dataset):
    """WikiText-2, NMRUN_DATA/wikitext-2/wiki.{train,valid,test}.tokens (or {train,valid,test}.txt)."""

    data: ClassVar[str] = RUNNING_TEXT

    tokenizer: str = "word"
    context: int = 128


@dataclass(frozen=True)
class WikiText103(WikiText2):
    """WikiText-103, NMRUN_DATA/wikitext-103/wiki.{train,valid,test}.tokens (or
    {train,valid,test}.txt).
    """


@dataclass(frozen=True)
class Shakespeare(Strided, Fractions, Tokenized, Dataset):
    """tiny Shakespeare, NMRUN_DATA/tinyshakespeare/input.txt: 1.1 million characters of plays."""

    data: ClassVar[str] = RUNNING_TEXT

    val_fraction: Annotated[float, "of the text: what comes before the test text"] = 0.05
    test_fraction: Annotated[float, "of the text: its end"] = 0.05
    tokenizer: str = "character"


@dataclass(frozen=True, kw_only=True)
class TextFiles(Strided, Fractions, Tokenized, Dataset):
    """Any text files."""

    data: ClassVar[str] = RUNNING_TEXT
    places: ClassVar[tuple[str, ...]] = ("train", "val", "test")

    train: Annotated[
        str, PATH, "path of the training text, in NMRUN_DATA or else in the current folder"
    ]
    val: Annotated[
        str | None,
        OPTIONAL_TEXT,
        "path of the validation text; null = cut from the end of the training text",
    ] = None
    test: Annotated[
        str | None,
        OPTIONAL_TEXT,
        "path of the test text; null = the same, after the validation text",
    ] = None
    val_fraction: Annotated[float, "of the training file, where val is null"] = 0.05
    test_fraction: Annotated[float, "of the training file, where test is null"] = 0.05


@dataclass(frozen=True, kw_only=True)
class HubText(Strided, Tokenized, Dataset):
    """Texts that Hugging Face's datasets loads, from its hub or from files (needs nmrun[texts]);
    rows are joined by an empty line.
    """

    data: ClassVar[str] = RUNNING_TEXT

    path: Annotated[
        str,
        TEXT,
        "what load_dataset takes: a name on the hub (Salesforce/wikitext), a folder of files, or "
        "json, csv, parquet, text with dataset.files",
    ]
    subset: Annotated[
        str | None, OPTIONAL_TEXT, "its subset, such as wikitext-2-raw-v1; null = the only one"
    ] = None
    files: Annotated[
        str | None,
        OPTIONAL_TEXT,
        "only these files, such as en/c4-train.00000-of-01024.json.gz (* stands for anything); "
        "null = all",
    ] = None
    column: Annotated[str, TEXT, "that has the texts"] = "text"
    train: Annotated[str, TEXT, "splits as datasets writes them, such as train[:90%]"] = "train"
    val: Annotated[str, TEXT, "likewise"] = "validation"
    test: Annotated[
        str | None, OPTIONAL_TEXT, "likewise; null = runs have validation metrics alone"
    ] = "test"
    context: int = 1024


@dataclass(frozen=True, kw_only=True)
class TokenBin(Strided, Context, Dataset):
    """Token files in nanoGPT's layout: train.bin, val.bin and optionally test.bin of 16-bit numbers,
    memory-mapped.
    """

    data: ClassVar[str] = RUNNING_TEXT
    places: ClassVar[tuple[str, ...]] = ("folder",)

    folder: Annotated[
        str,
        PATH,
        "that has the files, in NMRUN_DATA or else in the current folder; without test.bin, runs have validation "
        "metrics alone",
    ]
    vocabulary: Annotated[
        int,
        whole(4),
        "all tokens are below it; a multiple of 64, such as 50304, is faster on a GPU",
    ] = 50257
    context: int = 1024
