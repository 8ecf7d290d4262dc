"""Runs as a DataFrame: read from run folders and CSV files, filtered, summarised, and written as
CSV or JSON."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from nmrun.errors import ConfigError, RunError, neutral, refused, tell
from nmrun.lab.compare.notation import TIMES, label
from nmrun.lab.config import sources
from nmrun.lab.config.identity import GROUPS, OF_COMMAND
from nmrun.lab.keys import options
from nmrun.lab.keys.config import SOURCE, flatten
from nmrun.lab.runs import documents
from nmrun.lab.runs.run_folder import (
    FINAL,
    REMEDY,
    RESULT,
    WEIGHTS,
    RunFolder,
    RunFolders,
    walk,
    weights_in,
)
from nmrun.patterns import RATIO_KEYS, Pattern, written
from nmrun.registry import choose, did_you_mean, no_such

Lines = list[list[Any]]  # the head, then a line for each cell or run
FIRST = ("dataset", "model", "recipe", "sparsity", "optimizer", "schedule", "seed", "status")
LAST = ("seconds", "metric", "events", "precision", "commit", "id", "folder")
NEEDED = {"recipe", "sparsity", "seed", "status", "metric", "dataset", "model"}  # in a CSV file
STATUSES = ("finished", "failed", "interrupted")  # that a CSV file may have
# in a CSV file these stay texts, even where they consist of digits
TEXTS = {"id", "commit", "dataset.sha256", *(f"{group}.{SOURCE}" for group in sources.OWN)}
NO_TEXTS = {"": math.nan, "null": None, "true": True, "false": False}  # in any column
OUTSIDE_BRACKETS = re.compile(r",(?![^\[{(]*[\]})])")
LOCAL = {"folder", "track", *OF_COMMAND}  # change no result


def read_runs(
    paths: Sequence[str], strict: bool = False, folders: RunFolders | None = None
) -> pd.DataFrame:
    """The runs below some paths, as of :func:`collect`.

    Raises ConfigError where there is no such folder, or no run; RunError for changed results, where
    ``strict``.
    """
    for path in paths:
        if not (Path(path).is_dir() or (path.endswith(".csv") and Path(path).is_file())):
            raise ConfigError(
                f"{path}: no such folder of runs, nor a CSV file of them; --filter chooses among runs"
            )
    collected = collect(paths, strict, folders)
    if collected.empty:
        raise ConfigError(f"no run below {', '.join(paths)} (a run's folder holds result.json)")
    return collected


def collect(
    paths: Sequence[str | Path], strict: bool = False, folders: RunFolders | None = None
) -> pd.DataFrame:
    """One row for each ``result.json`` at or below ``paths``, once each; empty if there is none.

    A path may be a CSV file. What lies in a hidden folder below a path, as the trials of ``nmrun
    tune`` do, is left out.

    Columns are the config's groups by name (``recipe``; ``sparsity`` as ``2:4`` or ``dense``) and
    every dotted key (``optimizer.lr``; lists as text). Metrics are the final ones
    (``test/accuracy``), those of the best weights (``best/test/accuracy``), and ``flops/...``.
    Beside them there are ``status``, ``folder``, ``metric`` (the task's own), ``events`` (in words),
    ``switched_by`` (what decided STEP's switch: its ``rule``, ``t_max``, or that it is ``fixed``) and
    others. What a run does not have is NaN.

    A file that is not a whole result, or was changed, is left out with a line on standard error; so
    is a folder that cannot be read. Where ``strict`` they raise RunError.
    """
    folders = RunFolders() if folders is None else folders
    rows, left_out, unread = [], [], list[str]()
    files: dict[Path, Path] = {}  # by their real path, whatever links lead there
    for path in paths:
        if str(path).endswith(".csv"):
            rows += from_csv(path)
        found = []
        for place, below, names in walk(path, unread.append):
            if RESULT in (*names, *below):
                found.append(Path(place, RESULT))
            below[:] = [name for name in below if not name.startswith(".")]
        for file in sorted(found):
            files.setdefault(Path(os.path.realpath(file)), file)
    for file in files.values():
        run = folders[str(file.parent)]
        try:
            if run.result:
                rows.append(row(run.result, run.path))
                continue
            why = run.problem
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"it is no whole result ({type(error).__name__}: {error})"
        left_out.append(f"{file}: {why}")
    if left_out and strict:
        raise RunError(f"{'; '.join(left_out)}; {REMEDY}")
    if unread and strict:
        raise RunError("; ".join(unread))
    tell(f"left out: {line}" for line in [*left_out, *unread])
    # as objects, whole numbers stay whole beside runs without the key
    return pd.DataFrame(rows, dtype=object)


def row(result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The row of :func:`collect` for a ``result.json``."""
    config = result["config"]
    ratio, events = written(config["sparsity"]), result.get("events", ())
    environment = result.get("environment", {})
    keys = {
        key: str(value).replace(" ", "") if isinstance(value, list) else value
        for key, value in flatten(config).items()
    }
    return {
        **keys,
        **{
            group: config[group]["name"]
            for group in ("dataset", "model", "recipe", "optimizer", "schedule")
        },
        "sparsity": ratio,
        **{key: _other_run(place, ratio) for key, place in options.weights_named(config).items()},
        "seed": config["seed"],
        "status": result["status"],
        "id": result["id"],
        "folder": str(folder),
        "seconds": result.get("seconds"),
        "training_seconds": result.get("training_seconds", math.nan),
        "precision": environment.get("precision", math.nan),  # which trainer.precision=auto was
        "commit": environment.get("commit"),
        "metric": result.get("metric"),
        "higher_is_better": result.get("higher_is_better"),
        "events": "; ".join(event["sentence"] for event in events),
        "switched_by": next((e["by"] for e in events if e.get("kind") == "switch"), math.nan),
        **result["metrics"]["final"],
        **{f"best/{key}": value for key, value in result["metrics"]["best"].items()},
        **{f"flops/{key}": value for key, value in result.get("flops", {}).items()},
    }


def _other_run(place: str, ratio: str) -> str:
    """A name for the run from which a run of this ratio took its weights: its recipe, and its ratio
    where that is neither the same nor dense. Its folder would differ from seed to seed."""
    run, name = weights_in(place)
    file = "" if name == FINAL else Path(name).stem
    above = run.path.parts[-3:-1]  # <recipe>/<ratio>/<run>
    if len(above) < 2 or name not in WEIGHTS:
        return place
    recipe, other = above[0], above[1].replace("of", ":")
    words = (recipe, "" if other in (ratio, "dense") else other, file and f"({file})")
    return " ".join(word for word in words if word)


# --- elsewhere ------------------------------------------------------------------------------------


def from_csv(path: str | Path) -> list[dict[str, Any]]:
    """Read what :func:`to_csv` wrote, as rows of :func:`collect`. ``folder`` is the line in the
    file. A spreadsheet may have saved the file, with a UTF-8 mark at the beginning and TRUE for
    true; empty lines are skipped. Raises ConfigError for any other file."""
    runs = []
    with (
        refused(f"{path}: no file of runs: ", OSError, ValueError, csv.Error),
        Path(path).open(encoding="utf-8-sig", newline="") as file,
    ):
        reader = csv.DictReader(file)
        names = [*(reader.fieldnames or ())]
        if missing := sorted(NEEDED - {*names}):
            hint = "" if len(names) > 1 else "; between columns there have to be commas"
            raise ConfigError(f"it has no column {', '.join(missing)}{hint}")
        if twice := [name for name, count in Counter(filter(None, names)).items() if count > 1]:
            raise ConfigError(f"it has more than one column {', '.join(twice)}")
        for line in reader:
            if not any(line.values()):  # commas alone
                continue
            with refused(f"line {reader.line_num}: ", ConfigError):
                run = _run(line)
            without = dict.fromkeys(LAST, math.nan)
            runs.append({**without, **run, "folder": f"{path}:{reader.line_num}"})
        if not runs:
            raise ConfigError("no run is in it")
    return runs


def _run(line: dict[str, str]) -> dict[str, Any]:
    """The values of a line. Raises ConfigError for one that no run has."""
    if None in line or None in line.values():
        raise ConfigError("it has not as many values as there are columns")
    # runs without a model are a table of their own
    if empty := sorted(name for name in NEEDED - {"model"} if not line[name]):
        raise ConfigError(f"{', '.join(empty)} has no value")
    run = {neutral(name): _value(name, neutral(text)) for name, text in line.items()}
    choose("status", str(run["status"]), STATUSES)
    if run["sparsity"] != "dense":
        run["sparsity"] = str(Pattern.parse(str(run["sparsity"])))  # a spreadsheet writes 02:04
    for name, value in run.items():
        is_number = "/" in name or name in ("seed", *TIMES)
        if is_number and value is not None and type(value) not in (int, float):
            raise ConfigError(f"{name}={value} is no number")
    seed, direction = run["seed"], run.get("higher_is_better")
    if seed is None or seed % 1:
        raise ConfigError(f"seed={label(seed)} is no whole number")
    if isinstance(direction, str):
        raise ConfigError(f"higher_is_better={direction}: it takes true or false")
    return run


def _value(name: str, text: str) -> Any:
    if (word := text.lower()) in NO_TEXTS:
        return NO_TEXTS[word]
    # Python takes 2024_01 for 202401, and digits of other scripts too
    if name not in TEXTS and "_" not in text and text.isascii():
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(text)
    return text


def to_csv(runs: pd.DataFrame) -> str:
    """Runs as CSV, with values as on a command line, without what changes no result."""
    columns = [column for column in runs.columns if column.partition(".")[0] not in LOCAL]
    lines = [[_text(run[column]) for column in columns] for run in runs.to_dict("records")]
    return as_text([columns, *lines], "csv")


def _text(value: Any) -> str:
    return "" if isinstance(value, float) and math.isnan(value) else label(value)


# --- what is in them ------------------------------------------------------------------------------


def metrics_and_keys(runs: pd.DataFrame) -> tuple[list[str], list[str]]:
    """The metrics of runs, and the keys of their settings and of all other columns."""
    metrics = [c for c in runs.columns if "/" in c or c == "training_seconds"] + ["seconds"]
    return metrics, [column for column in runs.columns if column not in metrics]


def check_name(name: str, names: Sequence[str], what: str) -> None:
    """Raise ConfigError for a name that the runs do not have; ``what`` is ``key`` or ``metric``."""
    if name not in names:
        by_leaf = [n for n in names if n.rpartition(".")[2] == name]
        hint = f"; did you mean {' or '.join(by_leaf)}?" if by_leaf else did_you_mean(name, names)
        listing = no_such(f"{what} in these runs", name, names, "nmrun table --runs", hint)
        raise ConfigError(f"{name}: {listing}")


def usual_metric(runs: pd.DataFrame) -> str:
    """The task's metric on the test split, or on the validation split where there is no other."""
    names = runs["metric"].dropna()
    name = names.iloc[0] if len(names) else "accuracy"
    test, other = f"test/{name}", f"eval/{name}"
    tested = test in runs and runs[test].notna().any()
    return other if len(names) and not tested and other in runs else test


def same(a: str, b: str) -> bool:
    """Whether two texts are one value: ``0.001`` and ``1e-3``, ``[1,2]`` and ``[1, 2]``."""
    a, b = a.replace(" ", ""), b.replace(" ", "")
    try:
        return a == b or float(a) == float(b)
    except ValueError:
        return False


def filtered(runs: pd.DataFrame, conditions: Sequence[str]) -> pd.DataFrame:
    """The runs that fit all conditions: ``KEY=VALUE`` each, or several values with commas between;
    ``KEY!=VALUE`` for all others.

    A run without such a key stays: an STE run has no ``recipe.switch`` to differ in, and dense
    training, the reference, has no ratio. Raises ConfigError for an unknown key, and for a value
    that none of the remaining runs has."""
    for condition in conditions:
        key, equals, text = condition.partition("=")
        if not equals:
            raise ConfigError(
                f"--filter {condition}: write KEY=VALUE, such as recipe=ste, or KEY!=VALUE (folders come before --filter)"
            )
        others, key = key.endswith("!"), key.removesuffix("!")
        check_name(key, metrics_and_keys(runs)[1], "key")
        labels = runs[key].map(label)
        known, chosen = {*labels}, set[str]()
        listing = f"{key} is {', '.join(sorted(known - {'-'}))}"
        for value in map(str.strip, OUTSIDE_BRACKETS.split(text)):
            found = {each for each in known if same(each, value)}
            if not found:
                raise ConfigError(f"--filter {key}: no run has {value}; {listing}")
            chosen |= found
        of_ratio = key in ("sparsity", *RATIO_KEYS) and not others
        stays = runs["sparsity"] == "dense" if of_ratio else labels == "-"
        runs = runs[labels.isin(known - chosen if others else chosen) | stays]
        if runs.empty:
            raise ConfigError(f"--filter {condition} leaves no run; {listing}")
    return runs


def verify(runs: pd.DataFrame) -> None:
    """Compare the files of the finished runs with the hashes in their results.

    Raises RunError for all files that are missing or changed, ConfigError for runs of a CSV file.
    """
    wrong = []
    for folder in map(Path, runs["folder"][runs["status"] == "finished"]):
        if not folder.is_dir():
            raise ConfigError(f"--verify: {folder} is no folder here, so there is nothing to check")
        broken = RunFolder(folder).broken(contents=True)  # read anew
        wrong += [f"{folder / name}: {problem}" for name, problem in broken.items()]
    if wrong:
        raise RunError(f"{'; '.join(wrong)}; {REMEDY}")


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs in short: the columns of ``FIRST``, the settings that differ, the metrics, the columns
    of ``LAST``. ``attrs["shared"]`` has the settings that do not differ.
    """
    keys = [
        key
        for key in runs.columns
        if key.partition(".")[0] in GROUPS
        and "." in key
        and not key.endswith(".name")
        and key not in RATIO_KEYS
    ]
    values = {key: runs[key][runs[key].map(label) != "-"] for key in keys}
    counts = {key: values[key].map(label).nunique() for key in keys}
    differing = [key for key in keys if counts[key] > 1]
    metrics = [key for key in runs.columns if "/" in key]
    first = [key for key in FIRST if key in runs]  # a CSV file may lack some
    short = typed(runs[[*first, *differing, *metrics, *LAST]])
    short.attrs["shared"] = {key: values[key].iloc[0] for key in keys if counts[key] == 1}
    return short


# --- for programs ---------------------------------------------------------------------------------


def as_text(lines: Lines, style: str) -> str:
    """Lines as ``csv`` or ``json`` (a list of objects). In CSV a list is its items with spaces
    between. In JSON an infinite number is null."""
    if style == "csv":
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(map(_join, line) for line in lines)
        return out.getvalue()
    head, *rest = lines
    records = [documents.strict(dict(zip(head, line, strict=True))) for line in rest]
    return json.dumps(records, indent=1, default=str, allow_nan=False) + "\n"


def _join(value: Any) -> Any:
    if isinstance(value, dict):
        return label(value)
    return " ".join(map(str, value)) if isinstance(value, list) else value


def as_lines(runs: pd.DataFrame) -> Lines:
    """A line for each run, with None for missing values."""
    whole = runs.astype(object)
    return [list(runs.columns), *whole.where(pd.notna(whole), None).to_numpy().tolist()]


def frame(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """A DataFrame of dictionaries, typed by :func:`typed`."""
    # as objects, whole numbers stay whole beside rows without the key
    return typed(pd.DataFrame(rows, dtype=object))


def typed(objects: pd.DataFrame) -> pd.DataFrame:
    """Give each column of objects the type that its values have.

    These are ``bool``, ``int64`` and ``float64``; with missing values ``boolean``, ``Int64`` and
    ``float64``, which is also the type of a column of missing values alone. Texts have pandas' type
    for them. A column of several kinds stays one of objects.
    """
    return objects.apply(_column) if len(objects.columns) else objects


def _column(column: pd.Series) -> pd.Series:
    values = column.dropna()
    kinds = {type(value) for value in values}
    whole = len(values) == len(column)
    if kinds == {bool}:
        return column.astype("bool" if whole else "boolean")
    if kinds == {int} and all(-(2**63) <= value < 2**63 for value in values):
        return column.astype("int64" if whole else "Int64")
    if kinds <= {int, float}:
        return column.astype("float64")
    return column.infer_objects()
