"""The conditions of ``--filter``."""

from __future__ import annotations

import re
from typing import NamedTuple

from nmrun.errors import ConfigError

OUTSIDE_BRACKETS = re.compile(r",(?![^\[{(]*[\]})])")


class Condition(NamedTuple):
    """What ``--filter`` takes: the runs in which ``key`` has one of ``values``, or with ``others``
    those in which it has another."""

    key: str
    values: list[str]
    others: bool

    @classmethod
    def of(cls, text: str) -> Condition:
        """``recipe=ste,sr_ste`` has two values, ``optimizer.betas=[0.9,0.98]`` one; ``recipe!=ste``
        is for others. ConfigError where the text is no condition."""
        key, equals, values = text.partition("=")
        if not equals:
            raise ConfigError(
                f"--filter {text}: write KEY=VALUE, such as recipe=ste, or KEY!=VALUE (folders come before --filter)"
            )
        named = [value.strip() for value in OUTSIDE_BRACKETS.split(values)]
        return cls(key.removesuffix("!"), named, key.endswith("!"))

    def fits(self, value: str) -> bool:
        return self.others != any(same(value, named) for named in self.values)


def same(a: str, b: str) -> bool:
    """Whether two texts are one value: ``0.001`` and ``1e-3``, ``[1,2]`` and ``[1, 2]``."""
    a, b = a.replace(" ", ""), b.replace(" ", "")
    try:
        return a == b or float(a) == float(b)
    except ValueError:
        return False
