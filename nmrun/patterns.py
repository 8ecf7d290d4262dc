"""N:M patterns: at most N non-zeros in every group of M consecutive weights. No torch, no Hydra in here."""

from __future__ import annotations

import re
from dataclasses import dataclass


class PatternError(ValueError):
    """Text or numbers that are not an N:M pattern; the message says what is allowed."""


@dataclass(frozen=True, order=True)
class Pattern:
    """N:M sparsity, ``n`` weights kept in every group of ``m``; 1 <= n <= m. ``str`` gives ``2:4``, ``slug`` ``2of4``."""

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 1 <= self.n <= self.m:
            raise PatternError(f"{self.n}:{self.m} is not an N:M pattern: it takes 1 <= N <= M, such as 2:4 or 1:16")

    @classmethod
    def parse(cls, text: str | Pattern) -> Pattern:
        """``"2:4"`` or ``"2of4"`` (a Pattern passes through). Raises PatternError for anything else."""
        if isinstance(text, Pattern):
            return text
        match = re.fullmatch(r"(\d{1,6})(?::|of)(\d{1,6})", str(text).strip())
        if match is None:
            raise PatternError(f"{text!r} is not an N:M pattern: write two numbers with a colon, such as 2:4 or 1:16")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def slug(self) -> str:
        """The form used in paths, where a colon is not allowed everywhere: ``2of4``."""
        return f"{self.n}of{self.m}"

    @property
    def density(self) -> float:
        """The fraction of weights kept, n / m."""
        return self.n / self.m


def stepwise(target: Pattern) -> list[Pattern]:
    """``M-1:M, M/2:M, M/4:M, ..., N:M``, ever sparser. Raises PatternError unless M / N is a power of two."""
    ratio = target.m // target.n
    if target.m % target.n or ratio & (ratio - 1):
        raise PatternError(f"stepwise structure decay halves M until it is N; for {target}, M / N is not a power of two")
    halves = [Pattern(target.m >> i, target.m) for i in range(1, ratio.bit_length())]
    return list(dict.fromkeys([Pattern(max(target.m - 1, target.n), target.m), *halves, target]))


def geometric(target: Pattern, frames: int) -> list[Pattern]:
    """``kN:kM`` for k = 2^(frames - 1), ..., 2, 1: the same density in ever smaller groups."""
    return [Pattern(target.n << i, target.m << i) for i in reversed(range(frames))]
