"""Classification as text to text: the network writes the answer as words (Raffel et al. 2020, arXiv
1910.10683).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from nmrun.errors import ConfigError
from nmrun.lab.keys.texts import Encoding
from nmrun.lab.tasks.base import Batch, limited, sent, thinned
from nmrun.lab.tasks.text_classification.task import TextClassification
from nmrun.lab.tasks.text_classification.tokens import Text, Tokenizer, tokenizer

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config

NOTHING = -100  # where an answer is shorter than another


class TextToText(TextClassification):
    """Cross entropy of the right answer's tokens; see :class:`nmrun.lab.tasks.base.Task`.

    In an evaluation the prediction is the answer with the largest probability of all there are,
    which a network that was trained so would write; ``loss`` is then of whole answers. A
    micro-batch is (tokens, mask, targets), the first two (texts, length) int64 and bool (False is
    padding), the last one (texts, longest answer) int64, -100 where an answer has ended. Models give
    (texts, longest answer, vocabulary) for ``model(tokens, mask, targets)``, each token from those
    of the answer before it.

    Args:
        splits: texts and their labels, the number of the answer, or a score.
        values: for scores, what each answer is worth; a score's answer is the nearest one.
        metrics, batch_size, seed, limit_batches, device: as of
            :class:`nmrun.lab.tasks.text_classification.task.TextClassification`.
    """

    def __init__(
        self,
        splits: Mapping[str, tuple[Sequence[Text], Sequence[float]]],
        tokenizer: Tokenizer,
        answers: Sequence[str],
        values: Sequence[float] | None,
        metrics: Sequence[str],
        batch_size: int,
        seed: int,
        limit_batches: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        classes = len(answers) if values is None else 1
        super().__init__(
            *(splits, tokenizer, classes, metrics, batch_size, seed),
            limit_batches=limit_batches,
            device=device,
        )
        del self.inputs["classes"]
        self.values = None if values is None else torch.tensor(values)
        tokens, _, starts = tokenizer.encode([(answer,) for answer in answers])
        each = [tokens[a:b].long() for a, b in itertools.pairwise(starts)]
        self.answers = torch.nn.utils.rnn.pad_sequence(
            each, batch_first=True, padding_value=NOTHING
        )

    @classmethod
    def of_answers(
        cls,
        config: Config,
        splits: Mapping[str, tuple[Sequence[Text], Sequence[float]]],
        answers: Sequence[str],
        values: Sequence[float] | None,
        metrics: Sequence[str],
        device: torch.device,
    ) -> TextToText:
        """Build the task with tokenizer, batch size, seed and limits of a run's config.

        Raises:
            ConfigError: as the class, and for smoothed labels.
        """
        trainer = config.trainer
        if trainer.label_smoothing:
            raise ConfigError(
                f"trainer.label_smoothing={trainer.label_smoothing} is for classes; this data set has texts"
            )
        return cls(
            limited(splits, trainer.limit_evaluation, thinned),
            tokenizer(config.dataset.as_kind(Encoding)),
            answers,
            values,
            metrics,
            batch_size=trainer.batch_size,
            seed=config.seed,
            limit_batches=trainer.limit_batches,
            device=device,
        )

    def size(self, batch: Batch) -> int:
        return len(_kept(batch[-1], batch[-1]))

    def sizes(self, epoch: int, index: int, parts: int) -> list[int]:
        lengths = (self.answers != NOTHING).sum(1)
        labels = self.splits["train"].labels
        several = self.rows(epoch, index, parts)
        return [int(lengths[self._right(labels[rows])].sum()) for rows in several]

    def logits(self, model: Any, batch: Batch) -> Tensor:
        """(tokens of all answers, vocabulary)."""
        return _kept(model(*batch), batch[-1]).float()

    def loss_of(self, logits: Tensor, batch: Batch) -> Tensor:
        return functional.cross_entropy(logits, _kept(batch[-1], batch[-1]))

    def scores(self, model: Any, batch: Batch) -> Tensor:
        """The logarithm of each answer's probability (texts, answers)."""
        tokens, mask, _ = batch
        found = []
        for answer in self.answers.to(tokens.device):
            targets = answer[answer != NOTHING].expand(len(tokens), -1)
            likely = model(tokens, mask, targets).float().log_softmax(-1)
            found.append(likely.gather(-1, targets[:, :, None])[:, :, 0].sum(1))
        return torch.stack(found, 1)

    def _batch(self, split: str, rows: Tensor, length: int | None = None) -> Batch:
        tokens, mask, *_ = super()._batch(split, rows, length)
        targets = self.answers[self._right(self.splits[split].labels[rows])]
        longest = int((targets != NOTHING).sum(1).max())
        return tokens, mask, sent(targets[:, :longest], self.device)

    def _right(self, labels: Tensor) -> Tensor:
        """The numbers of the right answers."""
        if self.values is None:
            return labels
        return (self.values - labels[:, None]).abs().argmin(1)

    def _loss(self, logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
        return -logits.gather(1, self._right(labels)[:, None]).mean()

    def _predictions(self, logits: Tensor) -> Tensor:
        best = logits.argmax(1)
        return best if self.values is None else self.values[best]


def _kept(values: Tensor, targets: Tensor) -> Tensor:
    """What belongs to the tokens of answers, one after the other. Tensors without values, for
    counting FLOPs, do not tell where answers end."""
    return values.flatten(0, 1) if targets.is_meta else values[targets != NOTHING]
