"""The words of a command line: overrides with their values, and the words that stand for others:
``experiment=NAME scale=SCALE``, ``zip=KEY,KEY`` and ``launcher=NAME``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    Glob,
    IntervalSweep,
    Override,
    OverrideType,
    Quote,
    QuotedString,
    RangeSweep,
    ValueType,
)
from hydra.errors import HydraException

from nmrun.errors import ConfigError, raise_all
from nmrun.lab.config import experiment, suggestions
from nmrun.lab.config.suggestions import RATIOS
from nmrun.lab.keys import options as groups
from nmrun.ranges import plain
from nmrun.recipes import installed
from nmrun.registry import choose, did_you_mean

# texts that Hydra reads without quotes; of letters it takes those of ASCII
PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_/.-]*")
LAUNCHER = "hydra/launcher"
MOST_JOBS = 10_000  # of one command, since all are composed before the first one runs


def spelt_out(word: str) -> str:
    """The word for Hydra that ``launcher=slurm`` or ``launcher.partition=gpu`` stands for; any other
    as it is."""
    named = re.sub(r"^launcher=", f"{LAUNCHER}=", word)
    return re.sub(r"^([+~]*)launcher\.", r"\1hydra.launcher.", named)


def own_recipe(words: list[str], config_dir: str | None = None) -> list[str]:
    """The overrides, in which ``++`` lets Hydra add the keys of a user's own recipe class."""
    keys = {word.lstrip("+").partition("=")[0]: word.partition("=")[2] for word in words}
    if keys.keys().isdisjoint({"recipe", "recipe._target_"}):
        return words
    named = keys.get("recipe", "custom")
    if "recipe._target_" in keys and "," in named:  # each of them would be the class
        raise ConfigError(
            f"recipe._target_ is one recipe, and recipe={named} several: beside others in a sweep a "
            "class has a name, by a file of recipe/ in a --config-dir"
        )
    own = {file.stem for file in groups.in_folder(config_dir).get("recipe", ())} | {*installed()}
    if "recipe._target_" not in keys and own.isdisjoint(named.split(",")):
        return words
    words = [
        "++" + word.lstrip("+") if word.lstrip("+").startswith("recipe.") else word
        for word in words
    ]
    return words if "recipe" in keys else ["recipe=custom", *words]


def typed(config_dir: str | None, words: Sequence[str]) -> str:
    """The command with these options and overrides."""
    place = [] if config_dir is None else ["--config-dir", str(Path(config_dir).absolute())]
    return shlex.join(["nmrun", *place, *words])


def of_job(overrides: Sequence[str], config_dir: str | None = None) -> str:
    """The command that asks for one job alone; in a sweep that is not what was typed."""
    return typed(config_dir, [word for word in overrides if key(word) != "detach"])


def of_hydra(job: Any, overrides: Sequence[str]) -> str:
    """Likewise for a job that Hydra launched, by its config of it."""
    places = [
        source.path for source in job.runtime.config_sources if source.provider == "command-line"
    ]
    return of_job(overrides, places[0] if places else None)


def without_effect(words: Sequence[str]) -> list[str]:
    """Say which overrides of one run change nothing: those of the ratio beside ``recipe=dense``."""
    ratios = [word for word in words if _of_ratio(word) and word != "sparsity=dense"]
    if "recipe=dense" not in words or not ratios:
        return []
    return [f"recipe=dense has no ratio: {' '.join(ratios)} changes nothing"]


def _of_ratio(word: str) -> bool:
    return key(word).partition(".")[0] == "sparsity"


@functools.lru_cache(maxsize=4096)  # the words of a sweep come again in many of its jobs
def parse(word: str) -> Override:
    """An override as Hydra reads it. Raises HydraException."""
    return OverridesParser.create().parse_override(word)


def parsed(words: Sequence[str]) -> tuple[list[Override], list[str]]:
    """The overrides that can be read, and a line for each word that cannot."""
    overrides, problems, rest = [], [], list(words)
    while rest:
        word = rest.pop(0)
        try:
            override = parse(word)
            if not override.key_or_group:
                raise HydraException
            if isinstance(value := override.value(), RangeSweep):
                length(value)
            overrides.append(override)
        except ArithmeticError:
            problems.append(f"{word}: a range takes numbers, and a step other than 0")
        except HydraException:
            while rest and "=" not in rest[0] and word.count("{") > word.count("}"):
                word += f" {rest.pop(0)}"  # the shell cut it at its spaces
            problems.append(f"{word}: cannot be read as key=value{quoting(word)}")
    return overrides, problems


def values(override: Override, options: Sequence[str]) -> list[Any]:
    """The values of an override: one or several, both ends of an interval, or what a glob matches."""
    value = override.value()
    if isinstance(value, IntervalSweep):
        return [value.start, value.end]
    if isinstance(value, Glob):
        return value.filter(list(options))
    if override.is_sweep_override():
        return [parse(f"k={text}").value() for text in override.sweep_string_iterator()]
    return [value]


def length(sweep: RangeSweep) -> float:
    """How many values a range has, without making them: there may be millions, or no end. Raises
    ArithmeticError where a step of 0 or no number is in it."""
    span = (sweep.stop or 0) - (sweep.start or 0)
    if math.isnan(steps := span / sweep.step):
        raise ArithmeticError
    if math.isinf(steps):
        return math.inf if steps > 0 else 0
    return max(0, int(-(-span // sweep.step)))


def too_many(jobs: float) -> str:
    """Say that a sweep has more jobs than a command takes."""
    return f"a sweep of {jobs:,} jobs: one command takes {MOST_JOBS:,}"


def word(key: str, value: Any) -> str:
    """The override that gives a key this value. ConfigError for a value that none can give."""
    try:
        override = Override(OverrideType.CHANGE, key, ValueType.ELEMENT, _element(value))
        return unescaped(f"{key}={override.get_value_element_as_str()}")
    except TypeError:
        own = ""
        if key in ("dataset", "model", "recipe"):
            own = f"; of your own: {key}._target_ in a file, see --config-dir"
        raise ConfigError(
            f"{key}: a {type(value).__name__}: it takes a number, a text, True, False, None, a list "
            f"or a dictionary{own}"
        ) from None


def _element(value: Any) -> Any:
    """A value as Hydra's parser would have read it; texts are quoted, but where they are plain
    words."""
    value = plain(value)
    if isinstance(value, str | Path):
        text = str(value)
        bare = PLAIN.fullmatch(text) and parsed([f"key={text}"])[0][0].value() == text
        return text if bare else QuotedString(text, Quote.double)
    if isinstance(value, list | tuple):
        return [_element(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _element(item) for name, item in value.items()}
    if value is None or isinstance(value, int | float):
        return str(value).lower() if isinstance(value, bool) else value
    raise TypeError


def quoting(word: str) -> str:
    """How a word that cannot be read as key=value should be written: the end of an error's line.

    In ``sparsity.overrides`` the keys of a dictionary are regular expressions. Hydra allows neither
    quotes around a key nor ``^`` in it. Characters of its own grammar need a backslash, which it
    removes.
    """
    key, equals, value = word.partition("=")
    if key != RATIOS:
        if not key.strip() or key != key.strip() or value[:1] == " ":
            return "; write key=value, without spaces around the ="
        if value.rstrip()[-1:] == ",":
            return "; it ends with a comma"
        if equals:
            return "; quote what is special in a value, as in 'key=\"(a)\"'"
        how = suggestions.written(word)
        return f"; {how}" if how else ""
    return (
        f"; write it as '{RATIOS}={{inner.1: 1:8, head: dense}}', all of it in quotes. "
        "Names take a backslash before ( ) [ ] { } : = and the comma, and no ^ or quotes"
    )


def key(word: str) -> str:
    """Return the key of an override, without ``+``, ``~`` and its value."""
    return word.lstrip("+~").partition("=")[0]


def alone(words: list[str]) -> list[str]:
    """The words of a job of a sweep as one types them for it alone: dense training has no ratio, and
    by ``sparsity=dense`` no recipe either."""
    if "sparsity=dense" in words:
        return [word for word in words if key(word).partition(".")[0] != "recipe"]
    if "recipe=dense" in words:
        return [word for word in words if not _of_ratio(word)]
    return words


@functools.lru_cache(maxsize=4096)  # the words of a sweep come again in many of its jobs
def unescaped(word: str) -> str:
    """An override as one types it, without the backslash that Hydra puts before a ratio's colon."""
    bare = re.sub(r"(?<=\d)\\:(?=\d)", ":", word)
    with contextlib.suppress(HydraException):
        return bare if bare != word and parse(bare).value() == parse(word).value() else word
    return word


def is_hydras(word: str) -> bool:
    """Whether an override is for Hydra itself (``hydra/launcher=joblib``)."""
    return word.lstrip("+~").startswith("hydra")


# --- words that stand for others --------------------------------------------------------------------


def expand(words: Sequence[str], multirun: bool, config_dir: str | None = None) -> list[list[str]]:
    """The overrides of each sweep, with those that ``experiment``, ``scale``, ``zip`` and
    ``launcher`` stand for, and a recipe of the user's own (:func:`own_recipe`).

    ``experiment`` takes several names with commas between, or ``all``; ``scale`` is ``small`` by
    default. Those of the user's own in ``config_dir`` are left as they are. Raises ConfigError for
    an unknown one, for keys that cannot be zipped, and without ``-m``.
    """
    words = list(map(spelt_out, words))
    values = {key(word): word.partition("=")[2] for word in words}
    scale = values.get("scale", "small")
    chosen = values["experiment"].split(",") if "experiment" in values else []
    of_folder = groups.in_folder(config_dir).get("experiment", ()) if chosen else ()
    own = {file.stem for file in of_folder}
    others = [name for name in chosen if name not in own]
    problems, asked = list[str](), f"experiment={values.get('experiment')}"
    if "zip" in values and not multirun:
        problems.append(f"zip={values['zip']}: several values make a sweep; add -m")
    if "scale" in values and not chosen:
        how = "of which experiment? Add experiment=NAME (nmrun help experiment lists all)"
        problems.append(f"scale={scale}: {how}")
    if 0 < len(others) < len(chosen):
        here = ", ".join(sorted({*chosen} & own))
        theirs = f"{here} of --config-dir, {', '.join(others)} not"
        problems.append(f"{asked}: {theirs}; give two commands")
    raise_all(problems)
    if others:
        changes = [word for word in words if key(word) not in ("experiment", "scale")]
        every = [
            of_experiment(each, scale, changes)
            for each in experiment.selection(values["experiment"])
        ]
        raise_all([] if multirun else [f"{asked} is a sweep: add -m"])
        sweeps = list(itertools.chain(*every))
    else:
        sweeps = _rows([w.lstrip("+") if key(w) == "experiment" else w for w in words])
    return [own_recipe(each, config_dir) for each in sweeps]


def of_experiment(
    asked: experiment.Experiment, scale: str, changes: Sequence[str] = ()
) -> list[list[str]]:
    """The overrides of each sweep of an experiment, with ``zip=`` replaced. A scale's win over a
    sweep's for the same key, and ``changes`` over both.

    Raises ConfigError for a scale that does not exist, and for keys that cannot be zipped.
    """
    choose("scale", scale, asked.scales)
    sweeps = []
    for sweep in asked.sweeps[scale]:
        words = [*shlex.split(sweep), *shlex.split(asked.scales[scale]), *changes]
        last = {word if key(word) == "zip" else key(word): word for word in words}
        sweeps += _rows(list(last.values()))
    return sweeps


def _rows(words: Sequence[str]) -> list[list[str]]:
    """One sweep for each row of the values of the keys of ``zip=KEY,KEY``.

    The rows of several ``zip=`` words are combined with each other, and with all other swept keys.
    Raises ConfigError for keys that are not swept, are zipped twice, or have different numbers of
    values, and for more rows than a command takes, which are not made.
    """
    others = [word for word in words if key(word) != "zip"]
    zips = [word for word in words if key(word) == "zip"]
    if not zips:
        return [others]
    overrides, unreadable = parsed(others)
    if unreadable:  # precheck reports these
        return [others]
    written = {key(word): override for word, override in zip(others, overrides, strict=True)}
    keys = [zipped.partition("=")[2].split(",") for zipped in zips]
    problems = [
        f"zip: {name} is zipped twice"
        for name, n in Counter(itertools.chain(*keys)).items()
        if n > 1
    ]
    axes: list[list[dict[str, str]]] = []  # the rows of each
    for zipped, names in zip(zips, keys, strict=True):
        if len(names) < 2:
            problems.append(
                f"{zipped}: it takes two keys or more, such as zip=sparsity,optimizer.lr"
            )
            continue
        try:
            columns = [_listed(written[name]) if name in written else [] for name in names]
        except ConfigError as error:
            problems += error.problems
            continue
        counts = dict(zip(names, map(len, columns), strict=True))
        problems += [
            f"{zipped}: {name} has no list of values here, as in {name}=a,b"
            f"{'' if name in written else did_you_mean(name, written)}"
            for name, count in counts.items()
            if count < 2
        ]
        if min(counts.values()) > 1 and len({*counts.values()}) > 1:
            have = ", ".join(f"{name} {count}" for name, count in counts.items())
            problems.append(f"{zipped}: these keys must have as many values each, and have: {have}")
        axes.append([dict(zip(names, row, strict=True)) for row in zip(*columns, strict=False)])
    if not problems and (rows := math.prod(map(len, axes))) > MOST_JOBS:
        problems.append(f"{' '.join(zips)}: {too_many(rows)}")
    raise_all(problems)
    sweeps = []
    for choice in itertools.product(*axes):
        row = {name: value for part in choice for name, value in part.items()}
        sweeps.append(
            [
                unescaped(f"{word.partition('=')[0]}={row[key(word)]}")
                if key(word) in row
                else word
                for word in others
            ]
        )
    return sweeps


def _listed(override: Override) -> list[str]:
    """The values that an override lists; none for one value, an interval or a glob. ConfigError for a
    range of more than a command takes."""
    value = override.value()
    if isinstance(value, RangeSweep) and (count := length(value)) > MOST_JOBS:
        raise ConfigError(f"{override.input_line}: {too_many(count)}")
    listed = override.is_discrete_sweep() and not isinstance(value, Glob)
    return list(override.sweep_string_iterator()) if listed else []
