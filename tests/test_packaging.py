"""What gets installed, and what the Makefile offers."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata, resources
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


def test_the_wheel_has_all_code_and_configs(tmp_path):
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    for name in ("nmrun", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    for folder, suffixes in (("nmrun", {".py", ".c", ".typed"}), ("conf", {".py", ".yaml"})):
        for path in (source / folder).rglob("*"):
            if path.is_file() and path.suffix in suffixes:
                name = str(path.relative_to(source))
                assert (f"nmrun/{name}" if folder == "conf" else name) in packed


def test_configs_and_kernel_are_found_as_resources():
    assert resources.files("nmrun.conf").joinpath("nmrun.yaml").is_file()
    assert resources.files("nmrun.kernels").joinpath("nm_project.c").is_file()
    assert metadata.entry_points(group="console_scripts")["nmrun"].value == "nmrun.cli:main"


def test_make_help_lists_every_target():
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    text = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", text, re.M)
    assert targets is not None
    shown = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for target in targets[1].split():
        assert f"make {target}" in shown


def test_constraints_name_versions_and_nothing_else():
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line) for line in lines)
