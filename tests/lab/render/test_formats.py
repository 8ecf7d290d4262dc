"""Tables for papers: what stands in them, that LaTeX makes a column of them, whom they cite, and what
says that they are of these runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import markdown_lines
from runs import rewrite

import nmrun
from nmrun.lab.render.formats import REFERENCES
from nmrun.oneshot import METHODS
from nmrun.recipes import RECIPES
from nmrun.registry import imported

PDFLATEX = pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex")
LATEX = ("--format", "latex")
ENTRIES = REFERENCES.read_text(encoding="utf-8").split("\n\n")[1:]
OF = {name: e for e in ENTRIES for name in re.search(r"of = \{(.*)\}", e)[1].split(", ")}


def comparison(write, ratios: tuple[str, ...] = ("2:4", "1:8"), seeds: int = 3) -> None:
    """STEP is the better by ten points at every ratio, dense by twenty."""
    for seed in range(seeds):
        for ratio in ratios:
            write("step", ratio, seed, 0.9 + 0.01 * seed)
            write("sr_ste", ratio, seed, 0.8 + 0.013 * seed)
        write("dense", "dense", seed, 0.95)


def body(text: str) -> list[list[str]]:
    """The cells between the first and the last rule, the head first."""
    inside = text.split(r"\toprule")[1].split(r"\bottomrule")[0]
    return [
        [cell.strip() for cell in line.removesuffix(r"\\").split(" & ")]
        for line in inside.splitlines()
        if " & " in line
    ]


def caption(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(r"\caption{"))


def test_cells_names_caption_and_label(write, table):
    comparison(write)
    write("ste", "1:8", 0, 0.7)
    write("odd_#", "2:4", 0, 0.5)
    text = table(*LATEX)[1]
    assert body(text) == [
        ["Recipe", "2:4", "1:8"],
        ["dense", r"$95.0_{\pm 0.0}$", r"$95.0_{\pm 0.0}$"],
        ["STE", "--", "$70.0$ (1)"],
        ["SR-STE", r"$81.3_{\pm 1.3}$", r"$81.3_{\pm 1.3}$"],
        ["STEP", r"$\mathbf{91.0}_{\pm 1.0}$", r"$\mathbf{91.0}_{\pm 1.0}$"],
        [r"odd\_\#", "$50.0$ (1)", "--"],
    ]
    for part in (r"small\_conv on digits", r"Test accuracy (\%)", r"$\pm$", "over 3 seeds"):
        assert part in caption(text)
    assert r"\label{tab:digits-small-conv-test-accuracy}" in text
    assert text.count(r"\begin{tabular}") == 1
    assert text.split(r"\midrule")[2].strip().startswith("STE"), "a rule below dense"
    assert "% needs \\usepackage{booktabs}" in text.splitlines()


def test_tables_of_other_rows_and_over_all_cells_have_labels_of_their_own(write, table):
    comparison(write)
    labels = [
        re.search(r"\\label\{(.*)\}", table(*LATEX, *words)[1])[1]
        for words in (
            (),
            ("--rows", "recipe,optimizer.lr"),
            ("--overall", "--baseline", "sr_ste"),
            ("--overall", "--baseline", "sr_ste", "--rows", "recipe,optimizer.lr"),
        )
    ]
    assert len({*labels}) == 4


def test_no_rule_below_dense_rows_that_do_not_come_first(write, table):
    for rate in (0.1, 0.2):
        write("dense", "dense", 0, 0.9, optimizer__lr=rate)
        write("ste", "2:4", 0, 0.8, optimizer__lr=rate)
    text = table(*LATEX, "--rows", "optimizer.lr,recipe")[1]
    assert [row[1] for row in body(text)] == ["Recipe", "dense", "STE", "dense", "STE"]
    assert text.count(r"\midrule") == 1, "below the head"


def test_names_with_empty_lines_stay_on_one(write, table):
    write("ste", "1:8", 0, 0.7, dataset={"name": "dig\n\nits"}, optimizer__lr="a\n\nb")
    rows = ("--rows", "recipe,optimizer.lr")
    text = table(*LATEX, *rows)[1]
    assert "on dig its" in caption(text)
    assert body(text)[1][1] == "a b"
    assert "\n\n" not in text.strip()
    assert markdown_lines(table(*rows)[1])[1] == ["ste", "a b", "70.0"]


def test_a_baseline_makes_stars_and_no_second_table(write, table, tmp_path):
    comparison(write, seeds=5)
    text = table(*LATEX, "--baseline", "dense")[1]
    assert text.count(r"\begin{tabular}") == 1
    cells = dict(line[:2] for line in body(text))
    # differences of 13 to 20 points (sd 2.1) and of 1 to 5 (sd 1.6): p < 1e-3 and p about 0.05 x 2
    assert cells["SR-STE"].endswith("^{*}$")
    assert not cells["dense"].endswith("^{*}$")
    exact = nmrun.table(tmp_path / "outputs", baseline="sr_ste")
    ends = exact[exact.recipe != "sr_ste"].least.agg(["min", "max"])
    least = 100 * ends.mean()  # of two columns with the same two cells
    said = caption(table(*LATEX, "--baseline", "sr_ste")[1])
    test = "ompared with SR-STE: moderated t-test, Holm's correction for 4 comparisons"
    assert f"{test} ($^{{*}}$" in said
    assert f"80 \\% power to find a true difference of {least:.1f}" in said
    few = caption(table(*LATEX, "--baseline", "dense", "--filter", "seed=0,1")[1])
    assert "no test: fewer than three seeds" in few
    assert "$^{*}$" not in few


def test_stars_have_a_legend_where_one_is_there(write, table):
    for seed in range(5):
        write("ste", "2:4", seed, 0.9 + 0.01 * seed)
        write("sr_ste", "2:4", seed, 0.9 + 0.01 * (4 - seed))
    text = table(*LATEX, "--baseline", "ste")[1]
    assert "*" not in text.split(r"\begin{table}")[1]


def test_a_network_of_another_depth_has_its_name(write, table):
    write("ste", "2:4", 0, 0.9, model={"name": "resnet20", "depth": 8})
    assert "{ResNet-8 on digits" in caption(table(*LATEX)[1])


def test_minus_signs_and_powers_are_formulas(write, table):
    for seed, loss in enumerate((-0.5, -0.7)):
        write("ste", "2:4", seed, 0.9, loss=loss)
        write("asp", "2:4", seed, 0.9, loss=2.5e12)
    text = table(*LATEX, "--metric", "test/loss")[1]
    cells = dict(body(text))
    assert cells["STE"] == r"$\mathbf{-0.60}_{\pm 0.14}$"
    assert cells["ASP"] == r"$2.500\times 10^{12}_{\pm 0}$"


def compiled(text: str, tmp_path: Path, document: str = "[twocolumn]{article}") -> str:
    """The log of LaTeX."""
    (tmp_path / "t.tex").write_text(
        rf"\documentclass{document}\usepackage{{booktabs}}\columnsep=12pt\textwidth=480pt"
        rf"\begin{{document}}{text}\ref{{{re.search(r'tab:[a-z0-9-]+', text)[0]}}}\end{{document}}"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stdout[-2000:]
    return process.stdout


@PDFLATEX
@pytest.mark.parametrize(
    "ratios", [("2:4", "1:4", "1:8", "1:16"), ("2:4", "1:4", "4:8", "2:8", "1:8", "1:16", "1:32")]
)
def test_it_fits_the_column(write, table, tmp_path, ratios):
    comparison(write, ratios, seeds=5)
    text = table(*LATEX, "--baseline", "dense")[1]
    wide = len(ratios) > 5
    assert (r"\begin{table*}" in text) == wide
    log = compiled(text, tmp_path)
    assert "Overfull" not in log
    # what the tabular itself takes
    tabular = text[text.index(r"\begin{tabular}") : text.index(r"\end{tabular}")] + r"\end{tabular}"
    size = r"\footnotesize\setlength{\tabcolsep}{3pt}"
    measured = rf"\setbox0\hbox{{{size}{tabular}}}\typeout{{width \the\wd0}}\label{{tab:x}}"
    width = float(re.search(r"width ([\d.]+)pt", compiled(measured, tmp_path))[1])
    assert (width > 234) == wide


@PDFLATEX
def test_odd_names_compile(write, table, tmp_path):
    comparison(write)
    write("odd_#$%&~^\\{}<|>", "1:8", 0, 0.9)
    for rows in ("recipe,model.channels", "model.channels,recipe"):
        compiled(table(*LATEX, "--rows", rows)[1], tmp_path)


def test_columns_of_two_keys_have_both_labels(write, table, tmp_path):
    for seed in range(3):
        for optimizer, ratios in {"adam": ("2:4", "1:8"), "sgd": ("2:4",)}.items():
            write("dense", "dense", seed, 0.9 + 0.01 * seed, optimizer__name=optimizer)
            for ratio in ratios:
                write("ste", ratio, seed, 0.8 + 0.01 * seed, optimizer__name=optimizer)
    text = table(*LATEX, "--cols", "optimizer,sparsity")[1]
    assert body(text) == [
        ["Recipe", "Adam, 2:4", "Adam, 1:8", "SGD, 2:4"],
        ["dense", *[r"$91.0_{\pm 1.0}$"] * 3],
        ["STE", *[r"$81.0_{\pm 1.0}$"] * 3],
    ]
    if shutil.which("pdflatex"):
        assert "Overfull" not in compiled(text, tmp_path)


# --- whom it cites, and what it is of -------------------------------------------------------------


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
    real = "cifar10 imagenet glue wikitext2 shakespeare multi30k squad digits"
    assert all("icence" in OF[name] for name in real.split())


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


def test_the_checksum_is_that_of_the_runs(write, table):
    folders = [write("ste", "2:4", seed, 0.9) for seed in range(2)]

    def told() -> list[str]:
        command, version, *_ = table(*LATEX)[1].splitlines()
        assert command.startswith("% nmrun table ")
        return re.findall(r"^% nmrun [\d.]+\S*, 2 runs with the checksum (\w{16})$", version)

    first = told()
    assert len(first) == 1
    assert first == told()
    rewrite(folders[1], metrics={"final": {"test/accuracy": 0.91}, "best": {}})
    assert told() != first
