"""Classification as text to text: the network writes the answer as words (Raffel et al. 2020, arXiv
1910.10683). GLUE in the words of T5 (appendix D), and a pretrained T5.

"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from nmrun.lab.keys.datasets import Glue
from nmrun.lab.models.hugging_face import Wrapped
from nmrun.lab.tasks.base import Batch, limited, refuse_smoothing, sent, settings, thinned
from nmrun.lab.tasks.hugging_face import check_vocabulary, fetch, fetch_whole
from nmrun.lab.tasks.text import labelled
from nmrun.lab.tasks.text.classification import (
    Encoded,
    Text,
    TextClassification,
    Tokenizer,
    tokenizer,
)

if TYPE_CHECKING:
    from nmrun.lab.keys.config import Config

NOTHING = -100  # where an answer is shorter than another


class TextToText(TextClassification):
    """Cross entropy of the right answer's tokens.

    In an evaluation the prediction is the most probable of all possible answers. There ``loss`` is
    of whole answers. A micro-batch is (tokens, mask, targets). Tokens and mask are (texts, length)
    int64 and bool (False is padding). Targets are (texts, longest answer) int64, -100 where an
    answer has ended. Models give (texts, longest answer, vocabulary) for ``model(tokens, mask,
    targets)``, each token from those of the answer before it.

    Labels are the number of the answer, or a score. For scores, ``values`` says what each answer is
    worth; a score's answer is the nearest one. ``classes`` of the signature are the answers.
    """

    equal_batches = False

    def __init__(
        self,
        splits: Mapping[str, tuple[Sequence[Text], Sequence[float]]],
        tokenizer: Tokenizer,
        answers: Sequence[str],
        values: Sequence[float] | None,
        metrics: Sequence[str],
        batch_size: int,
        seed: int,
        label_smoothing: float = 0.0,
        limit_batches: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        refuse_smoothing(label_smoothing, "texts")
        classes = len(answers) if values is None else 1
        super().__init__(
            *(splits, tokenizer, classes, metrics, batch_size, seed),
            limit_batches=limit_batches,
            device=device,
        )
        del self.inputs["classes"]
        self.signature = {"classes": list(answers)}
        self.values = None if values is None else torch.tensor(values)
        tokens, _, starts = tokenizer.encode([(answer,) for answer in answers])
        each = [tokens[a:b].long() for a, b in itertools.pairwise(starts)]
        self.answers = torch.nn.utils.rnn.pad_sequence(
            each, batch_first=True, padding_value=NOTHING
        )

    def size(self, batch: Batch) -> int:
        return len(_answer_tokens(batch[-1], batch[-1]))

    def sizes(self, epoch: int, index: int, parts: int) -> list[int]:
        lengths = (self.answers != NOTHING).sum(1)
        labels = self.splits["train"].labels
        several = self.rows(epoch, index, parts)
        return [int(lengths[self._right(labels[rows])].sum()) for rows in several]

    def logits(self, model: Any, batch: Batch) -> Tensor:
        """(tokens of all answers, vocabulary)."""
        return _answer_tokens(model(*batch), batch[-1]).float()

    def loss_of(self, logits: Tensor, batch: Batch) -> Tensor:
        return functional.cross_entropy(logits, _answer_tokens(batch[-1], batch[-1]))

    def scores(self, model: Any, batch: Batch) -> Tensor:
        """The logarithm of each answer's probability (texts, answers)."""
        tokens, mask, _ = batch
        scores = []
        for answer in self.answers.to(tokens.device):
            targets = answer[answer != NOTHING].expand(len(tokens), -1)
            likely = model(tokens, mask, targets).float().log_softmax(-1)
            scores.append(likely.gather(-1, targets[:, :, None])[:, :, 0].sum(1))
        return torch.stack(scores, 1)

    def _padded(self, texts: Encoded, rows: Tensor, length: int | None = None) -> Batch:
        tokens, mask, *_ = super()._padded(texts, rows, length)
        targets = self.answers[self._right(texts.labels[rows])]
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


def _answer_tokens(values: Tensor, targets: Tensor) -> Tensor:
    """What belongs to the tokens of answers, one after the other. Tensors without values, for
    counting FLOPs, do not tell where answers end."""
    return values.flatten(0, 1) if targets.is_meta else values[targets != NOTHING]


# where GLUE's files have numbers, in the order of classes
ANSWERS = {
    "cola": ("unacceptable", "acceptable"),
    "sst2": ("negative", "positive"),
    "mrpc": ("not_equivalent", "equivalent"),
    "qqp": ("not_duplicate", "duplicate"),
    "wnli": ("not_entailment", "entailment"),
}
SCORES = [i / 5 for i in range(26)]  # STS-B's, rounded to a fifth (section 2.4)


def prompt(task: str, text: Text) -> Text:
    """One text that names its task and its parts, such as ``rte sentence1: A. sentence2: B.``. T5
    has them in the order of their names, so MNLI's hypothesis comes first."""
    spec = labelled.TASKS[task]
    names = spec.hub_texts or spec.texts
    parts = (f"{name}: {part}" for name, part in zip(names, text, strict=True))
    return (" ".join([task, *sorted(parts)]),)


def glue_text(config: Config, device: torch.device) -> TextToText:
    options = config.dataset.as_kind(Glue)
    splits = {
        name: ([prompt(options.task, text) for text in texts], labels)
        for name, (texts, labels) in labelled.load_glue(
            options.task, options.held_out, options.split_seed, options.limit
        ).items()
    }
    spec = labelled.TASKS[options.task]
    answers = ANSWERS.get(options.task, spec.labels) or tuple(f"{score:.1f}" for score in SCORES)
    values = None if spec.labels else SCORES
    few = limited(splits, config.trainer.limit_evaluation, thinned)
    encoder = tokenizer(options)
    return TextToText(few, encoder, answers, values, spec.metrics, **settings(config, device))


class T5Network(Wrapped):
    """Tokens (B, T), mask (B, T) bool (False is padding) and targets (B, L), below 0 where they
    have ended, to (B, L, vocabulary). Each is from the targets before it.
    """

    def forward(self, tokens: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        config = self.network.config
        first = torch.full_like(targets[:, :1], config.decoder_start_token_id)
        before = torch.cat([first, targets[:, :-1]], 1)
        return self.network(
            input_ids=tokens,
            # transformers looks whether a mask pads anything; a tensor without values cannot tell
            attention_mask=None if mask.is_meta else mask.long(),
            decoder_input_ids=before.masked_fill(before < 0, config.pad_token_id),
            use_cache=False,
        ).logits


def t5(vocabulary: int, max_length: int, pretrained: str) -> T5Network:
    """A pretrained network in float32. Its dropout is that of its ``config.json``, its positions
    are relative and have no end.

    Raises ConfigError where it cannot be loaded, or has another vocabulary than the data.
    """
    config = fetch("AutoConfig", "model.pretrained", pretrained)
    check_vocabulary(pretrained, config.vocab_size, vocabulary)
    return T5Network(fetch_whole("T5ForConditionalGeneration", pretrained))
