"""HTML pages from templates: whole documents that ask no other host or file for anything."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from nmrun.lab.compare.numbers import MINUS


@functools.cache
def _templates() -> jinja2.Environment:
    """Whatever users wrote becomes text."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters["signs"] = lambda text: text.replace("+-", "\N{PLUS-MINUS SIGN}")
    return made


def filled(template: str, **values: Any) -> Markup:
    """A template with its values, of which texts are escaped and :class:`markupsafe.Markup` is not;
    ASCII, but for what stands in scripts.
    """
    text = _templates().get_template(template).render(allowed="", **values)
    return Markup(text.replace(MINUS, "&minus;").replace("\N{PLUS-MINUS SIGN}", "&plusmn;"))


def document(template: str, **values: Any) -> str:
    """As :func:`filled`, with all other characters as ASCII too."""
    return filled(template, **values).encode("ascii", "xmlcharrefreplace").decode()
