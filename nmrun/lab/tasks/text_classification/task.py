"""Classification of short texts and pairs of texts, and prediction of a score for them, with GLUE's
metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nmrun.errors import ConfigError
from nmrun.lab import ranks
from nmrun.lab.keys.texts import Encoding
from nmrun.lab.tasks.base import (
    Batch,
    Categorical,
    InMemory,
    Tally,
    limited,
    sent,
    thinned,
    turns,
    watched,
)
from nmrun.lab.tasks.text_classification.tokens import Text, Tokenizer, tokenizer

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config

EVALUATED_AT_ONCE = 128  # texts of about the same length; bounds the memory of an evaluation


@dataclass(frozen=True)
class Encoded:
    """Texts as token numbers, one after the other: text i is ``tokens[starts[i] : starts[i + 1]]``.

    ``tokens`` and ``segments`` (0 for the first of a pair, 1 for the second) are int32 and uint8 of
    the same length; ``labels`` int64 classes, or float32 scores.
    """

    tokens: Tensor
    segments: Tensor
    starts: Tensor
    labels: Tensor

    def lengths(self, rows: Tensor) -> Tensor:
        """How many tokens these texts have."""
        return self.starts[rows + 1] - self.starts[rows]

    def __len__(self) -> int:
        return len(self.labels)


class TextClassification(InMemory, Categorical):
    """Cross entropy over classes, or the squared error of a score; see
    :class:`nmrun.lab.tasks.base.Task`.

    Each epoch is a fresh permutation of the training texts, a pure function of (seed, epoch); a
    last batch that would be smaller than ``batch_size`` is left out. A micro-batch is (tokens,
    mask, segments, labels), the first three (texts, length of the longest of them): int64, bool
    (False is padding) and int64. Models give (texts, classes) for ``model(tokens, mask,
    segments)``.

    Args:
        splits: texts and their labels, classes from 0 as whole numbers or (where ``classes`` is 1)
            scores. Splits beside train, val and test are named ``test_<suffix>`` and evaluated
            along with test; their metrics have the suffix too.
        classes: number of classes; 1 for a score.
        metrics: names of :func:`scores`; the first is what recipes are compared by.
        label_smoothing: torch's, in training alone.
        limit_batches: of an epoch, at most; None: all.
        device: where batches go.

    Raises:
        ConfigError: for fewer training texts than a batch takes, and for smoothed labels of scores.
    """

    def __init__(
        self,
        splits: Mapping[str, tuple[Sequence[Text], Sequence[float]]],
        tokenizer: Tokenizer,
        classes: int,
        metrics: Sequence[str],
        batch_size: int,
        seed: int,
        label_smoothing: float = 0.0,
        limit_batches: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        texts = len(splits["train"][0])
        if batch_size > texts:
            raise ConfigError(
                f"trainer.batch_size={batch_size}: there are only {texts} training texts"
            )
        if label_smoothing and classes == 1:
            raise ConfigError(
                f"trainer.label_smoothing={label_smoothing} is for classes; this data set has scores"
            )
        kind = torch.float32 if classes == 1 else torch.int64
        self.splits = {
            name: Encoded(*tokenizer.encode(some), torch.tensor(labels, dtype=kind))
            for name, (some, labels) in splits.items()
        }
        self.has_test = "test" in splits
        self.padding, self.classes, self.device = tokenizer.padding, classes, torch.device(device)
        self.inputs = {
            "vocabulary": tokenizer.vocabulary,
            "max_length": tokenizer.max_length,
            "classes": classes,
        }
        self.metric, self.metrics = metrics[0], tuple(metrics)
        self.batch_size, self.seed, self.label_smoothing = batch_size, seed, label_smoothing
        self.batches_per_epoch = min(texts // batch_size, limit_batches or texts)
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    @classmethod
    def of(
        cls,
        config: Config,
        splits: Mapping[str, tuple[Sequence[Text], Sequence[float]]],
        classes: int,
        metrics: Sequence[str],
        device: torch.device,
    ) -> TextClassification:
        """Build the task with tokenizer, batch size, seed, smoothing and limits of a run's config.

        Raises:
            ConfigError: as the class, and for a model of pairs with single texts.
        """
        if config.model.values().get("pooling") == "similarity" and len(splits["train"][0][0]) != 2:
            raise ConfigError(
                "model.pooling=similarity is for pairs of texts; this data set has single ones"
            )
        most = config.trainer.limit_evaluation
        return cls(
            limited(splits, most, thinned),
            tokenizer(config.dataset.as_kind(Encoding)),
            classes,
            metrics,
            batch_size=config.trainer.batch_size,
            seed=config.seed,
            label_smoothing=config.trainer.label_smoothing,
            limit_batches=config.trainer.limit_batches,
            device=device,
        )

    def logits(self, model: Any, batch: Batch) -> Tensor:
        logits: Tensor = model(*batch[:-1]).float()
        return logits

    def loss_of(self, logits: Tensor, batch: Batch) -> Tensor:
        return self._loss(logits, batch[-1], self.label_smoothing)

    def scores(self, model: Any, batch: Batch) -> Tensor:
        """What :meth:`metrics_of` predicts from: (texts, classes)."""
        return self.logits(model, batch)

    @torch.no_grad()
    def tally(self, model: nn.Module, split: str, rank: int = 0, world: int = 1) -> Tally:
        """What the model says of the texts of a split, and of those beside it: their rows, and
        (texts, classes).
        """
        found: Tally = {}
        for name in self._beside(split):
            rows, logits = [], []
            for some, batch, counts in ranks.in_step(self._evaluated(name, rank, world)):
                said = self.scores(model, batch)
                rows.append(some[: len(some) * counts])
                logits.append(said[: len(said) * counts])
            found[name] = torch.cat(rows), torch.cat(logits).cpu()
        return found

    def metrics_of(self, split: str, tallies: Sequence[Tally]) -> dict[str, float]:
        found: dict[str, float] = {}
        for name in self._beside(split):
            rows, said = (
                torch.cat(parts) for parts in zip(*(tally[name] for tally in tallies), strict=True)
            )
            order = self._by_length(name)
            logits, labels = said[rows.argsort()][order], self.splits[name].labels[order]
            mine = {
                "loss": float(self._loss(logits, labels)),
                **scores(self.metrics, self._predictions(logits), labels),
            }
            found |= {key + name.removeprefix(split): value for key, value in mine.items()}
        return found

    def _beside(self, split: str) -> list[str]:
        """The splits that are evaluated along with this one, and this one."""
        return [name for name in self.splits if name == split or name.startswith(f"{split}_")]

    def _evaluated(self, split: str, rank: int, world: int) -> Iterator[tuple[Tensor, Batch, bool]]:
        """A rank's batches of a split: rows, what they hold, and whether they count."""
        batches = self._by_length(split).split(EVALUATED_AT_ONCE)
        for number, counts in watched(turns(len(batches), rank, world)):
            yield batches[number], self._batch(split, batches[number]), counts

    def _by_length(self, split: str) -> Tensor:
        """The rows of a split, those of short texts first."""
        return self.splits[split].starts.diff().argsort(stable=True)

    def example(self) -> Batch:
        """Two texts, cut or padded to the mean length of the first epoch's batches: what an item
        costs depends on its length.
        """
        order = self._permutation(0)
        whole = len(order) // self.batch_size * self.batch_size
        longest = self.splits["train"].lengths(order[:whole]).view(-1, self.batch_size).amax(1)
        return self._batch("train", order[:2], round(float(longest.double().mean())))

    def _permutation(self, epoch: int) -> Tensor:
        if self._order[0] != epoch:
            # torch's CPU generator looks at the low 32 bits of a seed only, so the pair must be
            # mixed into them
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**32)
            self._order = (epoch, torch.randperm(len(self.splits["train"]), generator=generator))
        return self._order[1]

    def _batch(self, split: str, rows: Tensor, length: int | None = None) -> Batch:
        """The texts ``rows`` of a split, padded to the longest of them, or cut or padded to
        ``length``.
        """
        texts = self.splits[split]
        lengths = texts.lengths(rows)[:, None]
        columns = torch.arange(int(lengths.max()) if length is None else length)
        mask = columns < lengths
        places = torch.where(mask, texts.starts[rows, None] + columns, 0)
        tokens = torch.where(mask, texts.tokens[places], self.padding).long()
        segments = torch.where(mask, texts.segments[places], 0).long()
        batch: Batch = tokens, mask, segments, texts.labels[rows]
        return tuple(sent(tensor, self.device) for tensor in batch)

    def _loss(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        if self.classes == 1:
            return functional.mse_loss(logits[:, 0], labels)
        return functional.cross_entropy(logits, labels, label_smoothing=label_smoothing)

    def _predictions(self, logits: Tensor) -> Tensor:
        return logits[:, 0] if self.classes == 1 else logits.argmax(1)


def scores(metrics: Sequence[str], predictions: Tensor, labels: Tensor) -> dict[str, float]:
    """Score predictions as GLUE does (Wang et al. 2019, arXiv 1804.07461, section 3).

    Args:
        metrics: of ``accuracy``; ``f1`` of class 1; ``matthews``, Matthews' correlation;
            ``pearson`` and ``spearman``, correlations of scores.
        predictions: classes or scores (n,).
        labels: the right ones (n,).

    Returns:
        Each metric by name. Where one is undefined, because all predictions are the same for
        example, it is 0.
    """
    import numpy as np

    guess, truth = predictions.numpy(), labels.numpy()
    found = {}
    for name in metrics:
        if name == "accuracy":
            value = (guess == truth).mean()
        elif name == "f1":
            from sklearn.metrics import f1_score

            value = f1_score(truth, guess, zero_division=0.0)
        elif name == "matthews":
            from sklearn.metrics import matthews_corrcoef

            value = matthews_corrcoef(truth, guess)
        else:
            from scipy import stats

            varied = len(np.unique(guess)) > 1 and len(np.unique(truth)) > 1
            correlation = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}[name]
            value = correlation(guess, truth).statistic if varied else 0.0
        found[name] = float(value)
    return found
