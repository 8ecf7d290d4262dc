"""An extension of griffe: the marks of reStructuredText in docstrings, as Markdown has them."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class Marks(Extension):
    """``:func:`name` `` becomes code, and the ``::`` before an example a single colon."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called by griffe for each object that it has read."""
        if obj.docstring is not None:
            text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", obj.docstring.value)
            text = re.sub(r"(?<=\w)::$", ":", text, flags=re.M)
            obj.docstring.value = re.sub(r"[ \n]*::$", "", text, flags=re.M)
