"""What gets installed, and what the Makefile offers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import nmrun

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def build(what: str, source: Path, to: Path) -> Path:
    process = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{what}", str(to)], cwd=source, capture_output=True, text=True
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-2000:]
    return to / process.stdout.splitlines()[-1]


def copied(to: Path) -> Path:
    """A copy of what a wheel is built from."""
    for folder in ("nmrun", "conf"):  # nmrun/conf is a link to conf, and stays one
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, to / folder, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / name)
    return to


@pytest.mark.slow
def test_wheel_and_sdist_have_all_code_and_configs(tmp_path):
    pytest.importorskip("setuptools")
    source = copied(tmp_path / "source")
    wheel, sdist = build("wheel", source, tmp_path), build("sdist", source, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    for folder, suffixes in (
        ("nmrun", {".py", ".c", ".typed", ".yaml", ".json"}),
        ("conf", {".py", ".yaml"}),
    ):
        for path in (source / folder).rglob("*"):
            if path.is_file() and path.suffix in suffixes:
                name = str(path.relative_to(source))
                assert (f"nmrun/{name}" if folder == "conf" else name) in packed
    with tarfile.open(sdist) as archive:
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(tmp_path / "unpacked", **safe)
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    (tmp_path / "again").mkdir()
    with zipfile.ZipFile(build("wheel", unpacked, tmp_path / "again")) as archive:
        assert set(archive.namelist()) == packed
    pytest.importorskip("twine")
    process = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], capture_output=True, text=True
    )  # fmt: skip
    assert process.returncode == 0, process.stdout
    assert process.stdout.count("PASSED") == 2


@pytest.mark.minutes
@pytest.mark.parametrize("compiler", [True, False])
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_wheel_trains_in_a_clean_environment(tmp_path, version, compiler):
    uv = Path(sys.executable).parent / "uv"
    if not uv.exists():
        pytest.skip("needs uv beside this Python")
    environment = tmp_path / "environment"
    python = environment / "bin" / "python"
    wheel = build("wheel", ROOT, tmp_path)
    call = [uv, "venv", "--quiet", "--no-python-downloads", "--python", version, environment]
    if subprocess.run(call, capture_output=True).returncode:
        pytest.skip(f"there is no Python {version}")
    pip = [uv, "pip", "install", "--quiet", "--python", python]
    subprocess.run([*pip, "--constraint", ROOT / "constraints.txt", wheel], check=True)
    settings = without_path()
    if not compiler:
        settings["PATH"] = str(environment / "bin")
    for words in (
        ["nmrun", "--version"], ["nmrun", "recipe=step", "trainer.epochs=1"], ["nmrun", "table", "outputs"],
    ):  # fmt: skip
        process = subprocess.run(
            [environment / "bin" / words[0], *words[1:]], cwd=tmp_path, capture_output=True, text=True, env=settings
        )  # fmt: skip
        assert process.returncode == 0, process.stderr
    assert "step" in process.stdout


@pytest.mark.slow
def test_imports_in_the_folder_that_holds_the_clone(tmp_path):
    # The clone is called nmrun too. Without an __init__.py it is a namespace package there, which must
    # not hide the package of an editable installation.
    clone = copied(tmp_path / "nmrun")
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    with zipfile.ZipFile(build("editable", clone, wheels)) as archive:
        archive.extractall(site)
    code = f"""
import sys, site
for place in [path for path in sys.meta_path if "editable" in type(path).__name__.lower()]:
    sys.meta_path.remove(place)
sys.path[:] = [path for path in sys.path if path != {str(ROOT)!r}]
site.addsitedir({str(site)!r})
import nmrun
from importlib import resources
assert nmrun.__file__ == {str(clone / "nmrun" / "__init__.py")!r}, nmrun.__file__
assert resources.files("nmrun.conf").joinpath("nmrun.yaml").is_file()
"""
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=without_path(),
    )
    assert process.returncode == 0, process.stderr


def without_path() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_command_is_installed():
    assert metadata.entry_points(group="console_scripts")["nmrun"].value == "nmrun.lab.cli:main"


def constraints() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_constraints_have_everything_that_is_asked_for():
    asked = [*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)]
    names = {re.match(r"[\w.-]+", line)[0].lower() for line in asked} - {"nmrun"}
    assert names <= {line.partition("==")[0] for line in constraints()}


def test_the_lock_has_the_versions_of_the_constraints_and_hashes_alone():
    text = (ROOT / "requirements.lock").read_text()
    entries = re.sub(r" \\\n +", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    pins = set()
    for entry in entries:
        match = re.fullmatch(r"(\S+==\S+)( ; [^#]+?)?((?: --hash=sha256:[0-9a-f]{64})+)", entry)
        assert match, entry
        elsewhere = re.search("'(win32|emscripten)'", match[2] or "")
        if not elsewhere and not re.match("nvidia-|cuda-", match[1]):
            pins.add(match[1])
    assert pins <= set(constraints())
    names = {pin.partition("==")[0] for pin in pins}
    asked = [*PROJECT["dependencies"], *EXTRAS["onnx"], *EXTRAS["timm"], *EXTRAS["transformers"]]
    assert {re.match(r"[\w.-]+", line)[0].lower() for line in asked} <= names
    assert "setuptools" in names  # builds nmrun itself


@pytest.mark.minutes
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_all_extras_resolve_together_to_the_constraints(version):
    """Asks a registry."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        pytest.skip("there is no uv")
    process = subprocess.run(
        [
            uv, "pip", "compile", "pyproject.toml", "--all-extras", "--constraint", "constraints.txt",
            "--quiet", "--no-header", "--no-annotate", "--python-version", version,
            "--python", sys.executable, "--no-build-isolation-package", "fairseq-fixed",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if "dns error" in process.stderr or "Connect" in process.stderr:
        pytest.skip("there is no registry")
    assert process.returncode == 0, process.stderr
    resolved = {line for line in process.stdout.splitlines() if not re.match("nvidia-|cuda-", line)}
    assert len(resolved) > 100
    assert resolved <= set(constraints())


def test_the_extra_all_has_every_other_but_those_for_developers_benchmarks_and_fairseq():
    def of(extra):
        names = {extra}
        for line in EXTRAS[extra]:
            if inner := re.fullmatch(r"nmrun\[(.*)\]", line):
                names |= {name for part in inner[1].split(",") for name in of(part)}
        return names

    assert of("all") == set(EXTRAS) - {"bench", "docs", "dev", "translation"}
    assert of("all") - of("dev") == {"all", "ray"}  # make test says so
    table = (ROOT / "docs/start.md").read_text()
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.M)))) == (
        set(EXTRAS) - {"docs", "dev"}
    )


def test_what_the_dockerfile_copies_and_runs_is_there():
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [name for step in steps if step[0] == "COPY" for name in step[1:-1]]
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in allowed
    for needed in ("pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], "conf", "nmrun"):
        assert needed in copied  # by the installation
    (extras,) = re.findall(r"\$\{EXTRAS:-(\S+?)\}", text)
    assert set(extras.split(",")) == {"onnx", "timm", "transformers"} <= set(EXTRAS)  # the lock's
    (entry,) = re.findall(r'^ENTRYPOINT \["(\w+)"\]$', text, re.M)
    assert entry in PROJECT["scripts"]
    used = {name for step in steps for name in re.findall(r"\$\{?(\w+)", " ".join(step))} - {"PATH"}
    assert used == {"BASE", "EXTRAS", "PIP_EXTRA_INDEX_URL"}
    assert used <= set(re.findall(r"^ARG (\w+)", text, re.M))


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == nmrun.__version__ == metadata.version("nmrun")
    assert citation["license"] == PROJECT["license"]
    assert f"## {nmrun.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    bibtex = (ROOT / "docs/index.md").read_text().partition("@software{")[2]
    assert f"version = {{{nmrun.__version__}}}" in bibtex
    assert citation["title"].removeprefix("nmrun: ") in " ".join(bibtex.split())
