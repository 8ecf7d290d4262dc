"""Texts by Hugging Face's datasets, from files: what a run gets of them, and what is wrong with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from errors import one_line

from nmrun.errors import ConfigError
from nmrun.lab import tasks
from nmrun.lab.tasks.text.language import LanguageModelling

datasets = pytest.importorskip("datasets", reason="needs nmrun[texts]")

TEXTS = {
    "train": [f"The {number % 3}th row, äh.\nWith two lines." for number in range(40)],
    "validation": ["", "One more.", "And another one, to be long enough."],
    "test": ["The end of it all, in a text that is long enough."],
}


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NMRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A file of each split, with a column of texts and one of numbers."""
    (tmp_path / "texts").mkdir()
    for split, rows in TEXTS.items():
        lines = [json.dumps({"body": row, "number": n}) for n, row in enumerate(rows)]
        (tmp_path / "texts" / f"{split}.jsonl").write_text("\n".join(lines))
    return tmp_path / "texts"


def build(tmp_path: Path, *words: str) -> LanguageModelling:
    defaults = ("dataset=hub_text", "model=gpt_tiny", "dataset.context=16", "trainer.batch_size=4")
    cfg = runs.config(tmp_path, *defaults, *words)
    task = tasks.build(cfg, torch.device("cpu"))
    assert isinstance(task, LanguageModelling)
    return task


def test_rows_are_joined_by_an_empty_line_but_for_those_without_a_text(folder, tmp_path):
    with (folder / "train.jsonl").open("a") as file:
        file.write('\n{"body": null, "number": 40}\n{"body": "Last.", "number": null}')
    task = build(tmp_path, f"dataset.path={folder}", "dataset.column=body")
    expected = {**TEXTS, "train": [*TEXTS["train"], "Last."]}
    for ours, theirs in (("train", "train"), ("val", "validation"), ("test", "test")):
        assert bytes(task.splits[ours]) == "\n\n".join(expected[theirs]).encode()


def test_parts_of_a_split_and_one_format(folder, tmp_path):
    """Other rows are encoded anew."""
    where = ("dataset.path=json", f"dataset.files={folder}/train.jsonl", "dataset.column=body")
    for count, share in ((30, "75%"), (20, "50%")):
        cut = (f'dataset.train="train[:{share}]"', f'dataset.val="train[{share}:]"')
        task = build(tmp_path, *where, *cut, "dataset.test=null", "dataset.tokenizer=word")
        assert not task.has_test
        text = "\n\n".join(TEXTS["train"][:count])
        words = [word for line in text.split("\n") for word in (*line.split(), "<eos>")]
        numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
        assert np.array_equal(task.splits["train"], [numbers[word] for word in words])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("dataset.column=text",), r"dataset\.column=text: no column of texts in .*\(of texts are body\)"),
        (("dataset.column=number",), r"dataset\.column=number: no column of texts in"),
        (("dataset.column=body", "dataset.val=valid"), r"dataset\.path=.*: valid cannot be loaded \("),
        (("dataset.path=./nowhere",), r"dataset\.path=\./nowhere: train cannot be loaded \("),
        (("dataset.column=body", "dataset.context=100"), r"the val text has only \d+ tokens"),
    ],
)  # fmt: skip
def test_mistakes_get_a_line(folder, tmp_path, words, line):
    with one_line(ConfigError, line):
        build(tmp_path, f"dataset.path={folder}", *words)


def test_a_damaged_file_is_named_with_its_mistake(folder, tmp_path):
    (folder / "train.jsonl").write_text('{"body": \n')
    with one_line(ConfigError, r"train cannot be loaded \(JSON parse error"):
        build(tmp_path, f"dataset.path={folder}")


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[texts\]'"):
        build(tmp_path, "dataset.path=somewhere")


def test_a_column_of_lists_of_texts_is_none_of_texts(folder, tmp_path):
    for file in folder.iterdir():
        file.write_text('{"words": ["a", "b"], "body": "a b"}\n' * 9)
    with one_line(ConfigError, r"dataset.column=words: no column .*of texts are body\)"):
        build(tmp_path, f"dataset.path={folder}", "dataset.column=words")
