"""Texts with labels from the user's own files, read by Hugging Face's datasets."""

from __future__ import annotations

import math
import random
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmrun.errors import ConfigError, needs
from nmrun.lab.keys.datasets import LabelledText
from nmrun.lab.tasks import storage
from nmrun.registry import find

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.lab.tasks.text.classification import Text, TextClassification

# what datasets calls the format of a file, and how it is told of tabs
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
OF_SCORES = ("pearson", "spearman")
SHOWN = 10  # labels, of a line that names them
Rows = tuple[list["Text"], list[Any]]


def labelled_text(config: Config, device: torch.device) -> TextClassification:
    """The task of these files. Classes are the training texts' labels in sorted order, ``classes``
    of its signature; labels that are all fractions are scores. Raises ConfigError for files and
    columns that are not as they should be, and for a label that no training text has.
    """
    from nmrun.lab.tasks.text.classification import TextClassification

    options = config.dataset.as_kind(LabelledText)
    files = {"train": options.train, "val": options.val, "test": options.test}
    splits = {split: _read(storage.path_of(file), options) for split, file in files.items() if file}
    cut(splits, options)
    labels = splits["train"][1]
    scored = all(isinstance(label, float) for label in labels)
    names = [] if scored else sorted(set(labels), key=lambda label: (str(type(label)), label))
    if len(names) == 1:
        raise ConfigError(f"dataset.train={options.train}: all its labels are {names[0]!r}")
    _check_metric(options, len(names))
    number = {name: place for place, name in enumerate(names)}
    numbered = {
        split: (texts, labels if scored else [_number(number, label, split) for label in labels])
        for split, (texts, labels) in splits.items()
    }
    task = TextClassification.of(config, numbered, len(names) or 1, (options.metric,), device)
    task.higher_is_better = options.higher_is_better
    task.signature = {} if scored else {"classes": [str(name) for name in names]}
    return task


def _read(path: Path, options: LabelledText) -> Rows:
    with needs(f"dataset=labelled_text (dataset.train={options.train})", "texts"):
        import datasets
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: it takes {', '.join(FORMATS)}")
    form, how = FORMATS[path.suffix]
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it says of errors, they say
    try:
        table = datasets.load_dataset(form, data_files=str(path), split="train", **how)
    except Exception as error:  # each format has errors of its own
        cause = error.__cause__ or error
        line = textwrap.shorten(str(cause) or type(cause).__name__, 300)
        raise ConfigError(f"{path} cannot be read, or has no rows ({line})") from None
    # pandas takes the first column for the rows' names where each row has one more than the header
    if "__index_level_0__" in table.column_names:
        raise ConfigError(
            f"{path}: its rows have more columns than its header: a text with a comma is in quotes"
        )
    columns = [options.column, *([options.pair] if options.pair else []), options.label]
    for column in columns:
        if columns.count(column) > 1:
            raise ConfigError(f"dataset.column, pair and label: {column!r} is two of them")
        if column not in table.column_names:
            has = ", ".join(table.column_names)
            raise ConfigError(f"{path}: there is no column {column!r}; it has {has}")
    *texts, labels = (list(table[column]) for column in columns)
    for column, values in zip(columns, (*texts, labels), strict=True):
        kind = "label" if column == options.label else "text"
        for row, value in enumerate(values, 1):
            if value is None:
                raise ConfigError(
                    f"{path}: {column} of row {row} is missing: empty, or a word such as NA or null"
                )
            if kind == "text" and not isinstance(value, str):
                raise ConfigError(f"{path}: {column} of row {row} is {value!r}, and no text")
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{path}: {column} of row {row} is {value}")
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


def _check_metric(options: LabelledText, classes: int) -> None:
    """Refuse a metric that would fail, or mean nothing, after the first epoch; 0 classes: scores."""
    said = f"dataset.metric={options.metric}"
    if "." in options.metric:
        find("dataset.metric", options.metric, {})
    elif classes == 0 and options.metric not in OF_SCORES:
        raise ConfigError(
            f"{said}: the labels of {options.train} are fractions, so scores: "
            f"take {', '.join(OF_SCORES)} or a function"
        )
    elif options.metric == "f1" and classes > 2:
        raise ConfigError(f"{said}: it takes two classes, and {options.train} has {classes}")


def _number(numbers: Mapping[Any, int], label: Any, split: str) -> int:
    if label not in numbers:
        known = ", ".join(repr(each) for each in list(numbers)[:SHOWN])
        more = f" and {len(numbers) - SHOWN} more" if len(numbers) > SHOWN else ""
        raise ConfigError(
            f"the {split} texts have the label {label!r}, and those for training {known}{more}"
        )
    return numbers[label]
