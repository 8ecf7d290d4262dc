"""N:M patterns: at most N non-zeros in every group of M consecutive weights; and V:N:M patterns.

The command line imports this module, so it imports neither torch nor Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from nmrun.errors import ConfigError

# the patterns that --help and completion list; any other is allowed too
USUAL = ("1:2", "2:4", "4:8", "1:4", "2:8", "1:8", "2:16", "1:16", "1:32")
COLUMNS = 4  # of M, that a block of a V:N:M pattern keeps


class PatternError(ConfigError):
    """A text or numbers that are no pattern. The message says what is allowed. It is a ConfigError."""


@dataclass(frozen=True, order=True)
class Pattern:
    """N:M sparsity: at most N non-zeros in every M consecutive weights. ``str(pattern)`` is ``2:4``.

    With ``v`` above 1 it is V:N:M sparsity, the format of VENOM (Castro et al. 2023, arXiv
    2310.02065). In every block of V rows and M columns, all rows have their non-zeros in the same
    four columns, at most N in each row. Such a weight is N:M as well.

    Args:
        n: from 1 to ``m``; for ``v`` above 1, ``n <= 4 < m``.
        m: the weights of a group.
        length: the size of a dimension whose last group may be short (:meth:`over`). 0, the
            default: M must divide the size.
        v: the rows of a block.

    Raises:
        PatternError: for other numbers.
    """

    n: int
    m: int
    _: KW_ONLY
    length: int = 0
    v: int = 1

    def __post_init__(self) -> None:
        if self.v != 1 and not (self.v > 1 and 1 <= self.n <= COLUMNS < self.m):
            raise PatternError(
                f"{self.v}:{self.n}:{self.m} is not a V:N:M pattern: it takes V > 1 and N <= {COLUMNS} < M, "
                "such as 64:2:8"
            )
        if not 1 <= self.n <= self.m:
            raise PatternError(
                f"{self.n}:{self.m} is not an N:M pattern: it takes 1 <= N <= M, such as 2:4 or 1:16"
            )

    @classmethod
    def parse(cls, text: str | Pattern) -> Pattern:
        """Read ``"2:4"``, ``"2of4"``, ``"64:2:8"`` or ``"64of2of8"``; a Pattern stays as it is.

        Raises:
            PatternError: for any other text.
        """
        if isinstance(text, Pattern):
            return text
        number, between = r"(\d{1,6})", "(?::|of)"
        blocks = f"(?:{number}{between})?"
        match = re.fullmatch(f"{blocks}{number}{between}{number}", str(text).strip())
        if match is None:
            raise PatternError(
                f"{text!r} is not an N:M pattern: write two numbers of up to six digits with a colon, "
                "such as 2:4 or 1:16 (in YAML in quotes), or three for V:N:M, such as 64:2:8"
            )
        return cls(int(match[2]), int(match[3]), v=int(match[1] or 1))

    def over(self, length: int) -> Pattern:
        """The same pattern for a dimension of size ``length``, whose last group may be short: as if
        zeros filled it up."""
        return replace(self, length=length)

    @property
    def by_rows(self) -> Pattern:
        """The pattern without blocks: the N:M that each row holds."""
        return replace(self, v=1)

    def without_blocks(self, what: str) -> None:
        """Raise ConfigError where this is V:N:M; ``what`` is for N:M patterns."""
        if self.v > 1:
            raise ConfigError(f"{what} is for N:M patterns, not for {self}")

    def __str__(self) -> str:
        return f"{self.n}:{self.m}" if self.v == 1 else f"{self.v}:{self.n}:{self.m}"

    @property
    def slug(self) -> str:
        """The pattern as part of a path, where some systems allow no colon: ``2of4``."""
        return str(self).replace(":", "of")

    @property
    def density(self) -> float:
        """The largest share of non-zeros: n / m, or more where the last group is short."""
        groups, rest = divmod(self.length or self.m, self.m)
        return (groups * self.n + min(self.n, rest)) / (self.length or self.m)

    @property
    def fits_2_4(self) -> bool:
        """Whether 2:4 products can take such a weight: at most two of every aligned four weights are
        non-zero. That holds for 1:M with M above 1, since four weights lie in at most two groups,
        and for 2:M with M a multiple of 4."""
        return (self.n == 1 and self.m > 1) or (self.n == 2 and self.m % 4 == 0)


# the keys of a config that ``written`` has as one text
RATIO_KEYS = ("sparsity.n", "sparsity.m", "sparsity.v")


def written(ratio: Mapping[str, Any]) -> str:
    """The text of a config's ``n``, ``m`` and ``v``, as :meth:`Pattern.parse` reads it, or
    ``dense``."""
    if ratio["n"] is None and ratio["m"] is None:
        return "dense"
    rows = ratio.get("v", 1)
    return f"{ratio['n']}:{ratio['m']}" if rows == 1 else f"{rows}:{ratio['n']}:{ratio['m']}"


def hold(patterns: Iterable[object]) -> str:
    """What is said of the patterns of several weights: ``2:4 holds``, or ``1:8, 2:8 hold``."""
    each = dict.fromkeys(map(str, patterns))
    return f"{', '.join(each)} {'holds' if len(each) == 1 else 'hold'}"
