"""Draws run.svg, a run in a terminal while it trains, and sweep.svg, a sweep and its table. From the
checkout's root, with nmrun[dev]:

python docs/pictures/terminal.py
"""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import re
import shlex
import shutil
import struct
import sys
import tempfile
import termios
from collections.abc import Callable
from pathlib import Path

import pyte
from rich.console import Console
from rich.text import Text

WIDTH, HEIGHT = 100, 120
RUN = "recipe=step sparsity=2:8"
AT = "epoch 10/12"  # in the live display, when the picture of a run is taken
SWEEP = "-m recipe=dense,asp,sr_ste sparsity=2:4,1:8 seed=0,1,2"
TABLE = "table outputs/digits --baseline dense"
HEAD, TAIL = 8, 8  # lines of the sweep that are shown
Lines = list[Text]


def main() -> None:
    os.environ["TERM"] = "xterm-256color"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)

        def trains(lines: list[str]) -> bool:
            return any(line.lstrip().startswith(AT) and " < " in line for line in lines)

        draw("run", [*prompt(RUN), *recorded(f"{RUN} track=local", trains)])
        shutil.rmtree("outputs")  # the table is of the sweep alone
        swept = recorded(f"{SWEEP} track=local")
        shown = [*swept[:HEAD], Text("..."), *swept[-TAIL:]]
        draw("sweep", [*prompt(SWEEP), *shown, Text(), *prompt(TABLE), *recorded(TABLE)])


def prompt(words: str) -> Lines:
    return [Text(f"$ nmrun {words}", "bold")]


def draw(name: str, lines: Lines) -> None:
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"))  # noqa: SIM115
    for line in lines:
        console.print(line)
    drawn = console.export_svg(title="nmrun")
    # the reader's own font: pages ask no other host for anything
    drawn = re.sub(r"\s*@font-face \{.*?\n    \}\n", "\n", drawn, flags=re.DOTALL)
    Path(__file__).resolve().with_name(f"{name}.svg").write_text(drawn, encoding="utf-8")


def recorded(words: str, when: Callable[[list[str]], bool] = lambda lines: False) -> Lines:
    """The screen of ``nmrun words`` at the first moment ``when``, or at its end, line by line."""
    screen = pyte.Screen(WIDTH, HEIGHT)
    stream = pyte.ByteStream(screen)
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-m", "nmrun", *shlex.split(words)])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    found: Lines = []
    while True:
        try:
            data = os.read(terminal, 1 << 16)
        except OSError:  # it has ended
            break
        stream.feed(data)
        if not found and when([line.rstrip() for line in screen.display]):
            found = styled_lines(screen)
    os.waitpid(process, 0)
    return found or styled_lines(screen)


def styled_lines(screen: pyte.Screen) -> Lines:
    last = max(row for row, line in enumerate(screen.display) if line.strip())
    return [styled(screen, row) for row in range(last + 1)]


def styled(screen: pyte.Screen, row: int) -> Text:
    """A line of the screen with its colours."""
    text = Text(no_wrap=True)
    cells = [screen.buffer[row][column] for column in range(WIDTH)]
    for style, alike in itertools.groupby(cells, style_of):
        text.append("".join(cell.data for cell in alike), style)
    text.rstrip()
    return text


def style_of(cell: pyte.screens.Char) -> str:
    """Its colour and weight in rich's words."""
    named = {"brown": "yellow", "default": ""}.get(cell.fg, cell.fg)
    colour = f"#{cell.fg}" if re.fullmatch("[0-9a-f]{6}", cell.fg) else named
    return f"bold {colour}" if cell.bold else colour


if __name__ == "__main__":
    main()
