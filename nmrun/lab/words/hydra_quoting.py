"""How to write a value that Hydra's grammar refuses.

In ``sparsity.overrides`` the keys of a dictionary are regular expressions. Hydra allows neither
quotes around a key nor ``^`` in it. Characters of its own grammar need a backslash, which it
removes.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

RATIOS = "sparsity.overrides"
PAIR = re.compile(r"""(\S+?)\s*:\s*["']?(\d+:\d+|dense)["']?\s*(?:,\s*|$)""")


def quoting(word: str) -> str:
    """Say how a word that cannot be read as key=value should be written.

    Args:
        word: an override.

    Returns:
        The end of an error's line, beginning with a semicolon; an empty string where the word has
        no ``=``.
    """
    key, equals, value = word.partition("=")
    if key != RATIOS:
        if not key.strip() or key != key.strip() or value[:1] == " ":
            return "; write key=value, without spaces around the ="
        if value.rstrip()[-1:] == ",":
            return "; it ends with a comma"
        return "; quote what is special in a value, as in 'key=\"(a)\"'" if equals else ""
    inner = value.strip("{} ")
    pairs = PAIR.findall(inner)
    # an expression matches whole names, so ^ and $ at its ends change nothing
    names = [name.strip("\"' ").removeprefix("^").removesuffix("$") for name, _ in pairs]
    escaped = [re.sub(r"(?<!\\)([][(){}:=,])", r"\\\1", name) for name in names]
    meant = f"{RATIOS}={{{', '.join(f'{name}: {ratio}' for name, (_, ratio) in zip(escaped, pairs, strict=True))}}}"
    with contextlib.suppress(HydraException):
        read: Any = OverridesParser.create().parse_override(meant).value()
        if pairs and not PAIR.sub("", inner) and list(map(str, read)) == names:
            return f"; write it as {shlex.quote(meant)}"
    return (
        f"; write it as '{RATIOS}={{inner.1: 1:8, head: dense}}', the whole of it in quotes; "
        "in a name put a backslash before each of ( ) [ ] { } : = and the comma, and leave out ^ and quotes"
    )
