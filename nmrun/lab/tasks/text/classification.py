"""Classification of short texts and pairs of texts, or prediction of a score, with GLUE's metrics;
and the tokenizers for them.
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from nmrun.errors import ConfigError, refused
from nmrun.lab.keys.datasets import Encoding
from nmrun.lab.tasks.base import (
    Batch,
    Categorical,
    InMemory,
    Tally,
    as_logits,
    epoch_order,
    limited,
    refuse_smoothing,
    sent,
    settings,
    shared,
    thinned,
)
from nmrun.lab.tasks.hugging_face import check_length, fetch
from nmrun.registry import find

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config

EVALUATED_AT_ONCE = 128  # texts of about the same length; bounds the memory of an evaluation


@dataclass(frozen=True)
class Encoded:
    """Texts as token numbers, one after the other: text i is ``tokens[starts[i] : starts[i + 1]]``.

    ``tokens`` (int32) and ``segments`` (uint8) have the same length; a segment is 0 for the first
    of a pair, 1 for the second. ``labels`` are int64 classes, or float32 scores.
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
    """Cross entropy over classes, or the squared error of a score (``classes`` = 1).

    Each epoch is a fresh permutation of the training texts, a pure function of (seed, epoch); a
    last smaller batch is left out. A micro-batch is (tokens, mask, segments, labels), the first
    three (texts, length of the longest of them): int64, bool (False is padding) and int64. Models
    give (texts, classes) for ``model(tokens, mask, segments)``.

    ``splits`` are texts and their labels, classes from 0 or scores. Splits beside train, val and
    test are named ``test_<suffix>`` and evaluated along with test; their metrics have the suffix
    too. ``texts`` is 2 where they are pairs. ``metrics`` are names of :func:`scores`; recipes are
    compared by the first. Raises ConfigError for fewer training texts than a batch takes, and for
    smoothed labels of scores.
    """

    higher_is_better = True  # of accuracies, F1 and correlations

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
        self.cut(len(splits["train"][0]), "training texts", batch_size, limit_batches)
        if classes == 1:
            refuse_smoothing(label_smoothing, "scores")
        kind = torch.float32 if classes == 1 else torch.int64
        self.splits = {
            name: Encoded(*tokenizer.encode(inputs), torch.tensor(labels, dtype=kind))
            for name, (inputs, labels) in splits.items()
        }
        self.has_test = "test" in splits
        self.tokenizer, self.texts = tokenizer, len(splits["train"][0][0])
        self.padding, self.classes, self.device = tokenizer.padding, classes, torch.device(device)
        self.inputs = {
            "vocabulary": tokenizer.vocabulary,
            "max_length": tokenizer.max_length,
            "classes": classes,
        }
        self.metric, self.metrics = metrics[0].rpartition(".")[2], tuple(metrics)
        self.seed, self.label_smoothing = seed, label_smoothing

    @classmethod
    def of(
        cls,
        config: Config,
        splits: Mapping[str, tuple[Sequence[Text], Sequence[float]]],
        classes: int,
        metrics: Sequence[str],
        device: torch.device,
    ) -> TextClassification:
        """The task with the tokenizer and settings of a run's config."""
        few = limited(splits, config.trainer.limit_evaluation, thinned)
        encoder = tokenizer(config.dataset.as_kind(Encoding))
        return cls(few, encoder, classes, metrics, **settings(config, device))

    def logits(self, model: Any, batch: Batch) -> Tensor:
        return as_logits(model(*batch[:-1]), batch[0].shape[:1], self.classes).float()

    def loss_of(self, logits: Tensor, batch: Batch) -> Tensor:
        return self._loss(logits, batch[-1], self.label_smoothing)

    def scores(self, model: Any, batch: Batch) -> Tensor:
        """What :meth:`metrics_of` predicts from: (texts, classes)."""
        return self.logits(model, batch)

    @torch.no_grad()
    def tally(self, model: nn.Module, split: str, rank: int = 0, world: int = 1) -> Tally:
        """The outputs for a split's texts and those evaluated with it: rows, and (texts, classes)."""
        outputs: Tally = {}
        for name in self._evaluated_with(split):
            rows, logits = [], []
            pieces = self._by_length(name).split(EVALUATED_AT_ONCE)
            for numbers, batch, counts in shared(pieces, partial(self._batch, name), rank, world):
                output = self.scores(model, batch)
                rows.append(numbers[: len(numbers) * counts])
                logits.append(output[: len(output) * counts])
            outputs[name] = torch.cat(rows), torch.cat(logits).cpu()
        return outputs

    def metrics_of(self, split: str, tallies: Sequence[Tally]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name in self._evaluated_with(split):
            rows, outputs = (
                torch.cat(parts) for parts in zip(*(tally[name] for tally in tallies), strict=True)
            )
            order = self._by_length(name)
            logits, labels = outputs[rows.argsort()][order], self.splits[name].labels[order]
            values = {
                "loss": float(self._loss(logits, labels)),
                **scores(self.metrics, self._predictions(logits), labels),
            }
            metrics |= {key + name.removeprefix(split): value for key, value in values.items()}
        return metrics

    def _evaluated_with(self, split: str) -> list[str]:
        """This split and those that are evaluated with it."""
        return [name for name in self.splits if name == split or name.startswith(f"{split}_")]

    def _by_length(self, split: str) -> Tensor:
        """The rows of a split, those of short texts first."""
        return self.splits[split].starts.diff().argsort(stable=True)

    def example(self) -> Batch:
        """Two texts of the mean length of the first epoch's batches: what an item costs depends on
        it.
        """
        order = self._permutation(0)
        whole = len(order) // self.batch_size * self.batch_size
        longest = self.splits["train"].lengths(order[:whole]).view(-1, self.batch_size).amax(1)
        return self._batch("train", order[:2], round(float(longest.double().mean())))

    def _permutation(self, epoch: int) -> Tensor:
        return epoch_order(self.seed, epoch, len(self.splits["train"]))

    def batch_of(self, *texts: Text) -> Batch:
        """Texts of anybody's, each one or a pair, with labels of 0."""
        labels = torch.zeros(len(texts), dtype=self.splits["train"].labels.dtype)
        encoded = Encoded(*self.tokenizer.encode(texts), labels)
        return self._padded(encoded, torch.arange(len(texts)))

    def _batch(self, split: str, rows: Tensor, length: int | None = None) -> Batch:
        return self._padded(self.splits[split], rows, length)

    def _padded(self, texts: Encoded, rows: Tensor, length: int | None = None) -> Batch:
        """Texts padded to the longest of them, or cut or padded to ``length``."""
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


UNDEFINED = {  # some predictions have none of these
    "f1": "sklearn.metrics.f1_score",
    "matthews": "sklearn.metrics.matthews_corrcoef",
    "pearson": "scipy.stats.pearsonr",
    "spearman": "scipy.stats.spearmanr",
}


def scores(metrics: Sequence[str], predictions: Tensor, labels: Tensor) -> dict[str, float]:
    """Scores of predictions (n,) as in GLUE (Wang et al. 2019, arXiv 1804.07461, section 3), by
    name.

    Metrics are ``accuracy``; ``f1`` of class 1; ``matthews``, Matthews' correlation; ``pearson``
    and ``spearman``, correlations of scores; the dotted path of a function of labels and
    predictions, which goes by its own name. Where one of GLUE's is undefined, because all
    predictions are the same for example, it is 0.
    """
    guess, truth = predictions.numpy(), labels.numpy()
    values = {}
    for name in metrics:
        if name == "accuracy":  # sklearn takes long to import
            value = (guess == truth).mean()
        elif name == "pearson" and len(truth) == 1:  # scipy raises where it is undefined so
            value = 0.0
        else:
            function, ours = find("dataset.metric", name, UNDEFINED), name in UNDEFINED
            with (
                refused(f"dataset.metric={name}: ", TypeError, ValueError),
                warnings.catch_warnings(),
            ):
                if ours:  # they warn of what is undefined
                    warnings.simplefilter("ignore")
                found = function(guess, truth) if ours else function(truth, guess)
                value = float(getattr(found, "statistic", found))
            if ours and np.isnan(value) and np.isfinite(guess).all():
                value = 0.0
        values[name.rpartition(".")[2]] = float(value)
    return values


Text = tuple[str, ...]  # one text, or two: a premise and a hypothesis, say


def tokenizer(options: Encoding) -> Tokenizer:
    """The tokenizer of a ``dataset:`` config: ``words``, or a folder or name of Hugging Face.
    Raises ConfigError if it cannot be had.
    """
    if options.tokenizer == "words":
        return Words(options.vocabulary, options.max_length)
    return PretrainedTokenizer(options.tokenizer, options.max_length)


class Words:
    """Words in lower case and punctuation marks, each hashed (CRC-32), which needs no file.

    0 is padding, 1 begins a text, 2 ends it, and each text of a pair; words have the ``vocabulary``
    - 3 others. Where that is too long, words go from the end of the longer text.
    """

    WORD = r"\w+|[^\w\s]"
    padding, begin, end = 0, 1, 2

    def __init__(self, vocabulary: int, max_length: int) -> None:
        self.vocabulary, self.max_length = vocabulary, max_length

    def encode(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor, Tensor]:
        tokens, segments = [], []
        for text in texts:
            parts = [self.numbers(part) for part in text]
            while sum(map(len, parts)) + len(parts) + 1 > self.max_length:
                max(parts, key=len).pop()
            tokens.append([self.begin, *(token for part in parts for token in (*part, self.end))])
            segments.append(
                [0, *(number for number, part in enumerate(parts) for _ in range(len(part) + 1))]
            )
        return _flat(tokens, segments)

    def numbers(self, text: str) -> list[int]:
        """The tokens of a text, without those that begin and end it."""
        words = re.findall(self.WORD, text.lower())
        return [3 + zlib.crc32(word.encode()) % (self.vocabulary - 3) for word in words]


class PretrainedTokenizer:
    """A tokenizer of Hugging Face. Without a token for padding, as GPT-2's, it pads with the one
    that ends a text. Raises ConfigError if it cannot be had, or cannot pad.
    """

    def __init__(self, source: str, max_length: int) -> None:
        key = "dataset.tokenizer (default: model.pretrained)"
        self.tokenizer = fetch("AutoTokenizer", key, source)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if self.tokenizer.pad_token_id is None:
            raise ConfigError(
                f"{key}={source}: it takes a tokenizer with a token that pads or one that ends a text, "
                "and this one has neither"
            )
        check_length("dataset.max_length", max_length, source, self.tokenizer.model_max_length)
        self.vocabulary, self.padding = len(self.tokenizer), self.tokenizer.pad_token_id
        self.max_length = max_length

    def encode(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor, Tensor]:
        columns = [list(column) for column in zip(*texts, strict=True)]
        encoded = self.tokenizer(
            *columns,
            truncation=True,
            max_length=self.max_length,
            return_token_type_ids=True,
            return_attention_mask=False,
        )
        # a text without tokens has one of padding, so that a network has something to see
        tokens = [some or [self.padding] for some in encoded["input_ids"]]
        segments = [some or [0] for some in encoded["token_type_ids"]]
        return _flat(tokens, segments)


Tokenizer = Words | PretrainedTokenizer
"""Turns texts into token numbers below ``vocabulary``, at most ``max_length`` for each text; ``padding``
fills up. ``encode`` gives tokens (int32) and segments (uint8) of all texts or pairs, one after the other,
and where each starts (int64, texts + 1)."""


def _flat(tokens: list[list[int]], segments: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    starts = np.cumsum([0, *map(len, tokens)])
    numbers = np.fromiter((n for text in tokens for n in text), np.int32, starts[-1])
    kinds = np.fromiter((n for text in segments for n in text), np.uint8, starts[-1])
    return torch.from_numpy(numbers), torch.from_numpy(kinds), torch.from_numpy(starts)
