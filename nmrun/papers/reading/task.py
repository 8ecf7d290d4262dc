"""Reading comprehension: the passage of a text that answers a question, or that there is none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from nmrun.errors import ConfigError
from nmrun.lab import ranks
from nmrun.lab.keys.texts import Encoding
from nmrun.lab.tasks.base import Batch, InMemory, Tally, limited, sent, turns, watched
from nmrun.lab.tasks.text_classification.tokens import Tokenizer, tokenizer
from nmrun.papers.reading.answers import Question, scores
from nmrun.papers.reading.keys import Windowed
from nmrun.papers.reading.windows import NOWHERE, TextWindow, windows

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config

EVALUATED_AT_ONCE = 32  # windows; each takes length^2 numbers
LONGEST = 30  # tokens of an answer, as in the usual scripts


class Reading(InMemory):
    """Cross entropy of the answer's first token and of its last one, their mean; see
    :class:`nmrun.lab.tasks.base.Task`.

    A long text is several windows. A window that does not have the answer points to its first
    token, and so does one of a question without an answer. A micro-batch is (tokens, mask,
    segments, spans), the first three (windows, length) int64, bool (False is padding) and int64,
    the last one (windows, 2) int64. Models give (windows, length, 2) for ``model(tokens, mask,
    segments)``. An answer is the span of at most 30 tokens of the text with the largest sum of both
    scores, over all windows; where some questions have none, it is none if the first tokens' sum is
    larger (in the window where it is least).

    Args:
        seed: of the order, a fresh permutation of the training windows each epoch.
        limit_batches: of an epoch, at most; None: all.
        device: where batches go.

    Raises:
        ConfigError: for fewer training windows than a batch takes, and for a question that is too
            long.
    """

    metric = "f1"

    def __init__(
        self,
        splits: Mapping[str, Sequence[Question]],
        tokenizer: Tokenizer,
        stride: int,
        batch_size: int,
        seed: int,
        limit_batches: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.questions = splits
        self.windows = {name: windows(some, tokenizer, stride) for name, some in splits.items()}
        count = len(self.windows["train"])
        if batch_size > count:
            raise ConfigError(
                f"trainer.batch_size={batch_size}: there are only {count} training windows"
            )
        self.padding, self.device = tokenizer.padding, torch.device(device)
        self.inputs = {"vocabulary": tokenizer.vocabulary, "max_length": tokenizer.max_length}
        self.batch_size, self.seed = batch_size, seed
        self.batches_per_epoch = min(count // batch_size, limit_batches or count)
        some_have_none = any(not q.answers for name in splits for q in splits[name])
        self.may_have_none = some_have_none
        self._order: tuple[int, list[int]] = (-1, [])

    @classmethod
    def of(
        cls, config: Config, splits: Mapping[str, Sequence[Question]], device: torch.device
    ) -> Reading:
        """Build the task with tokenizer, batch size, seed and limits of a run's config."""
        most = config.trainer.limit_evaluation
        if config.trainer.label_smoothing:
            raise ConfigError(
                f"trainer.label_smoothing={config.trainer.label_smoothing} is for classes; this data set has answers"
            )
        return cls(
            limited(splits, most, lambda some, most: some[:: -(-len(some) // most)]),
            tokenizer(config.dataset.as_kind(Encoding)),
            config.dataset.as_kind(Windowed).stride,
            batch_size=config.trainer.batch_size,
            seed=config.seed,
            limit_batches=config.trainer.limit_batches,
            device=device,
        )

    def loss(self, model: Any, batch: Batch) -> Tensor:
        *asked, spans = batch
        return _losses(model(*asked).float(), asked[1], spans).mean()

    def example(self) -> Batch:
        """Two windows of the mean length of all."""
        some = self.windows["train"]
        mean = round(float(np.mean([len(window.tokens) for window in some])))
        nearest = sorted(range(len(some)), key=lambda row: abs(len(some[row].tokens) - mean))
        return self._batch("train", nearest[:2])

    @torch.no_grad()
    def tally(self, model: nn.Module, split: str, rank: int = 0, world: int = 1) -> Tally:
        """Of each window its number, loss, best span's score and characters, and the score of none."""
        rows, found = [], []
        for some, batch, counts in ranks.in_step(self._evaluated(split, rank, world)):
            *asked, spans = batch
            said = model(*asked).float()
            losses = _losses(said, asked[1], spans).cpu().double()
            begins, ends = (self._places(split, some, side) for side in ("begins", "ends"))
            best, start, end = (
                t.cpu() for t in best_spans(said, (begins != NOWHERE).to(said.device))
            )
            each = torch.arange(len(some))
            none = (said[:, 0, 0] + said[:, 0, 1]).cpu().double()
            characters = begins[each, start].double(), ends[each, end].double()
            rows += some[: len(some) * counts]
            found.append(
                torch.stack([losses, best.double(), *characters, none], 1)[: len(some) * counts]
            )
        return {"rows": rows, "found": torch.cat(found)}

    def metrics_of(self, split: str, tallies: Sequence[Tally]) -> dict[str, float]:
        rows = [row for tally in tallies for row in tally["rows"]]
        order = np.argsort(rows, kind="stable")
        found = torch.cat([tally["found"] for tally in tallies])[torch.from_numpy(order)]
        questions = self.questions[split]
        best: list[tuple[float, int, int]] = [(-np.inf, 0, 0)] * len(questions)
        none = [np.inf] * len(questions)
        for window, (_, score, start, end, without) in zip(
            self.windows[split], found.tolist(), strict=True
        ):
            if score > best[window.row][0]:
                best[window.row] = score, int(start), int(end)
            none[window.row] = min(none[window.row], without)
        given = [
            "" if self.may_have_none and none[row] > score else questions[row].text[start:end]
            for row, (score, start, end) in enumerate(best)
        ]
        return {"loss": float(found[:, 0].mean()), **scores(given, questions)}

    def _evaluated(
        self, split: str, rank: int, world: int
    ) -> Iterator[tuple[list[int], Batch, bool]]:
        """A rank's batches of a split, those of short windows first: numbers, windows, and whether
        they count.
        """
        some = self.windows[split]
        order = sorted(range(len(some)), key=lambda row: len(some[row].tokens))
        pieces = [
            order[at : at + EVALUATED_AT_ONCE] for at in range(0, len(order), EVALUATED_AT_ONCE)
        ]
        for number, counts in watched(turns(len(pieces), rank, world)):
            yield pieces[number], self._batch(split, pieces[number]), counts

    def _permutation(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            random = np.random.default_rng((self.seed, epoch))
            self._order = epoch, random.permutation(len(self.windows["train"])).tolist()
        return self._order[1]

    def _batch(self, split: str, rows: Sequence[int]) -> Batch:
        some = [self.windows[split][row] for row in rows]
        tokens, mask = self._padded([window.tokens for window in some], self.padding)
        segments, _ = self._padded([window.segments for window in some], 0)
        spans = torch.tensor([w.span(self.questions[split][w.row]) for w in some])
        return tuple(sent(tensor, self.device) for tensor in (tokens, mask, segments, spans))

    def _places(self, split: str, rows: Sequence[int], side: str) -> Tensor:
        some: list[TextWindow] = [self.windows[split][row] for row in rows]
        return self._padded([getattr(window, side) for window in some], NOWHERE)[0]

    @staticmethod
    def _padded(columns: Sequence[Any], filling: int) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor([len(column) for column in columns])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        filled = torch.full(mask.shape, filling)
        filled[mask] = torch.from_numpy(np.concatenate(columns)).long()
        return filled, mask


def best_spans(said: Tensor, of_text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The best span of each window: of at most 30 tokens, from and to tokens of the text.

    Args:
        said: (windows, length, 2), the scores of beginning and end.
        of_text: (windows, length), where the text is.

    Returns:
        The sums of both scores (minus infinity where there is no text), the first and last tokens:
        (windows,) each.
    """
    length = said.shape[1]
    first, last = (said[:, :, side].masked_fill(~of_text, -torch.inf) for side in (0, 1))
    allowed = torch.ones(length, length, dtype=torch.bool, device=said.device)
    allowed = allowed.triu().tril(LONGEST - 1)
    sums = (first[:, :, None] + last[:, None, :]).masked_fill(~allowed, -torch.inf)
    best, at = sums.flatten(1).max(1)
    return best, at // length, at % length


def _losses(said: Tensor, mask: Tensor, spans: Tensor) -> Tensor:
    """Of each window, the mean cross entropy of its two ends."""
    masked = said.masked_fill(~mask[:, :, None], torch.finfo(said.dtype).min)
    ends = functional.cross_entropy(masked, spans, reduction="none")  # over the tokens
    return ends.mean(1)
