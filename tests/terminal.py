"""A terminal of a given size, which shows what is written to it (pyte)."""

from __future__ import annotations

import io

import pyte
import pytest


class Terminal(io.TextIOBase):
    """A stream that is a terminal, for ``sys.stdout``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, width: int, height: int = 60) -> None:
        super().__init__()
        self.screen = pyte.Screen(width, height)
        self._stream = pyte.Stream(self.screen)
        for name, value in (("COLUMNS", width), ("LINES", height), ("TERM", "xterm-256color")):
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("FORCE_COLOR", "1")

    def write(self, text: str) -> int:
        self._stream.feed(text.replace("\n", "\r\n"))
        return len(text)

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What is on the screen, without the empty lines at its end."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip().split("\n")

    def colour(self, row: int, text: str) -> str:
        """The colour of a text in a line of the screen."""
        return self.screen.buffer[row][self.lines()[row].index(text)].fg
