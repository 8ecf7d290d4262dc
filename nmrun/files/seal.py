"""What binds a finished run to its files: ``result.json`` has the size and SHA-256 of each, and a
SHA-256 of itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULT, METRICS = "result.json", "metrics.jsonl"
# The checkpoint is left out: it may be removed when a run has finished.
REMEDY = f"remove it, and the run's command makes it again (with force=true for {METRICS})"
FINAL, BEST, DENSE = WEIGHTS = ("model.safetensors", "best.safetensors", "dense.safetensors")
FILES = ("config.yaml", METRICS, *WEIGHTS)


def sealed(result: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Bind a result to the files of its run.

    Args:
        result: plain data.
        folder: the run's folder.

    Returns:
        The result with ``files``, for each that is there its ``bytes`` and ``sha256``, and with
        ``sha256``, that of the rest as :func:`_own` reads it.
    """
    paths = (folder / name for name in FILES)
    files = {p.name: {"bytes": p.stat().st_size, "sha256": _of(p)} for p in paths if p.exists()}
    whole = {**result, "files": files}
    return {**whole, "sha256": _own(whole)}


def is_sealed(result: Mapping[str, Any]) -> bool:
    """Whether there is something to check: earlier versions of nmrun kept no hashes."""
    return "files" in result or "sha256" in result


def broken(folder: Path, result: Mapping[str, Any], contents: bool = False) -> dict[str, str]:
    """What is no longer as the run left it.

    Args:
        folder: of the run.
        result: what is in its ``result.json``.
        contents: whether to read all files, for their hashes; else existence and size are looked
            at, and the hash of ``result`` itself.

    Returns:
        For each file that is missing or another what is wrong with it. Of a result without hashes
        that is ``model.safetensors`` at most, if it is missing.
    """
    if not is_sealed(result):
        return {} if (folder / FINAL).exists() else {FINAL: "it is missing"}
    if result.get("sha256") != _own(result):
        return {RESULT: "it was changed: its SHA-256 is another"}
    wrong = {name: _wrong(folder / name, kept, contents) for name, kept in result["files"].items()}
    return {name: problem for name, problem in wrong.items() if problem}


def _wrong(path: Path, kept: Mapping[str, Any], contents: bool) -> str:
    try:
        size = path.stat().st_size
        if size != kept["bytes"]:
            return f"it was changed: it has {size} bytes and had {kept['bytes']}"
        if contents and _of(path) != kept["sha256"]:
            return "it was changed: its SHA-256 is another"
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return ""


def _of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own(result: Mapping[str, Any]) -> str:
    """Of the result without its own hash, as JSON with sorted keys and no spaces added."""
    plain = json.loads(json.dumps({k: v for k, v in result.items() if k != "sha256"}))
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
