"""Arguments of Python as the words of a command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, Quote, QuotedString

from nmrun.errors import ConfigError
from nmrun.lab.words import command_line
from nmrun.lab.words.schema import flatten
from nmrun.lab.words.suggestions import RATIOS


def asked(
    overrides: str | Sequence[str] | None, settings: Mapping[str, Any], multirun: bool
) -> tuple[list[str], str | None]:
    """What the words of a command line ask for.

    Args:
        overrides: a text is split as a shell splits it.
        settings: as of :func:`written`; they win over ``overrides``.
        multirun: whether several values of a key are a sweep.

    Returns:
        The overrides, and the folder of more configs.

    Raises:
        ConfigError: for an option of the command line other than ``--config-dir``, and for values
            that no override can have.
    """
    try:
        words = shlex.split(overrides) if isinstance(overrides, str) else list(overrides or [])
    except ValueError as error:
        raise ConfigError(f"{overrides}: {error}") from None
    options = command_line.options([*words, *written(settings)])
    taken = {"overrides", "config_dir"} | ({"multirun"} if multirun else set())
    for name in (name for name, value in vars(options).items() if value and name not in taken):
        hint = "; nmrun.sweep does several runs" if name == "multirun" else ""
        raise ConfigError(f"--{name.replace('_', '-')}: not for Python{hint}")
    return options.overrides, options.config_dir


def written(settings: Mapping[str, Any]) -> list[str]:
    """Write settings as overrides.

    Args:
        settings: values by key; a dictionary has the keys of a group, ``{"trainer": {"epochs": 3}}``
            or ``{"trainer.epochs": 3}``. A text is what one would type after ``key=``.

    Raises:
        ConfigError: for a value that is no number, text, truth value, None, path, list, or
            dictionary.
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        group = isinstance(value, dict) and key != RATIOS
        flat.update(flatten(value, f"{key}.") if group else {key: value})
    return [_word(key, value) for key, value in flat.items()]


def _word(key: str, value: Any) -> str:
    if isinstance(value, str):
        read, problems = command_line.parsed([f"{key}={value}"])
        if not problems and not read[0].is_sweep_override():
            return f"{key}={value}"
    try:
        return command_line.unescaped(
            f"{key}={Override._get_value_element_as_str(_element(value))}"
        )
    except TypeError:
        raise ConfigError(
            f"{key}={value!r}: it takes a number, a text, True, False, None, a list or a dictionary"
        ) from None


def _element(value: Any) -> Any:
    """A value as Hydra's parser would have read it."""
    if hasattr(value, "item"):  # a number of NumPy
        value = value.item()
    if isinstance(value, str | Path):
        return QuotedString(str(value), Quote.single)
    if isinstance(value, list | tuple):
        return [_element(one) for one in value]
    if isinstance(value, dict):
        return {str(name): _element(one) for name, one in value.items()}
    if value is None or isinstance(value, int | float):
        return value
    raise TypeError
