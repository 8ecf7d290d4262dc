"""A generated task that needs no download: whether a made-up review praises, where "not" turns the
next verdict around.

It shows that training works, and nothing about language. Words alone do not decide: what a "not"
stands before does.
"""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING

from nmrun.lab.keys.texts import GeneratedText

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.lab.tasks.text_classification.task import TextClassification

GOOD = ("good", "great", "fine", "lovely", "superb", "bright", "clever", "charming")
BAD = ("bad", "awful", "poor", "dull", "boring", "weak", "clumsy", "flat")
FILLERS = (
    "the",
    "film",
    "plot",
    "cast",
    "and",
    "was",
    "very",
    "a",
    "scene",
    "music",
    "it",
    "had",
    "with",
    "an",
    "ending",
    "camera",
)
HELD_OUT = 500  # texts for validation, and as many for the test

Splits = dict[str, tuple[list[tuple[str, ...]], list[float]]]


@cache
def load(size: int = 4000, split_seed: int = 0) -> Splits:
    """Generate different sentences with a verdict.

    A sentence has one or three verdicts among 4 to 12 fillers, each good or bad by an even chance
    and with "not" before it three times in ten; its label is 1 if most of them, turned around by
    their "not", are good.

    Args:
        size: of the training split; each of the others has 500 sentences.

    Returns:
        ``{"train" | "val" | "test": (texts, labels)}``.
    """
    rng = random.Random(split_seed)
    labelled: dict[str, int] = {}
    while len(labelled) < size + 2 * HELD_OUT:
        sentence, label = _sentence(rng)
        labelled[sentence] = label
    rows = list(labelled.items())
    parts = {
        "train": rows[:size],
        "val": rows[size : size + HELD_OUT],
        "test": rows[size + HELD_OUT :],
    }
    return {
        name: ([(text,) for text, _ in part], [label for _, label in part])
        for name, part in parts.items()
    }


def build(config: Config, device: torch.device) -> TextClassification:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says."""
    from nmrun.lab.tasks.text_classification.task import TextClassification

    options = config.dataset.as_kind(GeneratedText)
    splits = load(options.size, options.split_seed)
    return TextClassification.of(config, splits, 2, ("accuracy",), device)


def _sentence(rng: random.Random) -> tuple[str, int]:
    words = [[word] for word in rng.choices(FILLERS, k=rng.randint(4, 12))]
    balance = 0
    for _ in range(rng.choice((1, 3))):
        good, turned = rng.random() < 0.5, rng.random() < 0.3
        verdict = rng.choice(GOOD if good else BAD)
        balance += 1 if good != turned else -1
        words.insert(rng.randint(0, len(words)), ["not", verdict] if turned else [verdict])
    return " ".join(word for some in words for word in some), int(balance > 0)
