"""JSON, lines of JSON, and YAML that anybody may have written: run folders are copied, shared and damaged.

What comes out of here is of a regular file, and of a size that memory holds. It has no text that a
terminal would take for a command. Of files of lines it is the lines that are whole.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

import yaml

from nmrun.errors import neutral
from nmrun.ranges import Check

# A result of nmrun has some thousand values in six levels. YAML's aliases make more of a few lines
# than any memory holds.
MOST_VALUES, MOST_LEVELS = 1_000_000, 60
MOST_DIGITS = 300  # of a whole number: a float holds it, and Python writes it
MOST_BYTES = 64 * 2**20  # of a document, and of a line: a file of holes has any size
LONG = re.compile(rb"\d{%d}" % MOST_DIGITS)
TAIL = 16 * 2**20  # bytes at the end of a file in which last rows are looked for


def opened(path: Path | str) -> BufferedReader:
    """A regular file to read. OSError for anything else: a pipe or a device may never end."""
    # a pipe that nobody writes to would be waited for
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(handle, "rb")


def read(path: Path) -> bytes:
    """What a document holds; OSError as of :func:`opened`, and for one above the limit."""
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_BYTES:
            raise _too_large(path)
        return file.read()


def _too_large(path: Path) -> OSError:
    what = f"more than the {MOST_BYTES // 2**20} MB of a document or a line"
    return OSError(errno.EFBIG, what, str(path))


def parsed(text: bytes) -> Any:
    """The value of a JSON text, with neutral texts. ValueError where no program of ours
    wrote it."""
    # a row of metrics, of which there are many: nothing in it can be a control code, large or deep
    simple = text.isascii() and b"\\" not in text and b"\x7f" not in text and not LONG.search(text)
    simple = simple and text.count(b"{") + text.count(b"[") < MOST_LEVELS
    try:
        value = json.loads(text.decode())
        return value if simple else plain(value)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path) -> Any:
    """The value of a JSON file; raises as :func:`read` and :func:`parsed`."""
    return parsed(read(path))


def read_yaml(path: Path) -> Any:
    try:
        return plain(yaml_value(read(path).decode()))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def yaml_value(text: str) -> Any:
    """The value of a YAML text; YAMLError for whatever is none."""
    try:
        return yaml.safe_load(text)
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        # PyYAML's own, of a value that is not what its tag or look says: !!bool x, 2026-99-99
        raise yaml.YAMLError(f"a value cannot be read ({type(error).__name__}: {error})") from None


def yaml_of(plain: dict[str, Any]) -> str:
    """Plain data as YAML, as ``OmegaConf.to_yaml`` writes it, which takes ``${`` in a text for an
    interpolation."""
    from omegaconf._utils import get_omega_conf_dumper  # which readers need not wait for

    class Dumper(get_omega_conf_dumper()):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    text: str = yaml.dump(
        plain, Dumper=Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False
    )
    return text


def strict(value: Any) -> Any:
    """Plain data that every JSON reader accepts: numbers that are not finite become null."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain(value: Any) -> Any:
    """A copy with neutral texts, in which nothing stands twice. ValueError for what is
    nested too deeply, or too large, and for a key or a number that no program of ours writes."""
    left = MOST_VALUES

    def copied(value: Any, level: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or level > MOST_LEVELS:
            raise ValueError("nested too deeply, or too large")
        if isinstance(value, str):
            return neutral(value)
        if isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
            raise ValueError("a whole number is too large")
        if isinstance(value, dict):
            if wrong := [key for key in value if not isinstance(key, str | int | float | None)]:
                raise ValueError(f"a key is a {type(wrong[0]).__name__}")
            return {copied(key, level + 1): copied(item, level + 1) for key, item in value.items()}
        if isinstance(value, list):
            return [copied(item, level + 1) for item in value]
        return value

    return copied(value, 0)


def misfit(value: Any, shape: Any, place: str = "") -> str:
    """What of a document a reader would stumble over, as in ``seed is "x"``; empty where it has the
    shape: a type, a union of types, a Check, ``[shape]`` of items, ``{str: shape}`` of values, or
    shapes by key. A key with a question mark may be missing. Other keys may be there."""
    if isinstance(shape, dict) and isinstance(value, dict):
        keys = {str(key).rstrip("?"): each for key, each in shape.items() if key is not str}
        if lacks := [key for key in keys if key in shape and key not in value]:
            return f"it has no {place}{lacks[0]}"
        parts = [(key, item, keys.get(key, shape.get(str))) for key, item in value.items()]
        wrong = (misfit(item, each, f"{place}{key}.") for key, item, each in parts if each)
        return next(filter(None, wrong), "")
    if isinstance(shape, list) and isinstance(value, list):
        return next(filter(None, (misfit(item, shape[0], place) for item in value)), "")
    if isinstance(shape, Check):
        fits = shape.holds(value)
    elif isinstance(shape, dict | list):
        fits = False
    else:
        fits = isinstance(value, shape) and (shape is bool or not isinstance(value, bool))
    if fits:
        return ""
    takes = f"; it takes {shape.allowed}" if isinstance(shape, Check) else ""
    return f"{place.rstrip('.') or 'it'} is {json.dumps(value, default=str)[:40]}{takes}"


# --- lines of JSON --------------------------------------------------------------------------------


def read_lines(
    path: Path, parsed: Callable[[bytes], Any] = parsed
) -> tuple[list[dict[str, Any]], list[int]]:
    """The objects of a file that are whole, and the numbers, from 1, of the lines that hold none;
    both empty if there is no file. ``parsed`` gives the value of a line, or raises ValueError.
    OSError as of :func:`read`."""
    objects: list[dict[str, Any]] = []
    damaged: list[int] = []
    try:
        file = opened(path)
    except FileNotFoundError:
        return objects, damaged
    with file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_BYTES), b""), 1):
            if len(line) == MOST_BYTES:
                raise _too_large(path)
            if (value := _object(line.removesuffix(b"\n"), parsed)) is not None:
                objects.append(value)
            elif line != b"\n":
                damaged.append(number)
    return objects, damaged


def newest_first(path: Path) -> Iterator[dict[str, Any]]:
    """The whole objects at the end of a file, the last first, each parsed when it is asked for."""
    try:
        with opened(path) as file:
            file.seek(-min(TAIL, os.fstat(file.fileno()).st_size), os.SEEK_END)
            lines = file.read(TAIL).split(b"\n")
    except OSError:
        return
    for line in reversed(lines):
        if (value := _object(line, parsed)) is not None:
            yield value


def _object(line: bytes, parsed: Callable[[bytes], Any]) -> dict[str, Any] | None:
    """The object of a line; None where there is none, or half of one."""
    try:
        value = parsed(line) if line else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
