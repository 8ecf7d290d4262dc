"""``zip=KEY,KEY``: keys of a sweep whose values are paired, in place of every combination."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException

from nmrun.errors import ConfigError
from nmrun.lab.words.sweep import typed
from nmrun.registry import did_you_mean


def rows(words: Sequence[str]) -> list[list[str]]:
    """Replace ``zip=KEY,KEY`` by one sweep for each row of the values of these keys.

    Each ``zip=`` word is a group of keys. The rows of the groups are combined with each other, and
    with all other swept keys.

    Args:
        words: the overrides of a command line.

    Returns:
        The overrides of each sweep.

    Raises:
        ConfigError: for keys that are not swept, are zipped twice, or have different numbers of
            values.
    """
    groups = {word: word.partition("=")[2].split(",") for word in words if key(word) == "zip"}
    if not groups:
        return [list(words)]
    written = {key(word): word for word in words if key(word) != "zip"}
    values: dict[str, list[str]] = {}
    problems = [
        f"zip: {name} is zipped twice"
        for name, n in Counter(itertools.chain(*groups.values())).items()
        if n > 1
    ]
    for zipped, names in groups.items():
        if len(names) < 2:
            problems.append(
                f"{zipped}: it takes two keys or more, such as zip=sparsity,optimizer.lr"
            )
            continue
        for name in names:
            try:
                found = _values(written[name]) if name in written else []
            except HydraException:  # precheck reports words that cannot be read
                return [[word for word in words if key(word) != "zip"]]
            values[name] = found
            if len(found) < 2:
                hint = "" if name in written else did_you_mean(name, written)
                problems.append(
                    f"{zipped}: {name} has no list of values here, as in {name}=a,b{hint}"
                )
        if len({len(values[name]) for name in names}) > 1 and all(
            len(values[name]) > 1 for name in names
        ):
            counts = ", ".join(f"{name} {len(values[name])}" for name in names)
            problems.append(
                f"{zipped}: these keys must have as many values each, and have: {counts}"
            )
    if problems:
        raise ConfigError(problems)
    sweeps = []
    for choice in itertools.product(*(range(len(values[names[0]])) for names in groups.values())):
        row = {
            name: values[name][i]
            for i, names in zip(choice, groups.values(), strict=True)
            for name in names
        }
        sweeps.append(
            [
                typed(f"{word.partition('=')[0]}={row[key(word)]}") if key(word) in row else word
                for word in words
                if key(word) != "zip"
            ]
        )
    return sweeps


def _values(word: str) -> list[str]:
    """The values of a sweep as they stand in overrides; none for what does not list them (one
    value, an interval, a glob).
    """
    override = OverridesParser.create().parse_override(word)
    listed = override.is_discrete_sweep() and not isinstance(override.value(), Glob)
    return list(override.sweep_string_iterator()) if listed else []


def key(word: str) -> str:
    """Return the key of an override, without ``+``, ``~`` and its value."""
    return word.lstrip("+~").partition("=")[0]
