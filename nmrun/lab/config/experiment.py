"""The words of a sweep that stand for others: ``experiment=NAME scale=SCALE``, ``zip=KEY,KEY``
and ``launcher=NAME``.

An experiment is a table or figure of a paper as one file, ``conf/experiment/<name>.yaml``. Its
overrides replace the word before Hydra reads it. So its runs are the same, in the same folders, as
those of overrides that were written by hand. An experiment of the user's own in ``--config-dir`` is
another thing: Hydra composes it, as any group.
"""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Glob
from hydra.errors import HydraException

from nmrun.errors import ConfigError, raise_all, refused
from nmrun.lab.config import command_line, precheck
from nmrun.lab.config.composition import Cache
from nmrun.lab.config.identity import run_folder
from nmrun.lab.keys import options
from nmrun.lab.keys.config import Config
from nmrun.lab.runs import documents
from nmrun.ranges import OPTIONAL_TEXT, TEXT, Check
from nmrun.registry import choose, did_you_mean, no_such

SCALES = ("smoke", "small", "paper")
FIGURES = ("ratio", "curves", "flops")


def _are_lines(*values: Any) -> bool:
    try:
        return bool(values) and all(
            isinstance(v, str) and shlex.split(v) is not None for v in values
        )
    except ValueError:  # a quotation mark without its partner
        return False


def _are_sweeps(value: Any) -> bool:
    scales = value.values() if isinstance(value, dict) else [value]
    return all(_are_lines(*(each if isinstance(each, list) else [each])) for each in scales)


LINE = "a line of overrides, its quotations closed"
REPORT = {
    "rows?": TEXT,
    "cols?": TEXT,
    "metric?": OPTIONAL_TEXT,
    "baseline?": OPTIONAL_TEXT,
    "figures?": [str],
}
SHAPE = {
    "title": TEXT,
    "source": TEXT,
    "note?": OPTIONAL_TEXT,
    "sweep": Check(f"{LINE}, a list of such lines, or either of them for each scale", _are_sweeps),
    "scales": Check(
        f"for each of {', '.join(SCALES)} that you want {LINE}",
        lambda value: isinstance(value, dict) and _are_lines(*value.values()),
    ),
    "report?": REPORT,
    "paper?": {"source": TEXT, "values": {str: {str: object}}},
}


@dataclass(frozen=True)
class Experiment:
    """A file of ``conf/experiment``.

    ``sweeps`` has by scale the overrides of each sweep, ``zip=`` included; ``scales`` what each
    scale adds. ``rows`` to ``baseline`` are as for ``nmrun table``; keys that no run has are left
    out. ``figures`` are kinds of ``nmrun plot``, ``curves`` with its key (``curves eval/loss``).
    ``paper`` has the published values as printed, by row and column. ``word`` is what
    ``experiment=`` takes: the name, or the path of a user's own file.
    """

    word: str
    title: str
    source: str
    note: str
    sweeps: dict[str, list[str]]
    scales: dict[str, str]
    paper: dict[str, dict[str, str]]
    paper_source: str
    rows: str = "recipe"
    cols: str = "sparsity"
    metric: str | None = None
    baseline: str | None = None
    figures: Sequence[str] = ()

    @property
    def name(self) -> str:
        return Path(self.word).name.removesuffix(".yaml")

    def overrides(self, scale: str, changes: Sequence[str] = ()) -> list[list[str]]:
        """The overrides of each sweep, with ``zip=`` replaced. A scale's win over a sweep's for the
        same key, and ``changes`` over both.

        Raises ConfigError for a scale that does not exist, and for keys that cannot be zipped.
        """
        choose("scale", scale, self.scales)
        sweeps = []
        for sweep in self.sweeps[scale]:
            words = [*shlex.split(sweep), *shlex.split(self.scales[scale]), *changes]
            last = {
                word if command_line.key(word) == "zip" else command_line.key(word): word
                for word in words
            }
            sweeps += rows(list(last.values()))
        return sweeps


def names() -> list[str]:
    """List the names of the experiments in the package."""
    folder = files("nmrun.conf") / "experiment"
    return sorted(
        file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml")
    )


def selection(text: str) -> list[Experiment]:
    """The experiments of a command line, each once: names with commas between, or ``all``."""
    return [load(name) for name in (names() if text == "all" else dict.fromkeys(text.split(",")))]


def load(name: str) -> Experiment:
    """An experiment by its name, or of a user's own file (``.yaml``).

    Raises ConfigError where there is no such experiment, or the file is none.
    """
    is_file = name.endswith(".yaml")
    if not is_file and name not in names():
        hint = did_you_mean(name, names()) or (
            "; it is a table or figure of a paper; yours are DIR/experiment/NAME.yaml with "
            "--config-dir DIR, and PATH.yaml for a table"
        )
        line = no_such("experiment", name, names(), "nmrun help experiment", hint)
        raise ConfigError(f"experiment={name}: {line}")
    file = Path(name) if is_file else files("nmrun.conf") / "experiment" / f"{name}.yaml"
    content = options.read_yaml(file, f"experiment={name}")
    with refused(f"experiment={name}: ", ValueError):
        return _read(name, content)


def _read(word: str, content: Any) -> Experiment:
    keys = _keys(SHAPE)
    if not isinstance(content, dict):
        raise ValueError(f"it takes the keys {', '.join(keys)}")
    _known("key", content, keys)
    if problem := documents.misfit(content, SHAPE):
        raise ValueError(problem)
    report, paper = content.get("report", {}), content.get("paper", {"source": "", "values": {}})
    scales: dict[str, str] = content["scales"]
    sweep: Any = content["sweep"]
    _known("key of report", report, _keys(REPORT))
    _known("figure", [each.partition(" ")[0] for each in report.get("figures", [])], FIGURES)
    _known("scale", scales, SCALES)
    by_scale: dict[str, Any] = sweep if isinstance(sweep, dict) else dict.fromkeys(scales, sweep)
    if by_scale.keys() != scales.keys():
        raise ValueError(f"sweep: one for each of {', '.join(scales)}, or one for all")
    printed = paper["values"].items()
    return Experiment(
        word=word,
        title=content["title"],
        source=content["source"],
        note=content.get("note") or "",
        sweeps={key: [each] if isinstance(each, str) else each for key, each in by_scale.items()},
        scales=scales,
        paper={row: {key: str(value) for key, value in cells.items()} for row, cells in printed},
        paper_source=paper["source"],
        **report,
    )


def _keys(shape: Iterable[str]) -> list[str]:
    return [key.rstrip("?") for key in shape]


def _known(what: str, names: Iterable[Any], known: Collection[str]) -> None:
    for name in map(str, names):
        if name not in known:
            raise ValueError(f"{name}: {no_such(what, name, known)}")


def own(config_dir: str | None) -> list[str]:
    """The names of the experiments in a folder of the user's own, which Hydra composes."""
    return [file.stem for file in options.in_folder(config_dir).get("experiment", ())]


def expand(words: Sequence[str], multirun: bool, config_dir: str | None = None) -> list[list[str]]:
    """The overrides of each sweep, with those that ``experiment``, ``scale``, ``zip`` and
    ``launcher`` stand for.

    ``experiment`` takes several names with commas between, or ``all``; ``scale`` is ``small`` by
    default. Those of the user's own in ``config_dir`` are left as they are. Raises ConfigError for
    an unknown one, for keys that cannot be zipped, and without ``-m``.
    """
    words = list(map(command_line.spelt_out, words))
    values = {command_line.key(word): word.partition("=")[2] for word in words}
    scale, chosen = values.get("scale", "small"), values.get("experiment", "").split(",")
    here = {*chosen} & {*own(config_dir)} if "experiment" in values else set()
    others = [name for name in chosen if name not in here]
    problems, asked = list[str](), f"experiment={values.get('experiment')}"
    if "zip" in values and not multirun:
        problems.append(f"zip={values['zip']}: several values make a sweep; add -m")
    if "scale" in values and "experiment" not in values:
        how = "of which experiment? Add experiment=NAME (nmrun help experiment lists all)"
        problems.append(f"scale={scale}: {how}")
    if here and others:
        theirs = f"{', '.join(sorted(here))} of --config-dir, {', '.join(others)} not"
        problems.append(f"{asked}: {theirs}; give two commands")
    raise_all(problems)
    if here:
        return rows([w.lstrip("+") if command_line.key(w) == "experiment" else w for w in words])
    if "experiment" not in values:
        return rows(words)
    changes = [word for word in words if command_line.key(word) not in ("experiment", "scale")]
    every = [each.overrides(scale, changes) for each in selection(values["experiment"])]
    raise_all([] if multirun else [f"{asked} is a sweep: add -m"])
    return list(itertools.chain(*every))


def rows(words: Sequence[str]) -> list[list[str]]:
    """One sweep for each row of the values of the keys of ``zip=KEY,KEY``.

    The rows of several ``zip=`` words are combined with each other, and with all other swept keys.
    Raises ConfigError for keys that are not swept, are zipped twice, or have different numbers of
    values.
    """
    others = [word for word in words if command_line.key(word) != "zip"]
    zips = [word for word in words if command_line.key(word) == "zip"]
    if not zips:
        return [others]
    written = {command_line.key(word): word for word in others}
    keys = [zipped.partition("=")[2].split(",") for zipped in zips]
    problems = [
        f"zip: {key} is zipped twice" for key, n in Counter(itertools.chain(*keys)).items() if n > 1
    ]
    axes: list[list[dict[str, str]]] = []  # the rows of each
    for zipped, names in zip(zips, keys, strict=True):
        if len(names) < 2:
            problems.append(
                f"{zipped}: it takes two keys or more, such as zip=sparsity,optimizer.lr"
            )
            continue
        try:
            columns = [_values(written[key]) if key in written else [] for key in names]
        except HydraException:  # precheck reports words that cannot be read
            return [others]
        counts = dict(zip(names, map(len, columns), strict=True))
        problems += [
            f"{zipped}: {key} has no list of values here, as in {key}=a,b"
            f"{'' if key in written else did_you_mean(key, written)}"
            for key, count in counts.items()
            if count < 2
        ]
        if min(counts.values()) > 1 and len({*counts.values()}) > 1:
            have = ", ".join(f"{key} {count}" for key, count in counts.items())
            problems.append(f"{zipped}: these keys must have as many values each, and have: {have}")
        axes.append([dict(zip(names, row, strict=True)) for row in zip(*columns, strict=False)])
    raise_all(problems)
    sweeps = []
    for choice in itertools.product(*axes):
        row = {key: value for part in choice for key, value in part.items()}
        sweep = [(word, row.get(command_line.key(word))) for word in others]
        sweeps.append(
            [
                word
                if value is None
                else command_line.unescaped(f"{word.partition('=')[0]}={value}")
                for word, value in sweep
            ]
        )
    return sweeps


def _values(word: str) -> list[str]:
    """The values that an override lists; none for one value, an interval or a glob."""
    override = command_line.parse(word)
    listed = override.is_discrete_sweep() and not isinstance(override.value(), Glob)
    return list(override.sweep_string_iterator()) if listed else []


def configs(
    experiment: Experiment, scale: str, changes: Sequence[str] = (), cache: Cache | None = None
) -> list[Config]:
    """The checked configs of an experiment's runs, each once. ``changes`` are overrides that win
    over its own."""
    by_folder: dict[str, Config] = {}
    sweeps = [
        [word for word in command_line.own_recipe(words) if not command_line.is_hydras(word)]
        for words in experiment.overrides(scale, changes)
    ]
    for _, config in precheck.read(sweeps, multirun=True, cache=cache, to_run=False).jobs:
        by_folder.setdefault(str(run_folder(config)), config)
    return list(by_folder.values())
