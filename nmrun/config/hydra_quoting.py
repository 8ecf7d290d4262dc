"""How to write what Hydra's grammar refuses.

The keys of a dictionary are regular expressions in ``sparsity.overrides``, and Hydra is particular
about them: it takes no quotes around a key, no ``^``, and a backslash before what it has a use for
itself, which it removes.
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
    """The end of the line on a word that cannot be read as key=value: how it is meant to be
    written, as far as that can be told.
    """
    key, equals, value = word.partition("=")
    if key != RATIOS:
        return "; quote what is special in a value, as in 'key=\"(a)\"'" if equals else ""
    inner = value.strip("{} ")
    pairs = PAIR.findall(inner)
    # whole names are matched anyway
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
