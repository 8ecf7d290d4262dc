"""Hugging Face's ``from_pretrained``, with errors of one line."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nmrun.errors import ConfigError, extra

# A network's vocabulary is made longer than its tokenizer's, by rows that no token has (1.8 % of
# Phi-2's). More is another tokenizer.
UNUSED = 0.05


def fetch(kind: str, key: str, source: str, **options: Any) -> Any:
    """``transformers.<kind>.from_pretrained(source)`` without its progress bars and warnings.

    ``key`` of the config names the source, for errors. Raises ConfigError if transformers is not
    installed or nothing can be loaded.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"{key}={source} needs Hugging Face's transformers: {extra('transformers')}"
        ) from None
    place = Path(source).expanduser()
    if source.startswith(("/", ".", "~")) and not place.is_dir():
        raise ConfigError(f"{key}={source}: there is no such folder")
    try:
        with quiet():
            loader = getattr(transformers, kind).from_pretrained
            return loader(
                str(place), trust_remote_code=False, **options
            )  # else it would ask the user
    except Exception as error:  # each kind of file and of network has errors of its own
        line = textwrap.shorten(str(error) or type(error).__name__, 300)
        raise ConfigError(
            f"{key}={source}: cannot be loaded, as a folder or by its name on the Hugging Face hub ({line})"
        ) from None


def check_vocabulary(source: str, of_model: int, of_data: int) -> None:
    """Raises ConfigError where the data have more tokens than a network, or so few that they are
    another tokenizer's.
    """
    if not (1 - UNUSED) * of_model <= of_data <= of_model:
        raise ConfigError(
            f"model.pretrained={source}: it knows {of_model} tokens and the data have {of_data}: take its own tokenizer (dataset.tokenizer)"
        )


def fetch_whole(kind: str, source: str, **options: Any) -> Any:
    """:func:`fetch` a network with all of its weights, in float32.

    Raises ConfigError if it cannot be loaded, or a weight is not there or has another shape.
    """
    options |= {"dtype": "float32", "output_loading_info": True, "ignore_mismatched_sizes": True}
    network, info = fetch(kind, "model.pretrained", source, **options)
    lost = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if lost:
        raise ConfigError(
            f"model.pretrained={source}: its weights are of another architecture than its config.json: there is no {lost[0]} of the right shape"
        )
    return network


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let transformers show neither progress bars nor warnings while the context is entered."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with quiet_hub():
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Let the hub's client say nothing of its retries while the context is entered: the error has it."""
    from huggingface_hub.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
