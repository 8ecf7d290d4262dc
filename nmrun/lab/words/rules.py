"""What does not go together in a config: a table of rules."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nmrun.lab.keys import options
from nmrun.patterns import Pattern, PatternError, geometric, stepwise, written

Good = Callable[..., bool]  # whether nothing is wrong with these keys and their groups

STRUCTURES = {
    "sdgf_stepwise": "structure",
    "decay_structure": "structure",
    "sdgf_geometric": "structure_geometric",
}


class Facts:
    """A resolved config as the rules look at it: plain data, as parts of it may be wrong.

    Nothing is concluded from keys that are.

    Args:
        plain: the config.
        good: says whether some keys have right values.
    """

    def __init__(self, plain: dict[str, Any], good: Good) -> None:
        self._good = good
        self.output_dir: Any = plain.get("output_dir")
        groups = ("recipe", "optimizer", "model", "dataset", "trainer", "sparsity")
        self.recipe, self.optimizer, self.model, self.dataset, self.trainer, self.sparsity = (
            plain.get(group) or {} for group in groups
        )

    def good(self, key: str) -> bool:
        """Whether a rule may look at a key; ``recipe.*`` is a built-in recipe and all its keys."""
        if key == "recipe.*":
            keys = (f"recipe.{name}" for name in self.recipe)
            return self.own_rules and self._good("recipe", *keys)
        return self._good(key)

    @functools.cached_property
    def own_rules(self) -> bool:
        """Whether the recipe is built-in and not the dense one."""
        return self._good("recipe") and "_target_" not in self.recipe and not self.dense

    @functools.cached_property
    def ratio(self) -> tuple[Any, Any] | None:
        if not self._good("sparsity.n", "sparsity.m", "sparsity.v"):
            return None
        return self.sparsity["n"], self.sparsity["m"]

    @functools.cached_property
    def dense(self) -> bool:
        builtin = self._good("recipe") and "_target_" not in self.recipe
        return (builtin and self.recipe["name"] == "dense") or self.ratio == (None, None)

    @functools.cached_property
    def _pattern(self) -> Pattern | str | None:
        if self.ratio is None or self.dense:
            return None
        text = written(self.sparsity)
        try:
            return Pattern.parse(text)
        except PatternError as error:
            return f"sparsity={text}: {error}"

    @property
    def pattern(self) -> Pattern | None:
        return self._pattern if isinstance(self._pattern, Pattern) else None

    @property
    def no_pattern(self) -> str | None:
        """What is wrong with the ratio."""
        return self._pattern if isinstance(self._pattern, str) else None

    @functools.cached_property
    def inputs(self) -> list[int]:
        """Inputs of the model's layers that may be sparse; none where they are not known (the run
        asks the model itself).
        """
        known = self._good("sparsity.pad", "model", *(f"model.{key}" for key in self.model))
        if self.pattern is None or not known or self.sparsity["pad"] or "_target_" in self.model:
            return []
        layers = options.kind("model", self.model["name"]).layer_inputs(self.model)
        return [width for width in layers.values() if width]

    @functools.cached_property
    def path(self) -> list[Pattern] | str:
        """The patterns that the recipe goes through, or why it cannot."""
        kind = STRUCTURES.get(self.recipe["name"])
        try:
            if self.pattern is not None and kind == "structure":
                return stepwise(self.pattern)
            if self.pattern is not None and kind == "structure_geometric":
                frames, densify = self.recipe.get("frames", 4), self.recipe.get("densify", False)
                return geometric(self.pattern, frames, densify)
        except PatternError as error:
            return f"recipe={self.recipe['name']} sparsity={self.pattern}: {error}"
        return []

    @property
    def divided(self) -> list[int]:
        """The inputs that the pattern divides."""
        assert self.pattern is not None
        return [width for width in self.inputs if width % self.pattern.m == 0]

    @functools.cached_property
    def unwritable(self) -> Path | None:
        """The first folder above the output that exists, if nothing can be written there."""
        folder = Path(self.output_dir)
        parents = [folder, *folder.absolute().parents]
        # os.path: of a name that is too long for the file system it says no
        existing = next((path for path in parents if os.path.exists(path)), Path("/"))
        good = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
        return None if good else existing

    @property
    def force(self) -> bool:
        """Whether 2:4 products are asked for by the name of one way."""
        return self.trainer["acceleration"] not in ("auto", "off", "force")

    @property
    def fp8_differs(self) -> bool:
        fp8 = self.trainer["acceleration"] == "cusparselt_fp8"
        return self.force and self.trainer["fp8"] != fp8


@dataclass(frozen=True)
class Rule:
    """``sentence`` holds for a config that is ``broken`` and whose ``needs``, keys, are right."""

    needs: tuple[str, ...]
    broken: Callable[[Facts], bool]
    sentence: Callable[[Facts], str]


def _above(low: str, high: str) -> Rule:
    return Rule(
        ("recipe.*",),
        lambda at: low in at.recipe and high in at.recipe and at.recipe[low] > at.recipe[high],
        lambda at: f"recipe.{low}={at.recipe[low]} is above recipe.{high}={at.recipe[high]}",
    )


def _widths(widths: list[int]) -> str:
    return ", ".join(map(str, dict.fromkeys(widths)))


def _products(at: Facts) -> str:
    return f"trainer.acceleration={at.trainer['acceleration']}: 2:4 products"


ACCELERATION = ("trainer.acceleration", "trainer.fp8")
RULES = (
    Rule((), lambda at: at.no_pattern is not None, lambda at: str(at.no_pattern)),
    Rule(
        ("optimizer.name",),
        lambda at: (
            at.own_rules
            and at.recipe["name"] == "step"
            and at.optimizer["name"] not in ("adam", "adamw")
        ),
        lambda at: (
            f"recipe=step freezes Adam's second moment, which {at.optimizer['name']} has not: use optimizer=adam or adamw"
        ),
    ),
    Rule(
        ("recipe.*", "trainer.budget"),
        lambda at: at.recipe.get("decay") == "auto" and at.trainer["budget"] is not None,
        lambda at: (
            "recipe.decay=auto is a search that comes on top of trainer.budget; "
            "give the decay that a run without a budget finds"
        ),
    ),
    _above("t_min", "t_max"),
    _above("t_i", "t_f"),
    Rule(
        ("recipe.*",),
        lambda at: at.recipe.get("dense", 0) + at.recipe.get("final", 0) > 1,
        lambda at: (
            f"recipe.dense={at.recipe['dense']} and recipe.final={at.recipe['final']} are "
            "fractions of one run: at most 1 together"
        ),
    ),
    Rule(("recipe.*",), lambda at: isinstance(at.path, str), lambda at: str(at.path)),
    Rule(
        ("recipe.*",),
        lambda at: (
            isinstance(at.path, list)
            and bool(at.path)
            and any(width % at.path[0].m for width in at.divided)
        ),
        lambda at: (
            f"recipe={at.recipe['name']} sparsity={at.pattern}: its first pattern, {at.path[0]}, "
            f"does not divide all layers' inputs ({_widths(at.divided)})"
            + ("; fewer recipe.frames start smaller" if "frames" in at.recipe else "")
            + "; sparsity.pad=true allows that"
        ),
    ),
    Rule(
        ("optimizer.nesterov", "optimizer.momentum"),
        lambda at: bool(at.optimizer.get("nesterov") and not at.optimizer.get("momentum")),
        lambda at: "optimizer.nesterov=true needs optimizer.momentum above 0",
    ),
    Rule(
        ("trainer.batch_size", "trainer.accumulate"),
        lambda at: at.trainer["batch_size"] % at.trainer["accumulate"] != 0,
        lambda at: (
            f"trainer.batch_size={at.trainer['batch_size']} cannot be split into "
            f"trainer.accumulate={at.trainer['accumulate']} equal micro-batches"
        ),
    ),
    Rule(
        (),
        lambda at: bool(at.inputs and not at.sparsity.get("overrides") and not at.divided),
        lambda at: (
            f"sparsity={at.pattern}: model {at.model['name']} has no layer whose inputs are a "
            f"multiple of {at.pattern and at.pattern.m} (its inner layers have "
            f"{_widths(at.inputs)} inputs); sparsity.pad=true allows that"
        ),
    ),
    Rule(
        ("trainer.steps", "trainer.budget"),
        lambda at: (
            at.trainer["steps"] is not None and at.trainer["budget"] not in (None, "flops:dense")
        ),
        lambda at: (
            f"trainer.steps={at.trainer['steps']} and trainer.budget={at.trainer['budget']} each "
            "say how long the run is: give one of them"
        ),
    ),
    Rule(
        ("trainer.average", "trainer.epochs", "trainer.steps", "trainer.budget"),
        lambda at: (
            at.trainer["steps"] is None
            and at.trainer["budget"] is None
            and at.trainer["average"] > at.trainer["epochs"]
        ),
        lambda at: (
            f"trainer.average={at.trainer['average']}: there are trainer.epochs={at.trainer['epochs']} to average over"
        ),
    ),
    Rule(
        ("dataset.val_fraction", "dataset.test_fraction"),
        lambda at: (
            "_target_" not in at.dataset
            and at.dataset.get("val_fraction", 0) + at.dataset.get("test_fraction", 0) >= 1
        ),
        lambda at: (
            f"dataset.val_fraction={at.dataset['val_fraction']} and dataset.test_fraction="
            f"{at.dataset['test_fraction']} leave nothing to train with"
        ),
    ),
    Rule(
        ACCELERATION,
        lambda at: at.fp8_differs,
        lambda at: (
            f"{_products(at)} by it go with trainer.fp8={str(not at.trainer['fp8']).lower()}"
        ),
    ),
    Rule(
        ACCELERATION,
        lambda at: (
            at.trainer["acceleration"] not in ("auto", "off")
            and not at.fp8_differs
            and at.pattern is not None
            and not at.sparsity.get("overrides")
            and not at.pattern.fits_2_4
        ),
        lambda at: (
            f"{_products(at)} take 2:4 weights and sparser ones whose groups fit in "
            f"(1:M, 2:M with M a multiple of 4), not {at.pattern}"
        ),
    ),
    Rule(
        ("output_dir",),
        lambda at: at.unwritable is not None,
        lambda at: (
            f"output_dir={Path(at.output_dir)}: {at.unwritable} is not a folder that can be written to"
        ),
    ),
)


def broken(plain: dict[str, Any], good: Good) -> Iterator[str]:
    """What does not go together.

    Args:
        plain: a resolved config.
        good: whether nothing is known to be wrong with the given keys, nor with their groups.

    Yields:
        One line for each rule that is broken.
    """
    facts = Facts(plain, good)
    for rule in RULES:
        if all(map(facts.good, rule.needs)) and rule.broken(facts):
            yield rule.sentence(facts)
