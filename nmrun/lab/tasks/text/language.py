"""Language modelling: the next token from those before it, in windows of a long text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from nmrun.errors import ConfigError, RunError
from nmrun.lab.keys.datasets import Context
from nmrun.lab.tasks.base import (
    Batch,
    Categorical,
    Tally,
    as_logits,
    limited,
    picked,
    sent,
    settings,
    shared,
)

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config


def cross_entropy(logits: Tensor, following: Tensor, **options: Any) -> Tensor:
    """torch's, in float32: of logits (B, T, V) and the next tokens (B, T)."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten(), **options)


class LanguageModelling(Categorical):
    """Cross entropy of the next token of running text.

    A training batch is ``batch_size`` windows of ``context`` + 1 tokens from random places of the
    training text, which depend on (seed, epoch, index) alone. An epoch has as many windows as fit
    into the text side by side. An evaluation predicts every token of a split but the first exactly
    once, from the at most ``context`` tokens before it in its window. With a ``stride`` below
    ``context`` windows overlap, and a token counts in the first window that has it.

    ``splits`` are token numbers (tokens,), in memory or mapped from a file. ``unit`` is what a
    token is, such as ``byte``; bits are per unit. As many windows are evaluated at once as a batch
    has in ``accumulate`` micro-batches. Raises ConfigError for a split that is shorter than a window, and a
    longer stride.
    """

    metric = "perplexity"
    higher_is_better = False
    codec: Callable[[], Any] | None = None
    """How texts become these tokens and the other way round, a ``Codec`` of :mod:`nmrun.lab.tasks.text.files`;
    None where that is not known."""

    def __init__(
        self,
        splits: Mapping[str, NDArray[Any]],
        vocabulary: int,
        context: int,
        batch_size: int,
        seed: int,
        unit: str = "token",
        label_smoothing: float = 0.0,
        accumulate: int = 1,
        limit_batches: int | None = None,
        device: torch.device | str = "cpu",
        compiled: bool = False,
        stride: int | None = None,
    ) -> None:
        for name, text in splits.items():
            if len(text) <= context:
                raise ConfigError(
                    f"dataset.context={context}: the {name} text has only {len(text)} tokens; it takes one more than context"
                )
        if stride is not None and stride > context:
            raise ConfigError(
                f"dataset.stride={stride}: it takes at most dataset.context={context}, or no window would have what lies between"
            )
        self.has_test = "test" in splits
        self.splits, self.unit, self.device = splits, unit, torch.device(device)
        self.vocabulary, self.context, self.stride = vocabulary, context, stride or context
        self.inputs = {"vocabulary": vocabulary, "context": context}
        self.batch_size, self.seed, self.label_smoothing = batch_size, seed, label_smoothing
        # Compiled, it reads the logits, the largest tensor of all, in their own precision; else it
        # writes them once more in float32.
        self._cross_entropy = torch.compile(cross_entropy) if compiled else cross_entropy
        # windows: as much as training has memory for
        self.evaluated_at_once = -(-batch_size // accumulate)
        whole = (len(splits["train"]) - 1) // context
        if batch_size > whole:
            raise ConfigError(
                f"trainer.batch_size={batch_size}: the training text has {len(splits['train'])} tokens, "
                f"{whole} windows of dataset.context={context}; a batch takes {whole} at most"
            )
        batches = whole // batch_size
        self.batches_per_epoch = min(batches, limit_batches or batches)

    @classmethod
    def of(
        cls,
        config: Config,
        splits: Mapping[str, NDArray[Any]],
        vocabulary: int,
        device: torch.device,
        unit: str = "token",
    ) -> LanguageModelling:
        context = config.dataset.as_kind(Context).context
        most = config.trainer.limit_evaluation
        return cls(
            limited(splits, most, lambda text, windows: text[: windows * context + 1]),
            vocabulary,
            context,
            unit=unit,
            accumulate=config.trainer.accumulate,
            compiled=bool(config.trainer.compile),
            stride=config.dataset.mapping().get("stride"),
            **settings(config, device),
        )

    def micro_batches(
        self, epoch: int, index: int, parts: int, mine: range | None = None
    ) -> list[Batch]:
        random = np.random.default_rng((self.seed, epoch, index))
        starts = random.integers(len(self.splits["train"]) - self.context, size=self.batch_size)
        pieces = np.array_split(starts, min(parts, self.batch_size))
        return [self._batch("train", piece, self.context) for piece in picked(pieces, mine)]

    def sizes(self, epoch: int, index: int, parts: int) -> list[int]:
        pieces = np.array_split(np.arange(self.batch_size), min(parts, self.batch_size))
        return [len(piece) * self.context for piece in pieces]

    def size(self, batch: Batch) -> int:
        return batch[1].numel()

    def logits(self, model: Any, batch: Batch) -> Tensor:
        return as_logits(model(batch[0]), batch[0].shape, self.inputs["vocabulary"])

    def loss_of(self, logits: Tensor, batch: Batch) -> Tensor:
        # FLOPs are counted on the meta device, which has no compiler
        compute = cross_entropy if logits.is_meta else self._cross_entropy
        return compute(logits, batch[1], label_smoothing=self.label_smoothing)

    @torch.no_grad()
    def tally(self, model: nn.Module, split: str, rank: int = 0, world: int = 1) -> Tally:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        batches = self._evaluated(split)
        for (*_, tail), (tokens, following), counts in shared(
            batches, lambda batch: self._batch(split, *batch[:2]), rank, world
        ):
            logits = model(tokens)
            if counts:
                total += cross_entropy(logits[:, -tail:], following[:, -tail:], reduction="sum")
        return {"loss": float(total)}

    def metrics_of(self, split: str, tallies: Sequence[Tally]) -> dict[str, float]:
        loss = sum(tally["loss"] for tally in tallies) / (len(self.splits[split]) - 1)
        perplexity = math.exp(loss) if loss < 700 else math.inf
        return {"loss": loss, "perplexity": perplexity, f"bits_per_{self.unit}": loss / math.log(2)}

    def _evaluated(self, split: str) -> list[tuple[NDArray[Any], int, int]]:
        """The batches of an evaluation: where windows begin, their length, and how many targets at a
        window's end no window before it has.
        """
        context, stride, predicted = self.context, self.stride, len(self.splits[split]) - 1
        starts = np.arange(0, predicted - context + 1, stride)
        # of the first window all targets are new: one by itself, unless all windows are so
        first = 0 if stride == context else 1
        pieces = np.split(starts, range(first, len(starts), self.evaluated_at_once))
        batches = [(some, context, stride if some[0] else context) for some in pieces if len(some)]
        begin = starts[-1] + stride
        if rest := predicted - (starts[-1] + context):
            batches.append((np.array([begin]), predicted - begin, rest))
        return batches

    def example(self) -> Batch:
        return self._batch("train", np.arange(2), self.context)

    def _batch(self, split: str, starts: NDArray[Any], length: int) -> Batch:
        """(inputs, targets), both (windows, ``length``) int64, of windows from ``starts`` on."""
        windows = self.splits[split][starts[:, None] + np.arange(length + 1)].astype(np.int64)
        # on a GPU the embedding would only report a failed assertion
        if windows.max() >= self.vocabulary:
            raise RunError(
                f"the {split} text has the token {windows.max()}, outside the vocabulary of {self.vocabulary}"
            )
        tokens = sent(torch.from_numpy(windows), self.device)
        return tokens[:, :-1], tokens[:, 1:]
