"""Translation: sentences in batches of so many tokens, label smoothing as fairseq defines it,
perplexity, and BLEU by beam search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from nmrun.errors import ConfigError
from nmrun.lab.tasks.base import (
    Batch,
    Categorical,
    Tally,
    limited,
    picked,
    sent,
    settings,
    shared,
)
from nmrun.papers.translation import Translated
from nmrun.papers.translation.fairseq import Dictionary, fairseq

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config

# a translation ends after 1.2 * (length of the longest source sentence of its batch) + 10 tokens
LONGEST = (1.2, 10)


Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Corpus:
    """Sentences as token numbers, one after the other: sentence i is ``tokens[starts[i] : starts[i
    + 1]]``, its last token the end mark.
    """

    tokens: NDArray[Any]
    starts: Rows

    @classmethod
    def of(cls, sentences: Sequence[Sequence[int]]) -> Corpus:
        """Join sentences, each a sequence of token numbers with the end mark last."""
        flat = [token for sentence in sentences for token in sentence]
        return cls(np.array(flat, np.int32), np.cumsum([0, *map(len, sentences)]))

    def first(self, count: int) -> Corpus:
        """The first ``count`` sentences."""
        starts = self.starts[: count + 1]
        return Corpus(self.tokens[: starts[-1]], starts)

    @property
    def lengths(self) -> Rows:
        return np.diff(self.starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def padded(
        self, rows: Rows, padding: int, left: bool = False
    ) -> tuple[Rows, NDArray[np.bool_]]:
        """Sentences padded to the longest of them, int64, and where there is no padding, (n,
        length) each. ``left``: as encoders want it.
        """
        lengths = (self.starts[rows + 1] - self.starts[rows])[:, None]
        columns = np.arange(lengths.max()) - (lengths.max() - lengths if left else 0)
        inside = (columns >= 0) & (columns < lengths)
        places = np.where(inside, self.starts[rows, None] + columns, 0)
        return np.where(inside, self.tokens[places], padding), inside


Pair = tuple[Corpus, Corpus]


def bucketed(pair: Pair, max_tokens: int) -> tuple[Rows, Rows]:
    """Sentences ``rows`` by length, and ``cuts``: batch i is ``rows[cuts[i] : cuts[i + 1]]``."""
    source, target = (corpus.lengths for corpus in pair)
    rows = np.lexsort((target, source))
    cuts, widest = [0], 0
    for end, width in enumerate(np.maximum(source, target)[rows].tolist()):
        widest = max(widest, width)
        if widest * (end + 1 - cuts[-1]) > max_tokens and end > cuts[-1]:
            cuts.append(end)
            widest = width
    return rows, np.array([*cuts, len(rows)])


def shuffled_within(rows: Rows, pair: Pair, random: np.random.Generator) -> Rows:
    """``rows`` of :func:`bucketed` in another order that it could have given: sentences of equal
    lengths change places.
    """
    mixed = random.permutation(rows)
    source, target = (corpus.lengths[mixed] for corpus in pair)
    return mixed[np.lexsort((target, source))]


class Translation(Categorical):
    """Cross entropy over the tokens of the target language. An item is a target token.

    A batch has sentences of about the same length, as many as fit into ``max_tokens`` tokens a
    side, padding included. Sentences are ordered by the lengths of source and target, so the cuts
    between batches are the same in all epochs. Which of the sentences of equal lengths fall into
    which batch, and the order of the batches, are a pure function of (seed, epoch). Each sentence
    is in one batch of an epoch. A micro-batch is:

    - source (sentences, length), padded at the left;
    - previous (sentences, length), the target as the decoder sees it, moved by one token;
    - where (tokens,), the places of the target's tokens in the flattened batch;
    - target (tokens,), what follows at these.

    Models give, as fairseq's, a tuple with the logits (tokens, target dictionary) in front for
    ``model(source, None, previous, where)``. ``label_smoothing`` is fairseq's: epsilon is spread
    over all tokens but the right one. A sentence longer than ``max_tokens`` is a batch of its own. Raises
    ConfigError for sides that do not fit.
    """

    metric = "bleu"
    higher_is_better = True
    equal_batches = False

    def __init__(
        self,
        splits: Mapping[str, Pair],
        source: Dictionary,
        target: Dictionary,
        references: Mapping[str, Sequence[str]],
        detokenize: Callable[[list[str]], str],
        max_tokens: int,
        seed: int,
        label_smoothing: float = 0.0,
        beam: int = 5,
        length_penalty: float = 1.0,
        limit_batches: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, sides in splits.items():
            source_count, target_count = map(len, sides)
            if source_count != target_count or not source_count:
                raise ConfigError(
                    f"{name}: {source_count} source sentences and {target_count} target sentences"
                )
        self.splits, self.source, self.target = splits, source, target
        self.references, self.detokenize = references, detokenize
        self.has_test = "test" in splits
        self.inputs = {"source": source, "target": target}
        self.max_tokens, self.seed, self.device = max_tokens, seed, torch.device(device)
        self.beam, self.length_penalty = beam, length_penalty
        # torch spreads epsilon over all tokens, the right one too
        self.smoothing = label_smoothing * len(target) / (len(target) - 1)
        self.batches_of = f"at most {max_tokens} tokens a side"
        self._rows, self._cuts = bucketed(splits["train"], max_tokens)
        self.batches_per_epoch = min(len(self._cuts) - 1, limit_batches or len(self._cuts))
        self._order: tuple[int, Rows, Rows] = (-1, self._rows, self._cuts)

    @classmethod
    def of(
        cls,
        config: Config,
        splits: Mapping[str, Pair],
        source: Dictionary,
        target: Dictionary,
        references: Mapping[str, Sequence[str]],
        detokenize: Callable[[list[str]], str],
        device: torch.device,
    ) -> Translation:
        keys, most = config.dataset.as_kind(Translated), config.trainer.limit_evaluation
        its = settings(config, device)
        del its["batch_size"]  # it counts tokens
        return cls(
            limited(splits, most, lambda pair, count: (pair[0].first(count), pair[1].first(count))),
            source,
            target,
            limited(references, most, lambda texts, count: texts[:count]),
            detokenize,
            max_tokens=keys.max_tokens,
            beam=keys.beam,
            length_penalty=keys.length_penalty,
            **its,
        )

    def micro_batches(
        self, epoch: int, index: int, parts: int, mine: range | None = None
    ) -> list[Batch]:
        return [
            self._batch("train", rows) for rows in picked(self._pieces(epoch, index, parts), mine)
        ]

    def sizes(self, epoch: int, index: int, parts: int) -> list[int]:
        starts = self.splits["train"][1].starts
        return [
            int((starts[rows + 1] - starts[rows]).sum())
            for rows in self._pieces(epoch, index, parts)
        ]

    def _pieces(self, epoch: int, index: int, parts: int) -> list[Rows]:
        """The sentences of each micro-batch of a whole batch."""
        if self._order[0] != epoch:
            random = np.random.default_rng((self.seed, epoch))
            rows = shuffled_within(self._rows, self.splits["train"], random)
            self._order = (epoch, rows, random.permutation(len(self._cuts) - 1))
        _, rows, batches = self._order
        begin, end = self._cuts[batches[index] : batches[index] + 2]
        return np.array_split(rows[begin:end], min(parts, end - begin))

    def size(self, batch: Batch) -> int:
        return batch[-1].numel()

    def logits(self, model: Any, batch: Batch) -> Tensor:
        return _logits(model, *batch[:-1])

    def loss_of(self, logits: Tensor, batch: Batch) -> Tensor:
        return functional.cross_entropy(logits, batch[-1], label_smoothing=self.smoothing)

    @torch.no_grad()
    def tally(self, model: nn.Module, split: str, rank: int = 0, world: int = 1) -> Tally:
        search, marks = self._search(model), (self.target.eos(), self.target.pad())
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        translations: dict[int, str] = {}
        rows, cuts = bucketed(self.splits[split], self.max_tokens)
        pieces = np.split(rows, cuts[1:-1])
        for some, batch, counts in shared(pieces, partial(self._batch, split), rank, world):
            *inputs, target = batch
            logits = _logits(model, *inputs)
            if counts:
                total += functional.cross_entropy(logits, target, reduction="sum")
                lengths = inputs[0].ne(self.source.pad()).sum(1)
                net_input = {"src_tokens": inputs[0], "src_lengths": lengths}
                found = search.generate([], {"net_input": net_input})
                for row, (best, *_) in zip(some.tolist(), found, strict=True):
                    tokens = [token for token in best["tokens"].tolist() if token not in marks]
                    symbols = [self.target.symbols[token] for token in tokens]
                    translations[row] = self.detokenize(symbols)
        return {"loss": float(total), "translations": translations}

    def metrics_of(self, split: str, tallies: Sequence[Tally]) -> dict[str, float]:
        """``loss`` (nats a token, without smoothing), ``perplexity`` (e to it) and ``bleu`` (0 to
        100), whose signature goes to ``notes``.
        """
        loss = sum(tally["loss"] for tally in tallies) / int(self.splits[split][1].starts[-1])
        translations = {
            row: text for tally in tallies for row, text in tally["translations"].items()
        }
        bleu, signature = corpus_bleu(
            [translations[row] for row in range(len(translations))], self.references[split]
        )
        self.notes = {"bleu": signature}
        return {
            "loss": loss,
            "bleu": bleu,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
        }

    def example(self) -> Batch:
        """Two sentences of middling length: what an item costs depends on it."""
        middle = len(self._rows) // 2
        return self._batch("train", self._rows[max(0, middle - 1) : middle + 1])

    def _batch(self, split: str, rows: Rows) -> Batch:
        source, _ = self.splits[split][0].padded(rows, self.source.pad(), left=True)
        target, inside = self.splits[split][1].padded(rows, self.target.pad())
        previous = np.where(inside, np.roll(target, 1, axis=1), self.target.pad())
        previous[:, 0] = self.target.eos()
        arrays = source, previous, np.flatnonzero(inside), target[inside]
        tensors = (torch.from_numpy(array.astype(np.int64, copy=False)) for array in arrays)
        return tuple(sent(tensor, self.device) for tensor in tensors)

    def _search(self, model: nn.Module) -> Any:
        return fairseq("sequence_generator").SequenceGenerator(
            *([model], self.target, self.beam),
            len_penalty=self.length_penalty,
            max_len_a=LONGEST[0],
            max_len_b=LONGEST[1],
        )


def _logits(model: Any, source: Tensor, previous: Tensor, where: Tensor) -> Tensor:
    logits: Tensor = model(source, None, previous, where)[0]
    return logits.float()


def corpus_bleu(translations: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """sacreBLEU (Post 2018, arXiv 1804.08771), 0 to 100, and its signature."""
    from sacrebleu.metrics.bleu import BLEU

    bleu = BLEU()
    score = bleu.corpus_score(list(translations), [list(references)])
    return float(score.score), str(bleu.get_signature())
