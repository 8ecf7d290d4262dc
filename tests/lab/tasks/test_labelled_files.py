"""Texts with labels from files of one's own: splits, classes, scores, metrics, and what is refused."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import one_line
from runs import config, finished
from sklearn.metrics import balanced_accuracy_score

from nmrun.errors import ConfigError
from nmrun.lab import tasks
from nmrun.lab.tasks.text.classification import TextClassification, scores

datasets = pytest.importorskip("datasets", reason="needs nmrun[texts]")
ROWS = [(f"a {word} film, number {n}", word) for n in range(20) for word in ("good", "bad", "dull")]
FEW = ("model=text_encoder", "model.width=8", "model.heads=2", "trainer.batch_size=8")


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def written(place: Path, rows: list[dict[str, Any]]) -> Path:
    with place.open("w", newline="") as file:
        if place.suffix == ".jsonl":
            file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            table = csv.DictWriter(file, rows[0], delimiter="\t" if place.suffix == ".tsv" else ",")
            table.writeheader()
            table.writerows(rows)
    return place


def build(folder: Path, *words: str) -> TextClassification:
    cfg = config(folder, "dataset=labelled_text", *FEW, *words)
    task = tasks.build(cfg, torch.device("cpu"))
    assert isinstance(task, TextClassification)
    return task


def texts_of(task: TextClassification, split: str) -> list[tuple[tuple[int, ...], int]]:
    part = task.splits[split]
    starts = part.starts.tolist()
    tokens = [tuple(part.tokens[a:b].tolist()) for a, b in itertools.pairwise(starts)]
    return list(zip(tokens, part.labels.tolist(), strict=True))


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl"])
def test_all_texts_are_there_once_with_their_class(ending, tmp_path):
    file = written(tmp_path / f"all{ending}", [{"review": t, "verdict": v} for t, v in ROWS])
    words = (f"dataset.train={file}", "dataset.column=review", "dataset.label=verdict")
    task = build(tmp_path, *words)
    splits = [texts_of(task, split) for split in ("train", "val", "test")]
    assert [len(part) for part in splits] == [48, 6, 6]
    names = ["bad", "dull", "good"]
    encoded = [task.tokenizer.encode([(text,)])[0].tolist() for text, _ in ROWS]
    expected = [(tuple(e), names.index(v)) for e, (_, v) in zip(encoded, ROWS, strict=True)]
    assert sorted(part for split in splits for part in split) == sorted(expected)
    assert (task.classes, task.signature["classes"]) == (3, names)
    other = build(tmp_path, *words, "seed=7")
    assert texts_of(other, "val") == splits[1]
    assert texts_of(build(tmp_path, *words, "dataset.split_seed=7"), "val") != splits[1]


def test_files_of_their_own_pairs_and_scores(tmp_path):
    rows = [{"one": f"text {n}", "two": "other", "score": n / 10 + 0.05} for n in range(20)]
    files = {
        split: written(tmp_path / f"{split}.csv", part)
        for split, part in (("train", rows[:12]), ("val", rows[12:15]), ("test", rows[15:]))
    }
    task = build(
        tmp_path, *(f"dataset.{split}={file}" for split, file in files.items()),
        "dataset.column=one", "dataset.pair=two", "dataset.label=score", "dataset.metric=pearson",
    )  # fmt: skip
    assert task.classes == 1
    assert task.splits["val"].labels.tolist() == pytest.approx([1.25, 1.35, 1.45])
    assert set(task.splits["train"].segments.tolist()) == {0, 1}


def test_a_metric_of_one_s_own_decides_which_epoch_is_the_best(tmp_path):
    truth, guess = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 0, 0])
    name = "sklearn.metrics.balanced_accuracy_score"
    assert scores([name], guess, truth) == {
        "balanced_accuracy_score": balanced_accuracy_score([0, 0, 0, 1], [0, 0, 0, 0])
    }
    file = written(tmp_path / "all.csv", [{"text": t, "label": v} for t, v in ROWS])
    ends = []
    for metric, better in (("accuracy", "true"), ("sklearn.metrics.hamming_loss", "false")):
        cfg = config(
            tmp_path, "dataset=labelled_text", *FEW, f"dataset.train={file}", "recipe=sr_ste",
            f"dataset.metric={metric}", f"dataset.higher_is_better={better}",
        )  # fmt: skip
        ends.append(finished(cfg)["metrics"])
    right, loss = ends
    assert loss["final"]["eval/hamming_loss"] == pytest.approx(1 - right["final"]["eval/accuracy"])
    assert loss["best"]["step"] == right["best"]["step"]


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        ([{"body": "a", "label": 1}], (), r"there is no column 'text'; it has body, label"),
        ([{"text": "a", "label": 1}] * 20, (), "all labels of the 16 texts for training are 1"),
        ([{"text": 3, "label": n % 2} for n in range(20)], (), "row 1 has 3, which is no text"),
        ([{"text": "a", "label": ""}] * 20, (), "row 1 has None, which is no text or no label"),
        ([{"text": "a", "label": "good"}, {"text": "b", "label": "bad"}], (), "too few texts: validation and test"),
        ([{"text": "a", "label": n / 7} for n in range(20)], (), "fractions, so scores: take pearson"),
        ([{"text": "a", "label": n % 3} for n in range(40)], ("dataset.metric=f1",), "metric=f1: .*multiclass"),
        ([{"text": t, "label": v} for t, v in ROWS], ("dataset.metric=sklearn.metrics.nosuch",), "nosuch"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused_in_a_line(rows, words, message, tmp_path):
    file = written(tmp_path / "all.csv", rows)
    with one_line(ConfigError, message):
        build(tmp_path, f"dataset.train={file}", *words)


def test_a_label_that_no_training_text_has_is_refused(tmp_path):
    rows = [{"text": f"a {n}", "label": n % 2} for n in range(20)]
    train = written(tmp_path / "train.csv", rows)
    val = written(tmp_path / "val.csv", [{"text": "b", "label": 2}])
    with one_line(ConfigError, "no text for training has this label of another split: 2"):
        build(tmp_path, f"dataset.train={train}", f"dataset.val={val}")
    odd = tmp_path / "all.xlsx"
    odd.write_bytes(b"")
    with one_line(ConfigError, r"all.xlsx: it takes .csv, .tsv, .json, .jsonl, .parquet"):
        build(tmp_path, f"dataset.train={odd}")


def test_labels_of_another_kind_are_refused(tmp_path):
    train = written(tmp_path / "train.csv", [{"text": "a", "label": n / 7} for n in range(20)])
    val = written(tmp_path / "val.csv", [{"text": "b", "label": "fine"}])
    words = (f"dataset.train={train}", f"dataset.val={val}", "dataset.metric=pearson")
    with one_line(ConfigError, r"dataset.val, row 1: its label is 'fine'.* are scores"):
        build(tmp_path, *words)
    lists = written(tmp_path / "lists.jsonl", [{"text": "a", "label": [n, 1]} for n in range(20)])
    with one_line(ConfigError, r"lists.jsonl: row 1 has \[0, 1\], which is no text or no label"):
        build(tmp_path, f"dataset.train={lists}")


def test_rows_that_are_longer_than_the_header_are_refused(tmp_path):
    file = tmp_path / "all.csv"
    file.write_text("text,label\n" + "fine, but long,1\nshort, and bad,0\n" * 20)
    with one_line(ConfigError, "rows have more columns than its header"):
        build(tmp_path, f"dataset.train={file}")
