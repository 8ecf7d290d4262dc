"""What test_shares.py asks of one process and of two: metrics of fixed models, and how runs end.
Writes one JSON a rank.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from runs import config
from torch import Tensor, nn
from torch.nn import functional

from nmrun.errors import RunError
from nmrun.lab import models, ranks
from nmrun.lab.config.identity import run_folder
from nmrun.lab.tasks.base import Task, picked
from nmrun.lab.tasks.text.classification import TextClassification, Words
from nmrun.lab.tasks.text.language import LanguageModelling
from nmrun.lab.tasks.vision import Classification
from nmrun.lab.tasks.vision.stream import ImageFiles
from nmrun.lab.train import runner
from nmrun.papers.translation.fairseq import dictionary
from nmrun.papers.translation.task import Corpus, Translation

RUN = ("trainer.epochs=1", "trainer.log_every=1")
STREAM = ("dataset=imagenet", "dataset.path=some", "dataset.resolution=8", "dataset.val_size=6", "dataset.workers=0",
          "trainer.batch_size=6", "model.channels=[8,8,8]", *RUN)  # fmt: skip
OWN = (
    "dataset=digits",
    "+dataset._target_=two_evaluate.plain",
    "model=mlp",
    "model.hidden=[8,8]",
    "recipe=dense",
    *RUN,
)


# --- tasks and models -----------------------------------------------------------------------------


def images(count: int, batch_size: int = 12) -> Classification:
    """``count`` images a split, evaluated 1024 at a time."""
    random = torch.Generator().manual_seed(count)
    pixels = torch.randint(256, (count, 1, 4, 4), dtype=torch.uint8, generator=random)
    splits = dict.fromkeys(("train", "val", "test"), (pixels, torch.arange(count) % 3))
    return Classification(splits, 3, batch_size, seed=0)


def text(tokens: int, **options: Any) -> LanguageModelling:
    """Splits of so many tokens, evaluated in windows of 5, two at a time."""
    random = np.random.default_rng(tokens)
    splits = {name: random.integers(7, size=tokens) for name in ("train", "val", "test")}
    return LanguageModelling(splits, 7, 5, 2, seed=0, **options)


def sentences(count: int, classes: int) -> TextClassification:
    """``count`` texts in test and as many in ``test_other``, evaluated 128 at a time."""
    random = np.random.default_rng(count)
    texts = [
        (" ".join(f"w{word}" for word in random.integers(50, size=size)),)
        for size in random.integers(1, 9, count)
    ]
    labels = (
        random.random(count).tolist()
        if classes == 1
        else random.integers(classes, size=count).tolist()
    )
    metrics = ("spearman", "pearson") if classes == 1 else ("matthews", "accuracy", "f1")
    splits = dict.fromkeys(("train", "val", "test", "test_other"), (texts, labels))
    return TextClassification(splits, Words(64, 16), classes, metrics, batch_size=8, seed=0)


def translation(count: int, max_tokens: int = 16) -> Translation:
    """``count`` sentences of 2 to 6 tokens a split."""
    random = np.random.default_rng(count)
    corpus = Corpus.of(
        [[*random.integers(4, 8, size).tolist(), 2] for size in random.integers(1, 6, count)]
    )
    words = dictionary(["a", "b", "c", "d"])
    references = dict.fromkeys(("val", "test"), ["a b c d a"] * count)
    splits = dict.fromkeys(("train", "val", "test"), (corpus, corpus))
    return Translation(splits, words, words, references, " ".join, max_tokens, seed=0, beam=2)


class Linear(nn.Module):
    """Of images, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.last = nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x.flatten(1)))


class Following(nn.Module):
    """Logits of the next token from the present one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class Words64(nn.Module):
    """The mean of what the words of a text say."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(64, classes)

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        return (self.table(tokens) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


CASES: dict[str, tuple[Any, Any]] = {
    "images, 3 batches": (lambda: images(2500), Linear),
    "images, 1 batch": (lambda: images(37), Linear),
    "text, 6 batches and a short one": (lambda: text(58 + 1), Following),
    "text, 1 batch": (lambda: text(10 + 1), Following),
    "classes, 3 batches": (lambda: sentences(300, 2), lambda: Words64(2)),
    "scores, 3 batches": (lambda: sentences(301, 1), lambda: Words64(1)),
    "scores, 1 batch": (lambda: sentences(20, 1), lambda: Words64(1)),
}


def picture(path: Path, value: int) -> None:
    """An image of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((9, 9, 3), value, np.uint8)).save(path)


def folder(place: Path) -> Path:
    """Images of two classes, 15 each for training (6 of all for validation) and 4 each for test."""
    for split, count in (("train", 15), ("val", 4)):
        for name, value in (("ant", 40), ("bee", 160)):
            for number in range(count):
                picture(place / "some" / split / name / f"{number:02}.png", value + 3 * number)
    return place


class Plain(Task):
    """A task of one's own that evaluates a whole split on each rank."""

    batches_per_epoch, metric, higher_is_better = 3, "accuracy", True
    inputs = {"shape": (4,), "classes": 2}
    evaluations = 0

    def micro_batches(
        self, epoch: int, index: int, parts: int, mine: range | None = None
    ) -> list[tuple[Tensor, ...]]:
        x = torch.randn(10, 4, generator=torch.Generator().manual_seed(index))
        pieces = list(zip(x.chunk(parts), (x[:, 0] > 0).long().chunk(parts), strict=True))
        return picked(pieces, mine)

    def size(self, batch: tuple[Tensor, ...]) -> int:
        return len(batch[0])

    def loss(self, model: Any, batch: tuple[Tensor, ...]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        Plain.evaluations += 1
        x, y = self.micro_batches(0, 0, 1)[0]
        return {
            "loss": float(self.loss(model, (x, y))),
            "accuracy": float((model(x).argmax(1) == y).float().mean()),
        }

    def example(self) -> tuple[Tensor, ...]:
        return torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)


def plain(config: Any, device: torch.device) -> Plain:
    return Plain()


class Normed(nn.Module):
    """A network for images with running statistics, of which every rank sees others in training."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.inner, self.norm, self.last = (
            nn.Conv2d(shape[0], 8, 3),
            nn.BatchNorm2d(8, momentum=0.9),
            nn.Linear(8, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.inner(x)).relu().mean((2, 3)))


# --- what is asked --------------------------------------------------------------------------------


def passes(model: nn.Module) -> list[int]:
    """A list that grows with every pass through ``model``."""
    seen: list[int] = []
    model.register_forward_hook(lambda *_: seen.append(1))
    return seen


def metrics(task: Task, model: nn.Module, split: str = "test") -> dict[str, Any]:
    """Metrics of a split, and how many passes this rank has made."""
    seen = passes(model)
    return {"metrics": task.evaluate(model.eval(), split), "passes": len(seen)}


def in_shards(task: Task, model: nn.Module) -> dict[str, Any]:
    """The same of a model in shards, which all ranks have to pass through together."""
    if ranks.world() > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (ranks.world(),)))
    return metrics(task, model)


def translated() -> dict[str, Any]:
    """BLEU by beam search over 7 batches."""
    task = translation(40)
    small = {"width": 16, "ffn": 16, "layers": 1, "heads": 2, "share_embeddings": "auto"}
    none = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    torch.manual_seed(0)
    model = models.build({"name": "fairseq_transformer", **small, **none}, task.inputs)
    return metrics(task, model) | {"notes": dict(task.notes)}


def broken_text() -> str:
    """What is said of a token that is outside of the vocabulary, in a batch that one rank reads."""
    task = text(58 + 1)
    task.splits["test"][15] = 7
    try:
        task.evaluate(Following(), "test")
    except RunError as error:
        return str(error)
    return ""


def run(place: Path, *overrides: str) -> dict[str, Any]:
    """A run's result, and how many images this rank has decoded to train on."""
    cfg, decoded = config(place, *overrides), []
    read = ImageFiles.__getitem__

    def watched(files: ImageFiles, key: tuple[int, int]) -> Any:
        decoded.append(key)
        return read(files, key)

    ImageFiles.__getitem__ = watched
    try:
        result = runner.run(cfg, run_folder(cfg))
    finally:
        ImageFiles.__getitem__ = read
    summary = {key: result.get(key) for key in ("status", "error", "metrics", "folder")}
    return summary | {"trained": sum(epoch >= 0 for epoch, _ in decoded)}


def main(place: Path) -> dict[str, Any]:
    """``place`` has the folders ``whole`` and ``damaged`` of images."""
    ranks.begin("cpu")
    results: dict[str, Any] = {
        name: metrics(task(), model()) for name, (task, model) in CASES.items()
    }
    results["shards"] = in_shards(images(2500), Linear())
    results["shards, 1 batch"] = in_shards(images(37), Linear())
    if importlib.util.find_spec("sacrebleu") and importlib.util.find_spec("fairseq"):
        results["translation"] = translated()
    results["broken text"] = broken_text()
    build = models.build
    models.build = lambda options, inputs: Normed(**inputs)
    runs = place / f"runs{ranks.world()}"
    whole, damaged = (f"dataset.path={place / name / 'some'}" for name in ("whole", "damaged"))
    results["stream"] = run(runs, *STREAM, whole, "recipe=dense")
    models.build = build
    results["damaged"] = run(runs, *STREAM, damaged, "recipe=ste")
    results["own"] = run(runs, *OWN) | {"evaluations": Plain.evaluations}
    return results


if __name__ == "__main__":
    sys.modules["two_evaluate"] = sys.modules["__main__"]  # one Plain, however it is imported
    results = main(Path(sys.argv[1]))
    (Path(sys.argv[1]) / f"found{ranks.rank()}of{ranks.world()}.json").write_text(
        json.dumps(results)
    )
