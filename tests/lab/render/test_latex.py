"""Tables for papers: what stands in them, and that LaTeX makes a column of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import nmrun

PDFLATEX = pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex")


def comparison(write, ratios: tuple[str, ...] = ("2:4", "1:8"), seeds: int = 3) -> None:
    """STEP is the better by ten points at every ratio, dense by twenty."""
    for seed in range(seeds):
        for ratio in ratios:
            write("step", ratio, seed, 0.9 + 0.01 * seed)
            write("sr_ste", ratio, seed, 0.8 + 0.013 * seed)
        write("dense", "dense", seed, 0.95)


def body(text: str) -> list[list[str]]:
    """The cells between the first and the last rule."""
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
    text = table("--format", "latex")[1]
    assert body(text) == [
        ["Recipe", "2:4", "1:8"],
        ["dense", r"$95.0_{\pm 0.0}$", r"$95.0_{\pm 0.0}$"],
        ["STE", "--", "$70.0$ (1)"],
        ["SR-STE", r"$81.3_{\pm 1.3}$", r"$81.3_{\pm 1.3}$"],
        ["STEP", r"$\mathbf{91.0}_{\pm 1.0}$", r"$\mathbf{91.0}_{\pm 1.0}$"],
    ]
    assert r"Test accuracy (\%): small\_conv on digits" in caption(text)
    assert "over 3 seeds" in caption(text)
    assert r"\label{tab:digits-small-conv-test-accuracy}" in text
    assert text.count(r"\begin{tabular}") == 1
    assert "% needs \\usepackage{booktabs}" in text.splitlines()


def test_names_with_empty_lines_stay_on_one(write, table):
    write("ste", "1:8", 0, 0.7, dataset={"name": "dig\n\nits"}, optimizer__lr="a\n\nb")
    text = table("--format", "latex", "--rows", "recipe,optimizer.lr")[1]
    assert "on dig its" in caption(text)
    assert "a b" in body(text)[1][1]
    assert "\n\n" not in text.strip()
    assert "\n\n" not in table("--rows", "recipe,optimizer.lr")[1].split("| ", 1)[1].strip()


def test_a_baseline_makes_stars_and_no_second_table(write, table):
    comparison(write, seeds=5)
    text = table("--format", "latex", "--baseline", "dense")[1]
    assert text.count(r"\begin{tabular}") == 1
    cells = {line[0]: line[1] for line in body(text)[1:]}
    # differences of 13 to 20 points (sd 2.1) and of 1 to 5 (sd 1.6): p < 1e-3 and p about 0.05 x 2
    assert cells["SR-STE"].endswith("^{*}$")
    assert not cells["dense"].endswith("^{*}$")
    assert "differs from dense (moderated t-test, Holm's correction" in caption(text)
    assert "95 % interval" in text.split(r"\begin{table}")[0], "as a comment"


def test_the_caption_says_what_decides_what_the_stars_are_worth(write, table, tmp_path):
    comparison(write, seeds=5)
    same = table("--format", "latex", "--baseline", "sr_ste")[1]
    exact = nmrun.table(tmp_path / "outputs", baseline="sr_ste")
    above, _, table_text = same.partition(r"\begin{table}")
    ends = exact[exact.recipe != "sr_ste"].least.agg(["min", "max"])
    least = 100 * ends.mean()  # of two columns with the same two cells
    assert f"80 % power to find a true difference of {least:.1f}" in above
    for seed in range(5):
        write("ste", "2:4", seed, 0.7, trainer__epochs=24)
    other = caption(table("--format", "latex", "--baseline", "sr_ste")[1])
    assert "Not the same in all cells: epochs" in other
    assert "$^{*}$: differs from" in table_text


def test_the_caption_says_that_there_is_no_test(write, table):
    comparison(write, seeds=2)
    text = table("--format", "latex", "--baseline", "dense")[1]
    assert "Fewer than three seeds: no test" in caption(text)
    assert "differs from" not in caption(text)


def test_stars_have_a_legend_where_one_is_there(write, table):
    for seed in range(5):
        write("ste", "2:4", seed, 0.9 + 0.01 * seed)
        write("sr_ste", "2:4", seed, 0.9 + 0.01 * (4 - seed))
    text = table("--format", "latex", "--baseline", "ste")[1]
    assert "*" not in text.split(r"\begin{table}")[1]
    assert "No difference to STE is significant (moderated t-test, Holm's correction" in caption(
        text
    )


def test_the_caption_names_the_baseline_by_what_tells_it_from_other_rows(write, table):
    """Not by the first key of a row, whatever that is."""
    two_optimizers(write)
    words = ("--format", "latex", "--rows", "optimizer,recipe", "--baseline", "ste")
    one, both = (
        re.search(r"(?:to|from) (\S+(?: of the same \w+)?) (?:is|\()", caption(text))[1]
        for text in (table(*words, "--filter", "optimizer=adam")[1], table(*words)[1])
    )
    assert (one, both) == ("STE", "STE of the same optimizer")


def test_a_network_of_another_depth_has_its_name(write, table):
    for seed in range(2):
        write("ste", "2:4", seed, 0.9, model={"name": "resnet20", "depth": 8})
    assert ": ResNet-8 on digits" in caption(table("--format", "latex")[1])
    assert "resnet20 (depth=8) on digits" in table()[1]


def test_a_column_has_one_number_of_digits(write, table):
    """That of most cells: deviations of 1.2, 1.3 and 4 points are all printed with one digit. What
    is bold ties at these: 90.0 and 90.04, but not 89.6, which 4 points would round to 90."""
    for seed in range(3):
        write("ste", "2:4", seed, 0.9 + 0.012 * (seed - 1))
        write("step", "2:4", seed, 0.9004 + 0.013 * (seed - 1))
        write("sr_ste", "2:4", seed, 0.896 + 0.04 * (seed - 1))
    cells = {line[0]: line[1] for line in body(table("--format", "latex")[1])[1:]}
    assert cells == {
        "STE": r"$\mathbf{90.0}_{\pm 1.2}$",
        "STEP": r"$\mathbf{90.0}_{\pm 1.3}$",
        "SR-STE": r"$89.6_{\pm 4.0}$",
    }


def test_own_names_are_escaped(write, table):
    comparison(write)
    write("odd_#", "2:4", 0, 0.5)
    text = table("--format", "latex")[1]
    assert [line[0] for line in body(text)] == ["Recipe", "dense", "SR-STE", "STEP", r"odd\_\#"]


def test_minus_signs_and_powers_are_formulas(write, table):
    for seed, loss in enumerate((-0.5, -0.7)):
        write("ste", "2:4", seed, 0.9, loss=loss)
        write("asp", "2:4", seed, 0.9, loss=2.5e12)
    text = table("--format", "latex", "--metric", "test/loss")[1]
    cells = {line[0]: line[1] for line in body(text)[1:]}
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
    text = table("--format", "latex", "--baseline", "dense")[1]
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
    text = table("--format", "latex", "--rows", "recipe,model.channels")[1]
    text += table("--format", "latex", "--rows", "model.channels,recipe")[1]
    compiled(text, tmp_path)


def two_optimizers(write) -> None:
    """Two ratios under Adam, one under SGD, and a dense run under each."""
    for seed in range(3):
        for optimizer, ratios in {"adam": ("2:4", "1:8"), "sgd": ("2:4",)}.items():
            write("dense", "dense", seed, 0.9 + 0.01 * seed, optimizer__name=optimizer)
            for ratio in ratios:
                write("ste", ratio, seed, 0.8 + 0.01 * seed, optimizer__name=optimizer)


def test_columns_of_two_keys_have_both_labels(write, table):
    two_optimizers(write)
    text = table("--format", "latex", "--cols", "optimizer,sparsity")[1]
    assert body(text) == [
        ["Recipe", "Adam, 2:4", "Adam, 1:8", "SGD, 2:4"],
        ["dense", *[r"$91.0_{\pm 1.0}$"] * 3],
        ["STE", *[r"$81.0_{\pm 1.0}$"] * 3],
    ]


@PDFLATEX
def test_columns_of_two_keys_compile(write, table, tmp_path):
    two_optimizers(write)
    for rows in ("recipe", "recipe,model"):
        text = table("--format", "latex", "--cols", "optimizer,sparsity", "--rows", rows)[1]
        assert "Overfull" not in compiled(text, tmp_path)
