"""A run's folder: which files it has, and whether they are as the run left them.

A finished run is sealed: ``result.json`` has the size and SHA-256 of each of its files, and a
SHA-256 of itself. The log and the checkpoint are left out, as they may be removed. The folder is
called ``s<seed>-<id>``, and what is in it has this id. Folders are copied, shared and damaged, so
nothing of one is believed before that was looked at; :class:`RunFolder` does it for all readers.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nmrun import atomic
from nmrun.errors import ConfigError, RunError, neutral, tell
from nmrun.lab.runs import documents
from nmrun.ranges import Check

RESULT, CONFIG, METRICS, LOG = "result.json", "config.yaml", "metrics.jsonl", "run.log"
CHECKPOINT, PREVIOUS = "checkpoint.pt", "checkpoint.previous.pt"
FINAL, BEST, DENSE = WEIGHTS = ("model.safetensors", "best.safetensors", "dense.safetensors")
OWN = (".safetensors", ".pt", ".pth", ".bin")  # files of weights that others have saved
SEALED = (CONFIG, METRICS, *WEIGHTS)
REMEDY = f"remove it, and the run's command makes it again (with force=true for {METRICS})"
CHANGED = "it was changed: its SHA-256 is another"
UNSEALED = "it was changed: it has no SHA-256, as that of a finished run has"
NAME = re.compile(r"s-?\d+-([0-9a-f]{10})")
ENDS = "\n\r\x85\u2028\u2029"  # of lines in YAML
# the command above config.yaml is a comment, with as many lines as its values have
HEAD = re.compile(f"# (nmrun[^{ENDS}]*(?:[{ENDS}]# [^{ENDS}]*)*)")
# what readers rely on, as of documents.misfit
NUMBER, TEXT, NAMED = int | float | None, str | None, {"name?": str}
CONFIG_SHAPE = {
    "dataset?": NAMED, "model?": NAMED, "recipe?": NAMED, "optimizer?": NAMED, "schedule?": NAMED,
    "sparsity?": {"n": NUMBER, "m": NUMBER}, "trainer?": dict, "track?": NAMED, "seed?": int,
    "output_dir?": Check("a folder", lambda value: isinstance(value, str) and "\0" not in value),
}  # fmt: skip
SHAPE = {
    "status": str, "id?": str, "config?": CONFIG_SHAPE, "error?": str, "events?": [{"sentence": str}],
    "metric?": TEXT, "higher_is_better?": bool, "metrics?": {str: {str: NUMBER}}, "flops?": {str: NUMBER},
    "sparsity?": dict, "environment?": {"command?": str}, "notes?": dict, "signature?": dict,
    "seconds?": NUMBER, "training_seconds?": NUMBER,
    "files?": {str: {"bytes": int, "sha256": str}}, "sha256?": str,
}  # fmt: skip
# what that of a finished run has
OF_CONFIG = ("dataset", "model", "recipe", "sparsity", "optimizer", "schedule", "trainer", "seed")
FINISHED = {
    "config": dict.fromkeys(OF_CONFIG, object),
    "metrics": {"final": dict, "best": dict},
}


def expanded(place: Path | str) -> Path:
    """A path with the home folder for ``~``; that of a user whom nobody knows stays as it is."""
    return Path(os.path.expanduser(place))


def make_folder(folder: Path, output_dir: str) -> None:
    """Raises ConfigError where the folder, which is below the output folder, cannot be made or
    written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError as error:
        raise ConfigError(f"output_dir={output_dir}: {error.strerror}: {error.filename}") from None


def remove_empty(folder: Path, above: Path) -> None:
    """Remove a folder and its parents below ``above``, as long as they are empty."""
    with contextlib.suppress(OSError):
        for place in (folder, *folder.parents):
            if above not in place.parents:
                return
            place.rmdir()


def walk(
    path: Path | str, left_out: Callable[[str], object]
) -> Iterator[tuple[str, list[str], list[str]]]:
    """``os.walk``, which gives ``left_out`` a line for each folder that cannot be read, and for each
    link to a folder elsewhere: it could lead anywhere, and is not followed."""

    def say(error: OSError) -> None:
        if os.path.isdir(error.filename):  # no file, and not deleted meanwhile
            left_out(f"{error.filename}: {error.strerror}")

    whole = os.path.realpath(path)
    for place, below, names in os.walk(path, onerror=say):
        yield place, below, names
        for link in filter(os.path.islink, [os.path.join(place, name) for name in below]):
            target = os.path.realpath(link)
            if not Path(target).is_relative_to(whole):
                left_out(f"{link}: it is a link; name {target}")


class RunFolder:
    """A run's folder, which may not exist. Its files are read once; a new object reads them again."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def result(self) -> dict[str, Any]:
        """What is in ``result.json``; empty where there is none, or it has a :attr:`problem`."""
        return self._look[0]

    @property
    def problem(self) -> str:
        """What is wrong with ``result.json``; empty where it is whole or not there."""
        return self._look[1]

    @property
    def is_of_another(self) -> bool:
        return self._look[2]

    @property
    def is_finished(self) -> bool:
        """Whether a run has finished here, by its result alone."""
        return self.result.get("status") == "finished"

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The run's config, whether it has finished or not; empty where there is none."""
        return self.result.get("config") or self.begun

    @functools.cached_property
    def begun(self) -> dict[str, Any]:
        """What is in ``config.yaml``, which a run writes as it begins; empty where that is none."""
        try:
            config = documents.read_yaml(self.path / CONFIG)
        except (OSError, ValueError):
            return {}
        return config if not documents.misfit(config, CONFIG_SHAPE) else {}

    @functools.cached_property
    def command(self) -> str | None:
        """What was typed for this run alone: it stands above ``config.yaml`` and in the result."""
        with contextlib.suppress(OSError):
            text = documents.read(self.path / CONFIG).decode("utf-8", "replace")
            if head := HEAD.match(text):
                return neutral(re.sub(f"([{ENDS}])# ", r"\1", head[1]))
        typed: str | None = self.result.get("environment", {}).get("command")
        return typed

    def broken(self, contents: bool = False) -> dict[str, str]:
        """For each file that is missing, or not as a finished run left it, what is wrong with it.

        With ``contents`` all files are read, for their hashes; else existence and size are looked
        at, and the hash of the result itself.
        """
        if self.problem:
            return {RESULT: self.problem}
        if not self.is_finished:
            return {}
        wrong = {name: self._wrong(name, contents) for name in self.result["files"]}
        return {name: what for name, what in wrong.items() if what}

    def finished(self) -> dict[str, Any] | None:
        """The result of the run that has finished here; None if none has, or its files are gone."""
        return None if self.unfinished() else self.result

    def unfinished(self) -> str:
        """Say that no finished run is here, and why, as a clause; empty where one is."""
        why = "; ".join(f"{name}: {what}" for name, what in self.broken().items())
        if self.result and not self.is_finished:
            why = f"the run is {self.result['status']}, not finished"
        elif self.is_finished and not why and (lacks := documents.misfit(self.result, FINISHED)):
            why = f"{RESULT}: {lacks}"
        if self.is_finished and not why:
            return ""
        return f"no finished run is there ({why})" if why else "no finished run is there"

    def without(self, name: str) -> str:
        """Say that a finished run's weights of this name are not here, and why, likewise."""
        if name not in WEIGHTS:
            return f"a run's weights are {', '.join(WEIGHTS[:-1])} and {WEIGHTS[-1]}"
        if why := self.unfinished():
            return why
        if (self.path / name).exists():
            return ""
        return f"the run has no {name}"

    def demand(self, setting: object, name: str = "") -> None:
        """Raise ConfigError, which begins with ``setting``, unless a finished run is here, with its
        weights of this name."""
        if why := self.without(name) if name else self.unfinished():
            raise ConfigError(f"{setting}: {why}")

    def checked(self, name: str) -> Path:
        """A file that is about to be read whole; that of a finished run is read for its hash
        before. RunError for one that is missing or another."""
        if self.problem:
            raise RunError(f"{self.path / RESULT}: {self.problem}; {REMEDY}")
        if self.is_finished and (wrong := self._wrong(name, contents=True)):
            raise RunError(f"{self.path / name}: {wrong}; {REMEDY}")
        return self.path / name

    def say_finished(self, changed: Iterable[str] = ()) -> None:
        """Print the metrics and folder of the run that has finished here, and what of the user's
        own code has ``changed`` since."""
        final = self.result["metrics"]["final"].items()
        texts = {key: "-" if value is None else f"{value:.4g}" for key, value in final}
        metrics = "  ".join(f"{key} {text}" for key, text in texts.items())
        print(f"finished already: {metrics}\n  {self.path} (force=true runs it again)", flush=True)
        if names := ", ".join(changed):
            tell([f"that was before {names} changed; force=true runs it again"])

    def rows(self) -> list[dict[str, Any]]:
        """The rows of ``metrics.jsonl`` that are whole; raises as :meth:`checked`."""
        try:
            return documents.read_lines(self.checked(METRICS))[0]
        except OSError as error:
            raise RunError(f"{self.path / METRICS}: {error.strerror}") from None

    # --- writing ----------------------------------------------------------------------------------

    def begin(self, config: dict[str, Any], command: str, anew: bool) -> None:
        """Write ``config.yaml``, below the command that asks for the run alone. There is no result
        now, and of a run that begins ``anew`` nothing else of :data:`SEALED`, and no log."""
        for partial in self.path.glob(".tmp*"):  # safetensors' own, where a kill has left one
            partial.unlink()
        for name in (RESULT, LOG, *SEALED) if anew else (RESULT,):
            (self.path / name).unlink(missing_ok=True)
        lines = re.sub(f"[{ENDS}]", r"\g<0># ", command)
        head = f"# {lines}\n" if command else ""
        atomic.write(self.path / CONFIG, head + documents.yaml_of(config))

    def write_result(self, result: dict[str, Any]) -> dict[str, Any]:
        """Write ``result.json``, and seal the files of a finished run; returns what is in it."""
        written = sealed(result, self.path) if result["status"] == "finished" else result
        atomic.write(self.path / RESULT, json.dumps(written, indent=2) + "\n")
        return written

    # --- the look ---------------------------------------------------------------------------------

    @functools.cached_property
    def _look(self) -> tuple[dict[str, Any], str, bool]:
        """The result, what is wrong with it, and whether it is another run's."""
        try:
            data = documents.read(self.path / RESULT)
            result = documents.parsed(data)
        except (FileNotFoundError, NotADirectoryError):
            return {}, "", False
        except OSError as error:
            return {}, f"it cannot be read: {error.strerror}", False
        except ValueError as error:
            return {}, f"it is damaged: {error}", False
        if problem := documents.misfit(result, SHAPE):
            return {}, f"it is no result: {problem}", False
        if others := result.get("files", {}).keys() - {*SEALED}:
            return {}, f"it is no result: a run leaves no {min(others)}", False
        seal = {"files", "sha256"}
        if result["status"] == "finished" and not seal <= result.keys():
            return {}, UNSEALED, False
        if result.keys() & seal and result.get("sha256") != _hash(result):
            raw = json.loads(data.decode())  # with its texts as they were when it was hashed
            if raw.get("sha256") != _hash(raw):
                return {}, CHANGED, False
        # of a link with another name, its target's
        name = NAME.fullmatch(self.path.name) or NAME.fullmatch(self.path.resolve().name)
        if name and result.get("id", name[1]) != name[1]:
            return {}, f"it is of another run, whose id is {result['id']}", True
        return result, "", False

    def _wrong(self, name: str, contents: bool) -> str:
        path, record = self.path / name, self.result["files"].get(name)
        try:
            about = path.stat()
            if not stat.S_ISREG(about.st_mode):
                return "it is no file"
            if record is None:
                return "it is not of this run, which left none"
            if about.st_size != record["bytes"]:
                return f"it was changed: it has {about.st_size} bytes and had {record['bytes']}"
            if contents and _sha256(path) != record["sha256"]:
                return CHANGED
        except FileNotFoundError:
            return "it is missing"
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        return ""


class RunFolders(dict[str, RunFolder]):
    """Run folders by their path, each read once."""

    def __missing__(self, path: str) -> RunFolder:
        self[path] = RunFolder(path)
        return self[path]


def weights_in(place: Path | str) -> tuple[RunFolder, str]:
    """The run and the file of its weights that a key such as ``init`` names: a folder names the
    last ones."""
    path = expanded(place)
    named = path.suffix == ".safetensors"
    return (RunFolder(path.parent), path.name) if named else (RunFolder(path), FINAL)


def own_weights(place: Path | str) -> Path | None:
    """The file of weights that such a key names, where it is none of a run's."""
    path = expanded(place)
    is_own = path.suffix in OWN and path.name not in WEIGHTS and path.is_file()
    return path if is_own and not is_checkpoint(path) else None


def is_checkpoint(path: Path) -> bool:
    """Whether a file is a checkpoint in a run's folder, which no seal protects."""
    names = (CHECKPOINT, PREVIOUS)
    return path.name in names and {*OF_CONFIG} <= RunFolder(path.parent).config.keys()


def activations_of(config: Mapping[str, Any]) -> str | None:
    """The pattern that a run's activations have after its training, by its config; None: dense."""
    trainer = config.get("trainer", {})
    pattern: str | None = trainer.get("activations")
    return None if trainer.get("activations_dense_end") else pattern


def metrics_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """A run's metrics by name: those of its last weights, and under ``best/`` those of the best."""
    metrics = result.get("metrics", {})
    best = {f"best/{name}": value for name, value in metrics.get("best", {}).items()}
    return {**metrics.get("final", {}), **best}


def sealed(result: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A result with the ``bytes`` and ``sha256`` of its run's ``files``, and the ``sha256`` of the
    rest."""
    paths = (folder / name for name in SEALED)
    files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in paths if p.exists()}
    bound = {**result, "files": files}
    return {**bound, "sha256": _hash(json.loads(json.dumps(bound)))}


def _sha256(path: Path) -> str:
    with documents.opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash(result: Mapping[str, Any]) -> str:
    """Of the result without its own hash, as JSON with sorted keys and no spaces added."""
    plain = {key: value for key, value in result.items() if key != "sha256"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
