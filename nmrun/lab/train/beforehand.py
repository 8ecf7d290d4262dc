"""What is found out before a run's first step: the steps of a budget of seconds, and a decay."""

from __future__ import annotations

from typing import Any

from nmrun.lab.keys.config import Config
from nmrun.lab.train import pace
from nmrun.lab.train.build import Parts, build
from nmrun.lab.train.decay_search import Found, find_decay


def parts(
    config: Config, state: dict[str, Any] | None, accumulate: int, search: bool = True
) -> tuple[Parts, str, Found | None]:
    """Build the parts of a run, with what was found out for it.

    Args:
        config: the run's config.
        state: its checkpoint, which has what was found; None: the run begins.
        accumulate: the micro-batches that the run goes on with.
        search: search for the decay of ``recipe.decay=auto``; it is 0 otherwise.

    Returns:
        The parts; where a budget of seconds was planned now, a sentence on its steps, else
        nothing; and what a search found now.

    Raises:
        ConfigError: for what only the built model shows.
    """
    steps, said, found = None, "", None
    trainer = {**config.plain["trainer"], "accumulate": accumulate}
    config = Config({**config.plain, "trainer": trainer}, config.pattern)
    if (config.trainer.budget or "").startswith("seconds:"):
        steps, said = (state["total_steps"], "") if state else pace.plan(config)
    if config.recipe.options.get("decay") == "auto":
        found = find_decay(config, steps) if search and state is None else None
        recipe = {**config.plain["recipe"], "decay": found.decay if found else 0.0}
        config = Config({**config.plain, "recipe": recipe}, config.pattern)
    return build(config, steps, (state or {}).get("acceleration")), said, found
