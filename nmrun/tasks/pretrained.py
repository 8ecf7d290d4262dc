"""What Hugging Face's ``from_pretrained`` gives, with errors of one line."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nmrun.errors import ConfigError


def fetch(kind: str, key: str, source: str, **options: Any) -> Any:
    """Call ``transformers.<kind>.from_pretrained(source)`` without its progress bars and warnings.

    Args:
        kind: the class, such as ``AutoConfig``.
        key: the config's key that names the source, for errors.
        source: a name on the hub, or a folder.
        options: of ``from_pretrained``.

    Raises:
        ConfigError: if transformers is not installed or nothing can be loaded.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"{key}={source} needs Hugging Face's transformers: pip install nmrun[transformers]"
        ) from None
    place = Path(source).expanduser()
    if source.startswith(("/", ".", "~")) and not place.is_dir():
        raise ConfigError(f"{key}={source}: there is no such folder")
    try:
        with _quiet():
            return getattr(transformers, kind).from_pretrained(str(place), **options)
    except Exception as error:  # each kind of file and of network has errors of its own
        line = textwrap.shorten(str(error) or type(error).__name__, 300)
        raise ConfigError(
            f"{key}={source}: cannot be loaded, as a folder or by its name on the Hugging Face hub ({line})"
        ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    levels, bars = (logging.get_verbosity(), hub.get_verbosity()), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    hub.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(levels[0])
        hub.set_verbosity(levels[1])
        if bars:
            logging.enable_progress_bar()
