"""A generated task that needs no download: who lives where and likes what, asked of a text that
says so of several people.

It shows that training works, and nothing about language.
"""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING

from nmrun.papers.reading.answers import Question
from nmrun.papers.reading.keys import GeneratedQuestions

if TYPE_CHECKING:
    import torch

    from nmrun.lab.keys.config import Config
    from nmrun.papers.reading.task import Reading

PEOPLE = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Ida")
FACTS = {
    "Where does {} live?": ("{} lives in {}.", ("Rome", "Paris", "Lima", "Oslo", "New York")),
    "What does {} like?": ("{} likes {}.", ("green tea", "chess", "old films", "rain", "jazz")),
}
HELD_OUT = 200  # questions for validation, and as many for the test


@cache
def load(size: int = 2000, split_seed: int = 0) -> dict[str, list[Question]]:
    """Generate texts, each with one question; one in five has no answer.

    Args:
        size: of the training split; each of the others has 200 questions.

    Returns:
        The questions of ``train``, ``val`` and ``test``, whose texts all differ.
    """
    rng = random.Random(split_seed)
    found: dict[str, Question] = {}
    while len(found) < size + 2 * HELD_OUT:
        question = _question(rng, str(len(found)))
        found.setdefault(question.text, question)
    rows = list(found.values())
    return {
        "train": rows[:size],
        "val": rows[size : size + HELD_OUT],
        "test": rows[size + HELD_OUT :],
    }


def build(config: Config, device: torch.device) -> Reading:
    """Build the task of the config's ``dataset`` group, as :func:`nmrun.lab.tasks.build` says."""
    from nmrun.papers.reading.task import Reading

    options = config.dataset.as_kind(GeneratedQuestions)
    return Reading.of(config, load(options.size, options.split_seed), device)


def _question(rng: random.Random, key: str) -> Question:
    people = rng.sample(PEOPLE, 4)
    kinds = [rng.choice(list(FACTS)) for _ in people]
    said = [FACTS[kind] for kind in kinds]
    values = [rng.choice(choices) for _, choices in said]
    sentences = [
        form.format(who, value) for (form, _), who, value in zip(said, people, values, strict=True)
    ]
    text, about = " ".join(sentences), rng.randrange(len(people))
    if rng.random() < 0.2:  # the text does not tell this of that person
        other = next(kind for kind in FACTS if kind != kinds[about])
        return Question(key, other.format(people[about]), text, ())
    before = sum(len(sentence) + 1 for sentence in sentences[:about])
    place = before + sentences[about].index(values[about])
    return Question(key, kinds[about].format(people[about]), text, ((values[about], place),))
