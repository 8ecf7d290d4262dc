"""Pages, read: HTML, and tables of Markdown."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """The cells of its tables, its text, and every address that it asks for; ``open`` holds the tags
    that were never closed, ``bold`` what is in bold.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.bold: list[str] = []
        self.feed(text)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attributes if name == "id"]
        asked = ("src", "href", "srcset", "data", "action")
        self.addresses += [value or "" for name, value in attributes if name in asked]
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data
        if "b" in self.open:
            self.bold.append(data)


def markdown_lines(text: str) -> list[list[str]]:
    """The cells of Markdown's tables, the head first, without the rule below it."""
    lines = [line for line in text.splitlines() if re.match(r"\| (?!---)", line)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
