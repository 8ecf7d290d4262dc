"""Ranks share the work on the data: each prepares, decodes and evaluates its part, and together
they find what one finds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
import two_evaluate
from runs import config
from safetensors.torch import load_file
from torch import Tensor, nn

from nmrun.errors import ConfigError
from nmrun.lab import ranks, tasks
from nmrun.lab.tasks.base import Task, batches_of_rank
from nmrun.lab.tasks.vision import Classification, augmentation
from nmrun.lab.tasks.vision.augmentation import Augment
from nmrun.lab.tasks.vision.stream import ImageFiles, ImageStream

WORLD = 4
ALL = Augment(crop_padding=1, flip=True, randaugment=2, erasing=0.5)
MIXED = Augment(crop_padding=1, flip=True, randaugment=1, erasing=0.5, mixup=0.8, cutmix=1.0)


def pictures(options: Augment | None = None, batch_size: int = 24) -> Classification:
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (60, 3, 6, 6), dtype=torch.uint8, generator=random)
    return Classification(
        dict.fromkeys(("train", "val", "test"), (pixels, torch.arange(60) % 5)),
        5,
        batch_size,
        3,
        augment=options,
    )


def stream(place: Path, *overrides: str) -> ImageStream:
    two_evaluate.folder(place)
    options = (
        *two_evaluate.STREAM,
        f"dataset.path={place / 'some'}",
        "trainer.batch_size=8",
        *overrides,
    )
    task = tasks.build(config(place, *options), torch.device("cpu"))
    assert isinstance(task, ImageStream)
    return task


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The epoch and row of each image that is decoded, as it is."""
    keys, read = list[tuple[int, int]](), ImageFiles.__getitem__
    monkeypatch.setattr(
        ImageFiles, "__getitem__", lambda files, key: keys.append(key) or read(files, key)
    )
    return keys


def build(kind: str, place: Path) -> Task:
    return {
        "images": pictures,
        "augmented": lambda: pictures(ALL),
        "mixed": lambda: pictures(MIXED),
        "stream": lambda: stream(place, "dataset.randaugment=1"),
        "mixed stream": lambda: stream(place, "dataset.mixup=0.8", "dataset.erasing=0.9"),
        "language": lambda: two_evaluate.text(100, accumulate=1),
        "sentences": lambda: two_evaluate.sentences(30, 2),
        "translation": lambda: two_evaluate.translation(50, max_tokens=40),
    }[kind]()


KINDS = ("images", "augmented", "mixed", "stream", "mixed stream")
KINDS += ("language", "sentences", "translation")


# --- training batches -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_is_to_the_bit_what_it_is_in_the_whole(kind, tmp_path):
    task = build(kind, tmp_path)
    for parts in (1, 2, 3, 5, 8, 100):
        for epoch, index in ((0, 0), (1, 1)):
            whole = task.micro_batches(epoch, index, parts)
            assert task.sizes(epoch, index, parts) == [task.size(batch) for batch in whole]
            assert 0 < len(whole) <= parts
            for begin in range(len(whole)):
                for end in (begin + 1, len(whole)):
                    share = task.micro_batches(epoch, index, parts, range(begin, end))
                    for one, other in zip(share, whole[begin:end], strict=True):
                        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert task.micro_batches(0, 0, 2, range(2, 2)) == []


@pytest.mark.parametrize(("options", "extra"), [(ALL, 0), (MIXED, 1)])
def test_images_of_others_are_neither_augmented_nor_normalised(options, extra, monkeypatch):
    """With mixup or cutmix, an image is mixed with the one before it, which may be another rank's."""
    task, seen = pictures(options), dict[str, int]()

    def count(name, work):
        def watched(pixels, *args):
            seen[name] = seen.get(name, 0) + len(pixels)
            return work(pixels, *args)

        return watched

    steps = ("crop_and_flip", "rand_augment", "erase")
    for name in steps:
        monkeypatch.setattr(augmentation, name, count(name, getattr(augmentation, name)))
    task.normalise = count("normalise", task.normalise)
    for rank in range(WORLD):
        seen.clear()
        (images, _), (others, _) = task.micro_batches(
            0, 1, 2 * WORLD, range(2 * rank, 2 * rank + 2)
        )
        assert len(images) + len(others) == 24 / WORLD
        for name in (*steps, "normalise"):
            assert seen[name] == (24 / WORLD + extra) * (
                options.randaugment if name == "rand_augment" else 1
            )


@pytest.mark.parametrize("extra", [0, 1])
def test_images_of_others_are_not_decoded(extra, tmp_path, decoded):
    task = stream(tmp_path, f"dataset.mixup={extra}.0")
    task.sizes(0, 0, WORLD)
    assert not decoded
    everyones = []
    for rank in range(WORLD):
        decoded.clear()
        for epoch, index in ((0, 0), (0, 1), (0, 2), (1, 0)):  # on and on, without a new start
            task.micro_batches(epoch, index, WORLD, range(rank, rank + 1))
        assert len(decoded) == 4 * (8 / WORLD + extra)
        everyones += [row for epoch, row in decoded if epoch == 0]
    assert len(set(everyones)) == 24  # an epoch


def test_windows_and_sentences_of_others_are_not_read():
    class Watched:
        """A text that knows how many of its tokens were read."""

        def __init__(self, tokens):
            self.tokens, self.read = tokens, 0

        def __len__(self):
            return len(self.tokens)

        def __getitem__(self, places):
            self.read += places.numel() if isinstance(places, Tensor) else places.size
            return self.tokens[places]

    language = two_evaluate.text(100)
    language.batch_size = 8
    language.splits = {**language.splits, "train": Watched(language.splits["train"])}
    language.micro_batches(0, 0, WORLD, range(1, 2))
    assert language.splits["train"].read == 8 / WORLD * (5 + 1)

    texts = two_evaluate.sentences(30, 2)
    watched = Watched(texts.splits["train"].tokens)
    object.__setattr__(texts.splits["train"], "tokens", watched)
    (batch,) = texts.micro_batches(0, 0, WORLD, range(2, 3))
    assert batch[0].shape[0] == 8 / WORLD
    assert watched.read == batch[0].numel()


@pytest.mark.parametrize(
    ("cores", "here", "asked", "workers"),
    [(16, 4, "null", 4), (2, 4, "null", 1), (16, 4, "3", 3), (16, 1, "null", 16)],
)
def test_ranks_of_a_machine_share_its_cores(cores, here, asked, workers, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    assert stream(tmp_path, f"dataset.workers={asked}").workers == workers


@pytest.mark.parametrize(("count", "parts"), [(8, 2), (7, 2), (3, 1), (1, 2), (0, 2)])
def test_each_micro_batch_is_one_ranks(count, parts, monkeypatch):
    shares = []
    monkeypatch.setenv("WORLD_SIZE", str(WORLD))
    for rank in range(WORLD):
        monkeypatch.setenv("RANK", str(rank))
        shares.append(ranks.share(count, parts))
    assert [number for share in shares for number in share] == list(range(count))
    assert all(len(share) <= parts for share in shares)


# --- evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_ranks_take_turns_and_pass_as_often(count):
    for world in (1, 2, 3, 8, 10):
        shares = [batches_of_rank(count, rank, world) for rank in range(world)]
        assert {len(mine) for mine in shares} == {-(-count // world)}
        assert sorted(number for mine in shares for number, counts in mine if counts) == list(
            range(count)
        )
        assert all(0 <= number < count for mine in shares for number, _ in mine)


def check(task: Task, model: nn.Module, split: str = "test") -> None:
    """However many ranks there are, they find what one finds, in as many passes each."""
    expected = task.evaluate(model.eval(), split)
    for world in (2, 3, 11):
        seen, tallies, counts = two_evaluate.passes(model), [], set()
        for rank in range(world):
            seen.clear()
            tallies.append(task.tally(model, split, rank, world))
            counts.add(len(seen))
        metrics = task.metrics_of(split, tallies)
        assert len(counts) == 1
        assert metrics == {
            key: pytest.approx(value, rel=1e-12, abs=0) for key, value in expected.items()
        }
        exact = {"accuracy", "f1", "matthews", "spearman", "pearson"} & {*metrics}
        assert {key: metrics[key] for key in exact} == {key: expected[key] for key in exact}


@pytest.mark.parametrize("case", two_evaluate.CASES)
def test_shares_of_an_evaluation_add_up(case):
    task, model = two_evaluate.CASES[case]
    check(task(), model())


def test_shares_of_a_streams_evaluation_add_up(tmp_path, decoded):
    task = stream(tmp_path, "trainer.batch_size=3")
    torch.manual_seed(0)
    check(task, nn.Sequential(nn.Flatten(), nn.Linear(192, 2)))  # 8 images
    decoded.clear()
    task.tally(nn.Flatten(), "test", 0, 3)
    assert len(decoded) == 3


# --- two processes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By what was asked, what one process finds, and each of two."""
    place = tmp_path_factory.mktemp("shares")
    two_evaluate.folder(place / "whole")
    two_evaluate.folder(place / "damaged")
    (place / "damaged" / "some" / "train" / "bee" / "07.png").write_bytes(b"none")
    for count in (1, 2):
        process = preloaded.torchrun(two_evaluate.__file__, place, processes=count)
        assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    found = [
        json.loads((place / f"found{who}.json").read_text()) for who in ("0of1", "0of2", "1of2")
    ]
    return {asked: [each[asked] for each in found] for asked in found[0]}


@pytest.mark.slow
@pytest.mark.parametrize("case", [*two_evaluate.CASES, "shards", "shards, 1 batch", "translation"])
def test_two_processes_find_the_metrics_of_one(case, outcomes):
    if case not in outcomes:
        pytest.skip("needs nmrun[translation]")
    alone, one, other = outcomes[case]
    assert one == other
    assert one["passes"] >= 1
    assert one["passes"] <= alone["passes"] / 2 + 1 or case == "translation"
    tolerance = 1e-6 if case.startswith("shards") else 1e-12  # sums of losses, in double precision
    assert one["metrics"] == {
        key: pytest.approx(value, rel=tolerance) for key, value in alone["metrics"].items()
    }
    for key in {"accuracy", "f1", "matthews", "spearman", "pearson", "bleu"} & {*alone["metrics"]}:
        assert one["metrics"][key] == alone["metrics"][key]
    assert one.get("notes") == alone.get("notes")


@pytest.mark.slow
def test_a_rank_that_cannot_read_its_part_ends_the_run_of_all(outcomes):
    told = "the test text has the token 7, outside the vocabulary of 7"
    assert outcomes["broken text"] == [told] * 3
    for run in outcomes["damaged"]:
        assert run["status"] == "failed"
        assert "bee/07.png is damaged, or not an image" in run["error"]


@pytest.mark.slow
def test_two_processes_decode_half_each(outcomes):
    alone, one, other = outcomes["stream"]
    assert [run["trained"] for run in (alone, one, other)] == [18, 9, 9]
    assert alone["status"] == one["status"] == "finished"


@pytest.mark.slow
def test_all_ranks_evaluate_with_the_running_statistics_that_are_saved(outcomes, tmp_path):
    """Two processes evaluate together what one process finds with the weights they have saved."""
    _, run, other = outcomes["stream"]
    assert run["metrics"] == other["metrics"]
    task = stream(tmp_path, "trainer.batch_size=6")
    model = two_evaluate.Normed((3, 8, 8), 2)
    model.load_state_dict(load_file(Path(run["folder"]) / "model.safetensors"))
    for split, prefix in (("val", "eval"), ("test", "test")):
        expected = task.evaluate(model.eval(), split)
        assert run["metrics"]["final"][f"{prefix}/accuracy"] == expected["accuracy"]
        assert run["metrics"]["final"][f"{prefix}/loss"] == pytest.approx(
            expected["loss"], rel=1e-6
        )


@pytest.mark.slow
def test_a_task_that_knows_no_ranks_is_evaluated_on_each(outcomes):
    alone, one, _ = outcomes["own"]
    assert alone["status"] == one["status"] == "finished"
    assert [run["evaluations"] for run in outcomes["own"]] == [2, 2, 2]  # validation, test
    assert one["metrics"]["final"]["eval/loss"] == pytest.approx(
        alone["metrics"]["final"]["eval/loss"], rel=1e-4
    )


def test_an_own_task_says_which_way_its_metric_is_better(tmp_path, monkeypatch):
    monkeypatch.delattr(two_evaluate.Plain, "higher_is_better")
    with pytest.raises(ConfigError, match="higher_is_better"):
        tasks.build(config(tmp_path, *two_evaluate.OWN), torch.device("cpu"))
