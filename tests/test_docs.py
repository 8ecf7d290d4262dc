"""The words of the README and of docs/ are true: their code runs, their commands are accepted, their
errors are printed so, their links lead to files that are there.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from runs import mistakes

import nmrun.lab.cli as cli
import nmrun.lab.sweeps.jobs
from nmrun.errors import ConfigError
from nmrun.lab.config import command_line, composition, schema
from nmrun.lab.config.composition import Cache

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMPOSED: Cache = {}  # as the sweeps of one command line share them
OPTIONS_OF_HYDRA = ("--help", "--cfg", "--config-dir")


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.S)


LINES = (line for page in PAGES for text in blocks(page, "bash") for line in text.splitlines())
COMMANDS = sorted({line.partition("  #")[0].strip() for line in LINES if line[:6] == "nmrun "})


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/own-loop.md"])
def test_the_library_examples_run(page):
    (code,) = [text for text in blocks(ROOT / page, "python") if "nmrun.sparsify(" in text]
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "['2.weight']"


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_accepted(command, tmp_path, monkeypatch):
    words = shlex.split(command)[1:]
    if words and words[0] in OPTIONS_OF_HYDRA:
        return
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saliency.py").write_text(*blocks(ROOT / "docs/own-recipe.md", "python"))
    (tmp_path / "wikitext-2").mkdir()
    for name in ("valid", "test"):
        (tmp_path / f"wikitext-2/{name}.txt").touch()
    if words and words[0] in cli.all_verbs():
        assert is_parsed(words)
        return
    monkeypatch.setattr(schema, "DEVICES", (str(tmp_path),))  # a machine with a GPU
    # Hydra's launchers are extras
    settings = [word for word in words if not command_line.spelt_out(word).startswith("hydra")]
    asked = composition.options(settings)
    for words in command_line.expand(asked.overrides, asked.multirun):
        # one seed of many is as good as another
        one_seed = [re.sub("^seed=.*,.*", "seed=0", word) for word in words]
        assert mistakes(one_seed, asked.multirun, cache=COMPOSED) == []


def is_parsed(words: list[str]) -> bool:
    """Whether a verb's parser takes the words; nothing is done with them."""

    class Parsed(Exception):
        pass

    def parse_known_args(parser, argv=None, namespace=None):
        _, unknown = whole(parser, argv, namespace)
        if unknown := [word for word in unknown if word.startswith("-")]:  # others are overrides
            raise ConfigError(f"unrecognized: {unknown}")
        raise Parsed

    whole = cli.arguments.Parser.parse_known_args
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli.arguments.Parser, "parse_known_args", parse_known_args)
        try:
            cli.find("verb", words[0], cli.all_verbs())(words[1:])
        except Parsed:
            return True
    return False


@pytest.mark.slow
def test_the_errors_are_printed_as_shown(nmrun_cli):
    (text,) = [text for page in PAGES for text in blocks(page, "console")]
    command, *lines = text.strip().splitlines()
    process = nmrun_cli(*shlex.split(command)[2:])
    assert process.returncode == 2
    assert process.stderr.splitlines() == lines


def test_all_recipes_are_described():
    from nmrun.recipes import RECIPES

    rows = re.findall(r"^\| \[`(\w+)`\]\(", (ROOT / "docs/recipes/index.md").read_text(), re.M)
    assert set(rows) >= set(RECIPES)


def test_all_verbs_are_described():
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/command-line.md").read_text(), re.M)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} >= set(cli.all_verbs())


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and Python-Markdown make them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    bare = (re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip() for heading in headings)
    return {re.sub(r"[\s-]+", "-", heading.lower()) for heading in bare}


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    links = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        there = path.exists() and path.is_relative_to(ROOT)
        if not there or (anchor and anchor not in anchors(path)):
            links.append(f"{page.relative_to(ROOT)}: {target}")
    return links


def test_links_lead_somewhere():
    assert [link for page in PAGES for link in broken(page)] == []


def test_what_is_written_of_the_keys_is_up_to_date():
    """If not: ``python docs/generate.py``."""
    generate = importlib.import_module("generate")
    for path, text in generate.pages().items():
        assert path.read_text() == text, path.name


@pytest.mark.slow
def test_the_site_is_built_strictly(tmp_path):
    pytest.importorskip("mkdocs")
    process = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-2000:]
    page = (tmp_path / "results/index.html").read_text()
    for target in set(re.findall(r'href="(\.\./files/[^"#]+)', page)):
        assert (tmp_path / "results" / target).is_file()
    assert "../files/benchmarks/results/masks_cpu.html" in page
    assert 'id="nmrun.sparsify"' in (tmp_path / "reference/sparsify.html").read_text()
    for html in tmp_path.rglob("*.html"):  # a reader's browser asks nobody else
        assert not re.search(r'<(script|link|img)[^>]+(src|href)="https?:', html.read_text()), html
    # which a page opened from a folder reads
    assert (tmp_path / "search/search_index.js").read_text().startswith("var __index = {")
    index = json.loads((tmp_path / "search/search_index.json").read_text())
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert "sweeps.html" in places
    assert not any(place.startswith("files/") for place in places)  # dumps of benchmarks


def test_the_reference_has_every_public_name():
    shown = {
        name.removeprefix("nmrun.patterns.").removeprefix("nmrun.")
        for page in (ROOT / "docs/reference").glob("*.md")
        for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)
    }
    modules = {"errors", "sparsity"}  # by their names
    assert set(nmrun.__all__) - {"__version__", *modules} <= shown
    assert {"errors.ConfigError", "errors.RunError"} <= shown
    assert {f"sparsity.{name}" for name in nmrun.sparsity.__all__} <= shown


def test_the_readme_leads_to_every_page():
    """Directly, or by a page that it leads to."""
    reached: set[Path] = set()
    following = [ROOT / "README.md"]
    while following:
        page = following.pop()
        if page in reached:
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text())
        following += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert set(PAGES) - {ROOT / "docs/index.md"} <= reached
