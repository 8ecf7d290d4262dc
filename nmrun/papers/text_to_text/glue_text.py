"""GLUE as text to text, in the words of T5 (Raffel et al. 2020, arXiv 1910.10683, appendix D): its
files, splits and metrics are those of ``nmrun.lab.tasks.text_classification.glue``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nmrun.lab.keys.texts import Glue
from nmrun.lab.tasks.text_classification import glue

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.lab.tasks.text_classification.tokens import Text
    from nmrun.papers.text_to_text.task import TextToText

# the names of a task's texts, and its answers in the order of classes
WORDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cola": (("sentence",), ("unacceptable", "acceptable")),
    "sst2": (("sentence",), ("negative", "positive")),
    "mrpc": (("sentence1", "sentence2"), ("not_equivalent", "equivalent")),
    "qqp": (("question1", "question2"), ("not_duplicate", "duplicate")),
    "stsb": (("sentence1", "sentence2"), ()),
    "mnli": (("premise", "hypothesis"), ("entailment", "neutral", "contradiction")),
    "qnli": (("question", "sentence"), ("entailment", "not_entailment")),
    "rte": (("sentence1", "sentence2"), ("entailment", "not_entailment")),
    "wnli": (("sentence1", "sentence2"), ("not_entailment", "entailment")),
}
SCORES = [i / 5 for i in range(26)]  # STS-B's, rounded to a fifth (section 2.4)


def asked(task: str, text: Text) -> Text:
    """One text that names its task and its parts, such as ``rte sentence1: A. sentence2: B.``."""
    parts = (f"{name}: {part}" for name, part in zip(WORDS[task][0], text, strict=True))
    return (" ".join([task, *parts]),)


def build(config: Config, device: torch.device) -> TextToText:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says."""
    from nmrun.papers.text_to_text.task import TextToText

    options = config.dataset.as_kind(Glue)
    splits = {
        name: ([asked(options.task, text) for text in texts], labels)
        for name, (texts, labels) in glue.load(
            options.task, options.held_out, options.split_seed, options.limit
        ).items()
    }
    answers = WORDS[options.task][1] or tuple(f"{score:.1f}" for score in SCORES)
    values = None if WORDS[options.task][1] else SCORES
    metrics = glue.TASKS[options.task].metrics
    return TextToText.of_answers(config, splits, answers, values, metrics, device)
