"""An extension of griffe: docstrings as Markdown and its parser of arguments have them."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

SEVERAL = re.compile(r"^( {4})((?:\w+, )+\w+): (.+(?:\n {5,}\S.*)*)$", re.M)


def _one_by_one(entry: re.Match[str]) -> str:
    indent, names, meaning = entry.groups()
    return "\n".join(f"{indent}{name}: {meaning}" for name in names.split(", "))


class Marks(Extension):
    """``:func:`name` `` becomes code, the ``::`` before an example a single colon, and an entry for two
    arguments (``rows, cols: ...``) an entry for each.
    """

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called by griffe for each object that it has read."""
        if obj.docstring is not None:
            text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
            text = re.sub(r"(?<=\w)::$", ":", text, flags=re.M)
            text = SEVERAL.sub(_one_by_one, text)
            obj.docstring.value = re.sub(r"[ \n]*::$", "", text, flags=re.M)
