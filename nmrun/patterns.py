"""N:M patterns: at most N non-zeros in every group of M consecutive weights.

The command line imports this module, so it imports neither torch nor Hydra.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

# the patterns that --help and completion list; any other is allowed too
USUAL = ("1:2", "2:4", "4:8", "1:4", "2:8", "1:8", "2:16", "1:16", "1:32")


class PatternError(ValueError):
    """Text or numbers that are not an N:M pattern; the message says what is allowed."""


@dataclass(frozen=True, order=True)
class Pattern:
    """N:M sparsity: at most ``n`` non-zeros in every group of ``m``. ``str(pattern)`` is ``2:4``.

    Args:
        n: from 1 to m.
        m: the size of a group.
        length: the size of a dimension whose last group may be short (see :meth:`over`). 0, the
            default: M must divide the size of every dimension.

    Raises:
        PatternError: unless 1 <= n <= m.
    """

    n: int
    m: int
    length: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.n <= self.m:
            raise PatternError(
                f"{self.n}:{self.m} is not an N:M pattern: it takes 1 <= N <= M, such as 2:4 or 1:16"
            )

    @classmethod
    def parse(cls, text: str | Pattern) -> Pattern:
        """Read a pattern.

        Args:
            text: ``"2:4"`` or ``"2of4"``. A Pattern is returned as it is.

        Raises:
            PatternError: for any other text.
        """
        if isinstance(text, Pattern):
            return text
        match = re.fullmatch(r"(\d{1,6})(?::|of)(\d{1,6})", str(text).strip())
        if match is None:
            raise PatternError(
                f"{text!r} is not an N:M pattern: write two numbers with a colon, such as 2:4 or 1:16"
            )
        return cls(int(match[1]), int(match[2]))

    def over(self, length: int) -> Pattern:
        """Return the pattern for one dimension whose last group may be short.

        Args:
            length: the size of the dimension. Zeros fill up its last group.
        """
        return replace(self, length=length)

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def slug(self) -> str:
        """The form for paths, where some systems allow no colon: ``2of4``."""
        return f"{self.n}of{self.m}"

    @property
    def density(self) -> float:
        """The largest share of non-zeros: n / m, or more where the last group is short."""
        groups, rest = divmod(self.length or self.m, self.m)
        return (groups * self.n + min(self.n, rest)) / (self.length or self.m)

    @property
    def fits_2_4(self) -> bool:
        """Whether at most two of every aligned four weights are non-zero.

        So it is for 1:M, since four weights lie in two groups at most (M > 1), and for 2:M with M a
        multiple of 4.
        """
        return (self.n == 1 and self.m > 1) or (self.n == 2 and self.m % 4 == 0)


def stepwise(target: Pattern) -> list[Pattern]:
    """List the patterns of stepwise structure decay: ``M-1:M, M/2:M, M/4:M, ..., N:M``.

    Args:
        target: the last pattern, N:M.

    Raises:
        PatternError: unless M / N is a power of two.
    """
    ratio = target.m // target.n
    if target.m % target.n or ratio & (ratio - 1):
        raise PatternError(
            f"stepwise structure decay halves M until it is N; for {target}, M / N is not a power of two"
        )
    halves = [replace(target, n=target.m >> i) for i in range(1, ratio.bit_length())]
    return list(dict.fromkeys([replace(target, n=max(target.m - 1, target.n)), *halves, target]))


def geometric(target: Pattern, frames: int) -> list[Pattern]:
    """List the patterns of geometric structure decay: the same density in ever smaller groups.

    Args:
        target: the last pattern, N:M.
        frames: the number of patterns.

    Returns:
        ``kN:kM`` for k = 2^(frames - 1), ..., 2, 1.
    """
    return [replace(target, n=target.n << i, m=target.m << i) for i in reversed(range(frames))]
