"""Texts with labels from the user's own files, read by Hugging Face's datasets."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmrun.errors import ConfigError, refused
from nmrun.lab.keys.datasets import SCORES, LabelledText
from nmrun.lab.tasks import storage
from nmrun.lab.tasks.hugging_face import rows

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
Rows = tuple[list["Text"], list[Any]]


def labelled_text(config: Config, device: torch.device) -> TextClassification:
    """The task of these files. Classes are the training texts' labels in sorted order, ``classes``
    of its signature; labels that are all fractions are scores. Raises ConfigError for files and
    columns that are not as they should be, and for a label that no training text has.
    """
    import torch

    from nmrun.lab.tasks.text.classification import TextClassification, scores

    options = config.dataset.as_kind(LabelledText)
    files = {"train": options.train, "val": options.val, "test": options.test}
    splits = {split: _read(storage.path_of(file), options) for split, file in files.items() if file}
    cut(splits, options)
    labels = splits["train"][1]
    scored = all(isinstance(label, float) for label in labels)
    names = [] if scored else sorted(set(labels), key=lambda label: (str(type(label)), label))
    if len(names) == 1:
        raise ConfigError(f"dataset.train={options.train}: all its labels are {names[0]!r}")
    if scored and options.metric in set(SCORES) - set(OF_SCORES):
        raise ConfigError(
            f"dataset.metric={options.metric}: the labels of {options.train} are fractions, so scores: "
            f"take {', '.join(OF_SCORES)} or a function"
        )
    if not scored:
        splits = {
            split: (texts, [_number(names, label, split) for label in labels])
            for split, (texts, labels) in splits.items()
        }
    truth = torch.tensor(splits["train"][1])
    with refused(f"dataset.metric={options.metric}: ", TypeError, ValueError):
        scores([options.metric], truth, truth)  # now, and not after the first epoch
    task = TextClassification.of(config, splits, len(names) or 1, (options.metric,), device)
    task.higher_is_better = options.higher_is_better
    task.signature = {} if scored else {"classes": [str(name) for name in names]}
    return task


def _read(path: Path, options: LabelledText) -> Rows:
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: it takes {', '.join(FORMATS)}")
    form, how = FORMATS[path.suffix]
    table = rows(f"dataset=labelled_text: {path}", form, data_files=str(path), split="train", **how)
    # pandas takes the first column for the rows' names where each row has one more than the header
    if "__index_level_0__" in table.column_names:
        raise ConfigError(
            f"{path}: its rows have more columns than its header: a text with a comma is in quotes"
        )
    columns = [options.column, *([options.pair] if options.pair else []), options.label]
    if missing := [column for column in columns if column not in table.column_names]:
        has = ", ".join(table.column_names)
        raise ConfigError(f"{path}: there is no column {missing[0]!r}; it has {has}")
    *texts, labels = (list(table[column]) for column in columns)
    for number, (*some, label) in enumerate(zip(*texts, labels, strict=True), 1):
        odd = [text for text in some if not isinstance(text, str)]
        if label is None or (isinstance(label, float) and not math.isfinite(label)):
            odd.append(label)
        if odd:
            raise ConfigError(
                f"{path}: row {number} has {odd[0]}, which is no text or no label; nothing, and words such as "
                "NA and null, are None"
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


def _number(names: list[Any], label: Any, split: str) -> int:
    if label not in names:
        raise ConfigError(
            f"the {split} texts have the label {label!r}, which none for training has"
        )
    return names.index(label)
