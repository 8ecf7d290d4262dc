"""Whom a table cites, and what says that it is of these runs."""

from __future__ import annotations

import re
import sys

import pytest
from runs import result_of, rewrite

from nmrun.lab.render.citations import REFERENCES
from nmrun.oneshot import METHODS
from nmrun.recipes import RECIPES
from nmrun.registry import imported

ENTRIES = REFERENCES.read_text(encoding="utf-8").split("\n\n")[1:]
OF = {name: e for e in ENTRIES for name in re.search(r"of = \{(.*)\}", e)[1].split(", ")}


@pytest.mark.parametrize("recipe", sorted({*RECIPES} - {"dense"}))
def test_a_recipe_cites_the_paper_that_its_module_names(recipe):
    """By the number on arXiv; SdGf's module is MdGf's, and the file has one entry for both."""
    kind = imported(RECIPES[recipe], recipe)
    told = " ".join(f"{sys.modules[kind.__module__].__doc__} {kind.__doc__}".split())
    number = re.search(r"arXiv:([\d.]+)", OF[recipe])[1]
    # Bengio et al. are told of without a number
    assert number in told or (recipe, number) in {("ste", "2102.04010"), ("ste", "1308.3432")}


def test_every_method_and_data_set_of_others_has_an_entry():
    assert {*METHODS} - {"magnitude"} <= OF.keys()
    real = {
        "cifar10",
        "imagenet",
        "glue",
        "wikitext2",
        "shakespeare",
        "multi30k",
        "squad",
        "digits",
    }
    assert all("icence" in OF[name] for name in real)


def test_a_table_writes_the_entries_of_its_rows(write, table, tmp_path):
    for seed in range(3):
        write("step", "2:4", seed, 0.9 + seed / 100)
        write("asp", "2:4", seed, 0.8)
        write("mine", "2:4", seed, 0.7, dataset={"name": "own"})
    file = tmp_path / "cite.bib"
    digits = ("--filter", "dataset=digits", "--bib", str(file))
    assert table(*digits)[0] == 0
    keys = re.findall(r"^@\w+\{(\w+),", file.read_text(), re.M)
    assert keys == ["nmrun", "mishra2021accelerating", "lu2023step", "alpaydin1998optical"]
    assert "  of = " not in file.read_text()
    assert table(*digits, "--baseline", "asp")[0] == 0
    assert "smyth2004linear" in file.read_text()
    assert table("--bib", str(file))[0] == 0
    assert "% no entry here for mine, own\n" in file.read_text()
    status, _, err = table("--runs", "--bib", str(file))
    assert (status, err.count("\n")) == (2, 1)


def test_the_checksum_is_that_of_the_runs(write, table):
    folders = [write("ste", "2:4", seed, 0.9) for seed in range(2)]

    def told() -> list[str]:
        command, version, *_ = table("--format", "latex")[1].splitlines()
        assert command.startswith("% nmrun table ")
        return re.findall(r"^% nmrun [\d.]+\S*, 2 runs with the checksum (\w{16})$", version)

    first = told()
    assert first == told()
    metrics = result_of(folders[1])["metrics"]
    rewrite(folders[1], metrics={**metrics, "final": metrics["final"] | {"test/accuracy": 0.91}})
    assert len(first) == 1
    assert told() != first
