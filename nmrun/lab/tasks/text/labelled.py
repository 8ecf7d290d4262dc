"""Texts with labels: GLUE (Wang et al. 2019, arXiv 1804.07461), files of the user's own, and
generated reviews.

GLUE is nine tasks on texts and pairs of texts, from the official TSV files. Its test sets have no
labels, so the development set is the test here, as is usual. Validation texts are held out of the
training set.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from nmrun.errors import ConfigError, refused
from nmrun.lab.keys.datasets import SCORES, GeneratedText, Glue, LabelledText
from nmrun.lab.tasks import hugging_face, storage

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.lab.tasks.text.classification import Text, TextClassification


Rows = tuple[list["Text"], list[Any]]


@dataclass(frozen=True)
class Spec:
    """A task of GLUE: its folder, the columns of its texts and label, the labels in the order of
    classes (none: a score), its metrics.
    """

    folder: str
    texts: tuple[str, ...]
    label: str = "label"
    labels: tuple[str, ...] = ("0", "1")
    metrics: tuple[str, ...] = ("accuracy",)
    header: tuple[str, ...] = ()  # of files without one
    tests: tuple[tuple[str, str], ...] = (("test", "dev"),)  # splits and their files
    hub_texts: tuple[str, ...] = ()  # columns on the Hugging Face hub, where they have other names


PAIR = ("sentence1", "sentence2")
ENTAILMENT = ("entailment", "not_entailment")
TASKS = {
    "cola": Spec("CoLA", ("sentence",), metrics=("matthews", "accuracy"), header=("source", "label", "star", "sentence")),
    "sst2": Spec("SST-2", ("sentence",)),
    "mrpc": Spec("MRPC", ("#1 String", "#2 String"), "Quality", metrics=("f1", "accuracy"), hub_texts=PAIR),
    "qqp": Spec("QQP", ("question1", "question2"), "is_duplicate", metrics=("f1", "accuracy")),
    "stsb": Spec("STS-B", PAIR, "score", (), ("spearman", "pearson")),
    "mnli": Spec(
        "MNLI", PAIR, "gold_label", ("entailment", "neutral", "contradiction"),
        tests=(("test", "dev_matched"), ("test_mismatched", "dev_mismatched")), hub_texts=("premise", "hypothesis"),
    ),
    "qnli": Spec("QNLI", ("question", "sentence"), labels=ENTAILMENT),
    "rte": Spec("RTE", PAIR, labels=ENTAILMENT),
    "wnli": Spec("WNLI", PAIR),
}  # fmt: skip


def load_glue(
    task: str,
    held_out: float = Glue.held_out,
    split_seed: int = Glue.split_seed,
    limit: int | None = Glue.limit,
) -> dict[str, Rows]:
    """A task of ``TASKS``: texts and labels (classes from 0, or scores) by split; MNLI has
    ``test_mismatched`` too.

    ``held_out`` is the share of the official training set that is for validation. With 0 the
    development set is for validation, and nothing is left for a test. Of the rest, the first
    ``limit`` of the same shuffle are for training. Raises ConfigError for files that are missing or
    not as they should be.
    """
    spec = TASKS[task]
    splits = {split: _read(task, spec, file) for split, file in (("train", "train"), *spec.tests)}
    texts, labels = splits["train"]
    order = list(range(len(texts)))
    random.Random(split_seed).shuffle(order)
    cut = len(order) - math.ceil(held_out * len(order))
    for split, rows in (("train", order[:cut][:limit]), ("val", order[cut:])):
        splits[split] = [texts[row] for row in rows], [labels[row] for row in rows]
    if held_out == 0:
        splits |= {split.replace("test", "val"): splits.pop(split) for split, _ in spec.tests}
    return splits


def glue(config: Config, device: torch.device) -> TextClassification:
    from nmrun.lab.tasks.text.classification import TextClassification

    options = config.dataset.as_kind(Glue)
    spec = TASKS[options.task]
    splits = load_glue(options.task, options.held_out, options.split_seed, options.limit)
    return TextClassification.of(config, splits, len(spec.labels) or 1, spec.metrics, device)


def _read(task: str, spec: Spec, file: str) -> Rows:
    name = f"glue/{spec.folder}/{file}.tsv"
    if not storage.path_of(name).exists() and importlib.util.find_spec("datasets"):
        split = file.replace("dev", "validation")
        place = f"dataset=glue: there is no {name} in {storage.data_folder()} (NMRUN_DATA), and on the hub"
        table = hugging_face.rows(place, "nyu-mll/glue", task, split=split)
        columns = [table[column] for column in spec.hub_texts or spec.texts]
        return list(zip(*columns, strict=True)), list(table["label"])
    how = "put GLUE's TSV files there (gluebenchmark.com/tasks), or pip install datasets, which downloads them"
    return read_tsv(storage.find("glue", [name], how), spec)


def read_tsv(path: Path, spec: Spec) -> Rows:
    """The rows of a TSV file of GLUE: columns are between tabs, quotes are characters like others.

    Raises ConfigError for a missing column, a row that is longer than the header, and an unknown label.
    """
    with refused(f"{path}: ", OSError, ValueError, KeyError):
        table = pd.read_csv(
            io.StringIO(path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")),
            sep="\t",
            lineterminator="\n",
            quoting=csv.QUOTE_NONE,
            header=None if spec.header else 0,
            names=spec.header or None,
            dtype=str,
            na_filter=False,
            on_bad_lines="skip" if spec.folder == "QQP" else "error",
        )
        # pandas takes the first columns for the rows' names where rows are longer than the header
        if not isinstance(table.index, pd.RangeIndex):
            raise ValueError("its rows have more columns than its header")
        if spec.folder == "QQP":
            # some rows of the official file are torn in two, and left out by everyone
            table = table[table[spec.label] != ""]
        texts = list(zip(*(table[column] for column in spec.texts), strict=True))
        return texts, [_label(spec, text) for text in table[spec.label]]


def _label(spec: Spec, text: str) -> float:
    if not spec.labels:
        return float(text)
    if text not in spec.labels:
        raise ValueError(f"{spec.label} is {text!r}, where it takes {' or '.join(spec.labels)}")
    return spec.labels.index(text)


# what datasets calls the format of a file, and how it is told of tabs
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
OF_SCORES = ("pearson", "spearman")


def labelled_text(config: Config, device: torch.device) -> TextClassification:
    """The task of files of the user's own, which Hugging Face's datasets reads. Classes are the
    training texts' labels in sorted order, ``classes`` of its signature; labels that are all
    fractions are scores. Raises ConfigError for files and columns that are not as they should be,
    and for a label that no training text has.
    """
    import torch

    from nmrun.lab.tasks.text.classification import TextClassification, scores

    options = config.dataset.as_kind(LabelledText)
    files = {"train": options.train, "val": options.val, "test": options.test}
    splits = {
        split: _read_own(storage.path_of(file), options) for split, file in files.items() if file
    }
    cut(splits, options)
    labels = splits["train"][1]
    if not labels:
        raise ConfigError(
            f"dataset.train={options.train}: it has too few texts: validation and test take them all "
            f"(dataset.val_fraction={options.val_fraction}, dataset.test_fraction={options.test_fraction})"
        )
    scored = all(isinstance(label, float) for label in labels)
    names = [] if scored else sorted(set(labels), key=lambda label: (str(type(label)), label))
    if len(names) == 1:
        raise ConfigError(
            f"dataset.train={options.train}: all labels of the {len(labels)} texts for training are {names[0]!r}"
        )
    if scored and options.metric in set(SCORES) - set(OF_SCORES):
        raise ConfigError(
            f"dataset.metric={options.metric}: the labels of {options.train} are fractions, so scores: "
            f"take {', '.join(OF_SCORES)} or a function"
        )
    if scored:
        for split, (_, labels) in splits.items():
            for number, label in enumerate(labels, 1):
                if not isinstance(label, int | float):
                    raise ConfigError(
                        f"dataset.{split}, row {number}: its label is {label!r}, where those of "
                        "dataset.train are scores"
                    )
    else:
        numbers = {name: number for number, name in enumerate(names)}
        with refused("no text for training has this label of another split: ", KeyError):
            splits = {
                split: (texts, [numbers[label] for label in labels])
                for split, (texts, labels) in splits.items()
            }
    truth = torch.tensor(splits["train"][1])
    scores([options.metric], truth, truth)  # now, and not after the first epoch
    task = TextClassification.of(config, splits, len(names) or 1, (options.metric,), device)
    task.higher_is_better = options.higher_is_better
    task.signature = {} if scored else {"classes": [str(name) for name in names]}
    return task


def _read_own(path: Path, options: LabelledText) -> Rows:
    columns = [options.column, *([options.pair] if options.pair else []), options.label]
    with refused(f"{path}: ", ValueError):
        if path.suffix not in FORMATS:
            raise ValueError(f"it takes {', '.join(FORMATS)}")
        form, how = FORMATS[path.suffix]
        files = {"data_files": str(path), "split": "train", **how}
        table = hugging_face.rows("dataset=labelled_text", form, **files)
        # pandas takes the first column for the rows' names where each row has one more than the header
        if "__index_level_0__" in table.column_names:
            raise ValueError(
                "its rows have more columns than its header: a text with a comma is in quotes"
            )
        if missing := [column for column in columns if column not in table.column_names]:
            has = ", ".join(table.column_names)
            raise ValueError(f"there is no column {missing[0]!r}; it has {has}")
        *texts, labels = (list(table[column]) for column in columns)
        for number, (*some, label) in enumerate(zip(*texts, labels, strict=True), 1):
            odd = [text for text in some if not isinstance(text, str)]
            if not isinstance(label, str | int | float) or (
                isinstance(label, float) and not math.isfinite(label)
            ):
                odd.append(label)
            if odd:
                raise ValueError(
                    f"row {number} has {odd[0]}, which is no text or no label; nothing, and words "
                    "such as NA and null, are None"
                )
    return list(zip(*texts, strict=True)), labels


def cut(splits: dict[str, Rows], options: LabelledText) -> None:
    """Take what has no file of its own from the training texts, by ``split_seed``."""
    texts, labels = splits["train"]
    order = list(range(len(labels)))
    random.Random(options.split_seed).shuffle(order)
    shares = {"val": options.val_fraction, "test": options.test_fraction}
    for split in [split for split in shares if split not in splits]:
        count = math.ceil(shares[split] * len(labels))
        mine, order = order[:count], order[count:]
        splits[split] = [texts[row] for row in mine], [labels[row] for row in mine]
    splits["train"] = [texts[row] for row in order], [labels[row] for row in order]


GOOD = ("good", "great", "fine", "lovely", "superb", "bright", "clever", "charming")
BAD = ("bad", "awful", "poor", "dull", "boring", "weak", "clumsy", "flat")
FILLERS = (
    "the", "film", "plot", "cast", "and", "was", "very", "a", "scene", "music", "it", "had", "with", "an", "ending", "camera",
)  # fmt: skip
HELD_OUT = 500  # texts for validation, and as many for the test


@cache
def generated_reviews(
    size: int = GeneratedText.size, split_seed: int = GeneratedText.split_seed
) -> dict[str, Rows]:
    """Different generated sentences with a verdict, by split; needs no download, and shows nothing
    about language.

    A sentence has one or three verdicts among 4 to 12 fillers. Each is good or bad by an even
    chance and has "not" before it three times in ten. Its label is 1 if most of them, turned around
    by their "not", are good. ``size`` sentences are for training, and 500 for each other split.
    """
    rng = random.Random(split_seed)
    labelled: dict[str, int] = {}
    while len(labelled) < size + 2 * HELD_OUT:
        sentence, label = _sentence(rng)
        labelled[sentence] = label
    texts: list[Text] = [(text,) for text in labelled]
    labels = list(labelled.values())
    ends = {"train": (0, size), "val": (size, size + HELD_OUT), "test": (size + HELD_OUT, None)}
    return {name: (texts[a:b], labels[a:b]) for name, (a, b) in ends.items()}


def generated_text(config: Config, device: torch.device) -> TextClassification:
    from nmrun.lab.tasks.text.classification import TextClassification

    options = config.dataset.as_kind(GeneratedText)
    splits = generated_reviews(options.size, options.split_seed)
    return TextClassification.of(config, splits, 2, ("accuracy",), device)


def _sentence(rng: random.Random) -> tuple[str, int]:
    words = [[word] for word in rng.choices(FILLERS, k=rng.randint(4, 12))]
    balance = 0
    for _ in range(rng.choice((1, 3))):
        good, turned = rng.random() < 0.5, rng.random() < 0.3
        verdict = rng.choice(GOOD if good else BAD)
        balance += 1 if good != turned else -1
        words.insert(rng.randint(0, len(words)), ["not", verdict] if turned else [verdict])
    return " ".join(word for phrase in words for word in phrase), int(balance > 0)
