"""Hugging Face's ``from_pretrained``, with errors of one line."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

from nmrun.errors import ConfigError, first_line, needs, refused
from nmrun.lab.runs.run_folder import expanded

# A network's vocabulary is made longer than its tokenizer's, by rows that no token has (1.8 % of
# Phi-2's). More is another tokenizer.
UNUSED = 0.05


def fetch(kind: str, key: str, source: str, **options: Any) -> Any:
    """``transformers.<kind>.from_pretrained(source)`` without its progress bars and warnings.

    ``key`` of the config names the source, for errors. Raises ConfigError if transformers is not
    installed or nothing can be loaded.
    """
    with needs(f"{key}={source}", "transformers"):
        import transformers
    loader = getattr(transformers, kind).from_pretrained
    said = f"{key}={source}: cannot be loaded, as a folder or by its name on the hub: "
    with refused(said, Exception), quiet():  # each kind of file and network has errors of its own
        # else it would ask the user
        return loader(str(expanded(source)), trust_remote_code=False, **options)


def rows(setting: str, *what: Any, split: str, **options: Any) -> Any:
    """A split by ``datasets.load_dataset(*what, ...)``. ``setting`` of the config names it, for errors.
    Raises ConfigError if datasets is not installed or nothing can be loaded."""
    with needs(setting, "texts"):
        import datasets
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it says of errors, they say
    try:
        with quiet():
            return datasets.load_dataset(*what, split=split, **options)
    except Exception as error:  # an error of datasets says that it failed, its cause says why
        line = first_line(error.__cause__ or error)
        raise ConfigError(f"{setting}: {split} cannot be loaded ({line})") from None


def check_vocabulary(source: str, of_model: int, of_data: int, unused: float = UNUSED) -> None:
    """Raises ConfigError where the data have more tokens than a network, or so few that they are
    another tokenizer's. ``unused``: the share of the network's that no token may have.
    """
    if not (1 - unused) * of_model <= of_data <= of_model:
        raise ConfigError(
            f"model.pretrained={source}: it knows {of_model} tokens and the data have {of_data}: take its own tokenizer (dataset.tokenizer)"
        )


def check_length(setting: str, length: int, source: str, most: int | None) -> None:
    """Raises ConfigError where a text may have more tokens than a network or its tokenizer takes."""
    if most is not None and most < length:
        raise ConfigError(f"{setting}={length}: {source} takes at most {most} tokens")


def fetch_whole(kind: str, source: str, besides: str = "", **options: Any) -> Any:
    """:func:`fetch` a network with all of its weights, in float32; those of the module ``besides`` may
    be missing.

    Raises ConfigError if it cannot be loaded, or a weight is not there or has another shape.
    """
    options |= {"dtype": "float32", "output_loading_info": True, "ignore_mismatched_sizes": True}
    network, info = fetch(kind, "model.pretrained", source, **options)
    missing = [key for key in info["missing_keys"] if not (besides and besides in key)]
    lost = sorted({*missing, *(key for key, *_ in info["mismatched_keys"])})
    if lost:
        raise ConfigError(
            f"model.pretrained={source}: its weights are of another architecture than its config.json: there is no {lost[0]} of the right shape"
        )
    return network


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let the hub's client and transformers say nothing of retries and the like, and show no bars of
    progress, while the context is entered: the error has it."""
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "transformers")]
    levels = [logger.level for logger in loggers]
    bars: Any = getattr(sys.modules.get("transformers"), "logging", None)
    shown = bars is not None and bars.is_progress_bar_enabled()
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        if shown:
            bars.disable_progress_bar()
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if shown:
            bars.enable_progress_bar()
