"""Draws run.svg: a real run in a terminal, while it trains. From the checkout's root, with nmrun[dev]:

python docs/pictures/run.py
"""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import re
import struct
import sys
import tempfile
import termios
from pathlib import Path

import pyte
from rich.console import Console
from rich.text import Text

WIDTH, HEIGHT = 100, 40
COMMAND = ["recipe=step", "sparsity=2:8", "trainer.epochs=12", "track=local", "output_dir=outputs"]
AT = "epoch 10/12"  # in the live display, when the picture is taken


def main() -> None:
    screen = pyte.Screen(WIDTH, HEIGHT)
    shown = recorded(screen)
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text(f"$ nmrun {' '.join(COMMAND[:-2])}", "bold"))
    for line in shown:
        console.print(line)
    drawn = console.export_svg(title="nmrun")
    # the reader's own font: pages ask no other host for anything
    drawn = re.sub(r"\s*@font-face \{.*?\n    \}\n", "\n", drawn, flags=re.DOTALL)
    Path(__file__).with_name("run.svg").write_text(drawn, encoding="utf-8")


def recorded(screen: pyte.Screen) -> list[Text]:
    """The screen of the run at the moment ``AT``, line by line."""
    stream = pyte.ByteStream(screen)
    with tempfile.TemporaryDirectory() as folder:
        process, terminal = pty.fork()
        if process == 0:
            os.chdir(folder)
            os.environ["TERM"] = "xterm-256color"
            os.execv(sys.executable, [sys.executable, "-m", "nmrun", *COMMAND])
        size = struct.pack("HHHH", HEIGHT, WIDTH, 0, 0)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)
        found: list[Text] = []
        while True:
            try:
                data = os.read(terminal, 1 << 16)
            except OSError:  # the run has ended
                break
            stream.feed(data)
            lines = [line.rstrip() for line in screen.display]
            if not found and any(line.lstrip().startswith(AT) and "%" in line for line in lines):
                found = [styled(screen, row) for row, line in enumerate(lines) if line]
        os.waitpid(process, 0)
    return found


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
    return " ".join([*["bold"] * cell.bold, colour])


if __name__ == "__main__":
    main()
