"""The README's words are true: its code runs, its commands are accepted, its errors are printed so."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import nmrun.cli as cli
import nmrun.train.jobs  # noqa: F401  (registers the source of ratios and recipes)
from nmrun.config import command_line, experiment, precheck

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)
COMMANDS = [
    line.partition("  #")[0].strip()
    for language, text in BLOCKS
    if language == "bash"
    for line in text.splitlines()
    if line.startswith("nmrun ")
]


def test_the_library_example_runs():
    (code,) = [
        text for language, text in BLOCKS if language == "python" and "nmrun.sparsify(" in text
    ]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['0.weight', '2.weight']"


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_accepted(command):
    words = shlex.split(command)[1:]
    if words[0] in cli.VERBS or words[0] in ("--help", "--cfg", "--config-dir"):
        return
    asked = command_line.options(words)
    for overrides in experiment.expand(asked.overrides, asked.multirun):
        assert precheck.look(command_line.own_recipe(overrides), asked.multirun).problems == []


def test_the_errors_are_printed_as_shown(nmrun_cli):
    (text,) = [text for language, text in BLOCKS if language == "console"]
    command, *lines = text.strip().splitlines()
    done = nmrun_cli(*shlex.split(command)[2:])
    assert done.returncode == 2
    assert done.stderr.splitlines() == lines


def test_all_recipes_are_described():
    from nmrun.recipes import RECIPES

    for name in RECIPES:
        assert re.search(rf"^\| `{name}` \|", README, re.M), name
