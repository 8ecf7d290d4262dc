"""What is evaluated is not what was trained on, in every data set that nmrun generates or divides."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import make_folder
from runs import config

from nmrun.errors import ConfigError
from nmrun.lab import tasks
from nmrun.lab.keys import options
from nmrun.lab.keys.datasets import LabelledText
from nmrun.lab.tasks.text import files, labelled
from nmrun.lab.tasks.vision import images
from nmrun.papers.reading.task import Question, load_squad
from nmrun.papers.reading.task import generated as generated_questions
from nmrun.papers.translation import CopyReverse
from nmrun.papers.translation.data import generated as generated_sentences

Splits = dict[str, list[Any]]

# their makers have divided them
DIVIDED = {"hub_text", "wikitext2", "wikitext103", "token_bin", "multi30k", "fairseq"}


def task(tmp_path: Path, *overrides: str) -> Any:
    return tasks.build(config(tmp_path, *overrides, "trainer.batch_size=4"), torch.device("cpu"))


def pixels(splits: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> Splits:
    return {name: [x.numpy().tobytes() for x in images] for name, (images, _) in splits.items()}


def from_pool(name: str) -> Callable[[Path, pytest.MonkeyPatch], Splits]:
    def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Splits:
        drawn = (torch.randint(256, (rows, 3, 8, 8), dtype=torch.uint8) for rows in (200, 50))
        several = [(some, torch.arange(len(some)) % 10) for some in drawn]
        read = (*several, [*"0123456789"], tmp_path)
        monkeypatch.setattr(images, "read_torchvision", lambda _: read)
        return pixels(task(tmp_path, f"dataset={name}").splits)

    return build


def folder(tmp_path: Path, _: Any) -> Splits:
    make_folder(tmp_path, splits={"some": 20})
    path = f"dataset.path={tmp_path / 'some'}"
    return pixels(task(tmp_path, "dataset=image_folder", path, "dataset.resolution=8").splits)


def imagenet(tmp_path: Path, _: Any) -> Splits:
    make_folder(tmp_path / "some", splits={"train": 20, "val": 20})
    words = (f"dataset.path={tmp_path / 'some'}", "dataset.resolution=8", "dataset.val_size=6")
    stream = task(tmp_path, "dataset=imagenet", *words, "dataset.workers=0")
    return {name: rows.tolist() for name, (rows, _) in stream.splits.items()}


def some_glue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Splits:
    monkeypatch.setenv("NMRUN_DATA", str(tmp_path))
    (tmp_path / "glue" / "SST-2").mkdir(parents=True)
    for name, first, last in (("train", 0, 100), ("dev", 100, 120)):
        rows = "".join(f"text {number}\t{number % 2}\n" for number in range(first, last))
        (tmp_path / "glue" / "SST-2" / f"{name}.tsv").write_text(f"sentence\tlabel\n{rows}")
    return {name: texts for name, (texts, _) in labelled.load_glue("sst2", held_out=0.1).items()}


def some_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Splits:
    texts = [(f"text {number}",) for number in range(100)]
    splits: dict[str, labelled.Rows] = {"train": (texts, [0] * 100)}
    labelled.cut(splits, LabelledText("labelled_text", train=""))
    return {name: texts for name, (texts, _) in splits.items()}


def some_articles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Splits:
    monkeypatch.setenv("NMRUN_DATA", str(tmp_path))
    (tmp_path / "squad").mkdir()
    for name, numbers in (("train", range(40)), ("dev", range(40, 50))):
        asked = {
            number: [{"id": str(number), "question": "?", "answers": []}] for number in numbers
        }
        texts = [[{"context": f"text {number}", "qas": some}] for number, some in asked.items()]
        data = json.dumps({"data": [{"paragraphs": some} for some in texts]})
        (tmp_path / "squad" / f"{name}-v2.0.json").write_text(data)
    return texts_of(load_squad("v2.0"))


def texts_of(splits: dict[str, list[Question]]) -> Splits:
    return {name: [question.text for question in asked] for name, asked in splits.items()}


def text(name: str) -> Callable[[Path, pytest.MonkeyPatch], Splits]:
    def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Splits:
        monkeypatch.setenv("NMRUN_DATA", str(tmp_path))
        file = tmp_path / "tinyshakespeare" / "input.txt"
        file.parent.mkdir()
        file.write_text("\n".join(f"word{number}" for number in range(3000)))
        words = [f"dataset.train={file}"] if name == "text" else ["dataset.tokenizer=byte"]
        splits = task(tmp_path, f"dataset={name}", "model=gpt_tiny", *words).splits
        return {split: bytes(array.astype(np.uint8)).split() for split, array in splits.items()}

    return build


def modules(*_: Any) -> Splits:
    return {name: [*some] for name, some in files.MODULES.items()}


def all_modules(*_: Any) -> Splits:
    """What the files of the library contain, so that copies of a file would be seen."""
    folder = Path(sysconfig.get_path("stdlib"))
    return {
        split: [text for name in names if len(text := (folder / name).read_bytes()) > 1000]
        for split, names in files.all_modules(folder).items()
    }


def some_sentences(**sizes: int) -> dict[str, list[tuple[list[int], list[int]]]]:
    keys = {"size": 8000, "val_size": 200, "test_size": 200, "words": 16, "longest": 6} | sizes
    dataset = CopyReverse(
        name="copy_reverse", split_seed=0, max_tokens=512, beam=5, length_penalty=1.0, **keys
    )  # fmt: skip
    return generated_sentences(dataset)


def sentences(**sizes: int) -> Callable[[Path, pytest.MonkeyPatch], Splits]:
    return lambda *_: {
        name: [tuple(source) for source, _ in pairs]
        for name, pairs in some_sentences(**sizes).items()
    }


MADE: dict[str, Callable[[Path, pytest.MonkeyPatch], Splits]] = {
    "digits": lambda *_: pixels(images.load_digits()[0]),
    **{name: from_pool(name) for name in ("cifar10", "cifar100", "fashion_mnist")},
    "image_folder": folder,
    "imagenet": imagenet,
    "generated_text": lambda *_: {name: texts for name, (texts, _) in labelled.generated_reviews().items()},
    "glue": some_glue,
    "glue_text": some_glue,  # glue's splits, asked otherwise
    "labelled_text": some_rows,
    "generated_questions": lambda *_: texts_of(generated_questions(2000, 0)),
    "squad": some_articles,
    "stdlib_text": modules,
    "stdlib_text_all": all_modules,
    "text": text("text"),
    "shakespeare": text("shakespeare"),
    "copy_reverse": sentences(),
    "copy_reverse, as in the smoke tables": sentences(size=4000, words=10),
    "copy_reverse, nearly all there are": sentences(size=230, val_size=20, test_size=40, words=5, longest=3),
}  # fmt: skip


def test_every_data_set_is_looked_at():
    assert {name.partition(",")[0] for name in MADE} | DIVIDED == set(options.names("dataset"))


@pytest.mark.parametrize("name", MADE)
def test_no_item_is_in_two_splits(name, tmp_path, monkeypatch):
    monkeypatch.setenv("NMRUN_CACHE", str(tmp_path / "cache"))
    splits = MADE[name](tmp_path, monkeypatch)
    assert set(splits) == {"train", "val", "test"}
    seen: dict[Hashable, str] = {}
    for split, items in splits.items():
        assert items
        elsewhere = [item for item in items if seen.setdefault(item, split) != split]
        assert len(elsewhere) == 0, f"{len(elsewhere)} of {len(items)} of {split}"


# --- copy_reverse ---------------------------------------------------------------------------------


def test_targets_are_what_the_first_word_says_and_lengths_are_alike_in_all_splits():
    splits = some_sentences(size=2000, val_size=1000, test_size=1000, words=10)
    for pairs in splits.values():
        for (order, *words, end), target in pairs:
            assert target == [*(words if order == 4 else words[::-1]), end]
    lengths = {name: [len(source) for source, _ in pairs] for name, pairs in splits.items()}
    means = {name: np.mean(of) for name, of in lengths.items()}
    error = np.std(lengths["train"]) * (1 / 1000 + 1 / 2000) ** 0.5
    assert all(abs(mean - means["train"]) < 3 * error for mean in means.values())


def test_more_sentences_than_there_are():
    with pytest.raises(ConfigError, match="there are 24 different ones"):
        some_sentences(size=21, val_size=2, test_size=2, words=2, longest=3)
