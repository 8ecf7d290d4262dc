"""Runs as a CSV file: what is written is read again, and nothing else is taken for it."""

import codecs
import json
import math
import re
from pathlib import Path

import pandas as pd
import pytest
from runs import rewrite
from verbs import verb

from nmrun.errors import ConfigError
from nmrun.lab.compare.runs import collect, from_csv, to_csv

RUN = {
    "recipe": "=step", "sparsity": "1:8", "seed": 3, "status": "finished", "metric": "accuracy", "dataset": "digits", "model": "mlp",
    "optimizer.lr": 1e-05, "trainer.clip": None, "model.bias": True, "recipe.decay": math.nan, "test/accuracy": 0.1 + 0.2,
    "model.exclude": "['a,b','c']", "folder": "/somewhere", "output_dir": "/somewhere", "track.name": "local",
}  # fmt: skip

HEAD = b"model,dataset,recipe,sparsity,status,metric,seed,test/accuracy\n"
GOOD = b"mlp,x,ste,2:4,finished,accuracy,0,0.5\n"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "runs.csv"


@pytest.fixture
def printed(capsys):
    """What a verb prints that succeeds."""

    def call(*words):
        assert verb(*map(str, words)) == 0
        return capsys.readouterr().out

    return call


def save(file, *runs):
    file.write_text(to_csv(pd.DataFrame(runs, dtype=object)))


def test_what_is_written_is_read_again(file):
    save(file, RUN)
    (read,) = from_csv(file)
    assert read.pop("folder") == f"{file}:2"
    assert math.isnan(read.pop("recipe.decay"))
    gone = ("folder", "output_dir", "track.name", "recipe.decay")
    assert read.items() >= {key: value for key, value in RUN.items() if key not in gone}.items()
    assert type(read["seed"]) is int
    assert read["model.bias"] is True


def test_a_table_may_be_of_folders_and_files(file, tmp_path, write):
    write("ste", "1:8", 0, 0.5)
    save(file, RUN)
    assert list(collect([tmp_path / "outputs", file])["recipe"]) == ["=step", "ste"]


@pytest.mark.parametrize(
    ("count", "by"),
    [
        (6, "6 trials by validation accuracy, the best two with three seeds"),
        (1, "1 trial by validation accuracy, with three seeds"),
    ],
)
def test_a_key_that_one_file_has_not_is_no_difference(count, by, tmp_path, table):
    """Nor is it told of every row by how many trials it was tuned, where the rows say so."""
    before, after = HEAD[:-1], HEAD[:-1] + b",model.name,trainer.limit_batches,optimizer.lr"
    (tmp_path / "before.csv").write_bytes(before + b",optimizer.lr\n" + GOOD[:-1] + b",0.1\n")
    tuned = b",tuned.trials,tuned.over,tuned.by\n"
    line = GOOD[:-1].replace(b"0.5", b"0.6") + b",mlp,null,0.2,%d,optimizer.lr 0.1,eval/accuracy\n"
    (tmp_path / "after.csv").write_bytes(after + tuned + line % count)
    lines = table("--rows", "recipe,tuned.trials", paths=("before.csv", "after.csv"))[1]
    trials = f"{by} (ste trials={count})"
    assert lines.splitlines()[2] == (
        f"not the same in all cells: learning rate; each cell tuned before by none (ste), {trials}"
    )


@pytest.mark.parametrize("value", ["1e160", "1e308", "1" * 400])
def test_a_metric_of_which_squares_overflow_is_of_a_failed_run(tmp_path, table, value):
    lines = [
        GOOD.replace(b",ste,", b",%s," % recipe)
        .replace(b",0,", b",%d," % seed)
        .replace(b"0.5", metric)
        for recipe, metric in ((b"ste", b"0.5"), (b"sr_ste", value.encode()), (b"asp", b"0.4"))
        for seed in range(4)
    ]
    (tmp_path / "runs.csv").write_bytes(HEAD + b"".join(lines))
    code, text, _ = table("--baseline", "ste", paths=("runs.csv",))
    assert code == 0
    assert "4 failed" in text


def test_an_edited_file_without_the_trials_is_of_runs_that_were_not_tuned(tmp_path, table):
    (tmp_path / "runs.csv").write_bytes(
        HEAD[:-1] + b",tuned.over\n" + GOOD[:-1] + b",optimizer.lr 0.1\n"
    )
    code, text, _ = table(paths=("runs.csv",))
    assert code == 0
    assert "tuned before" not in text


@pytest.mark.parametrize("text", ["2024_01", "1_0.5", "\u0663"])
def test_what_python_alone_takes_for_a_number_is_a_text(file, text):
    save(file, {**RUN, "dataset.revision": text})
    assert from_csv(file)[0]["dataset.revision"] == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a,seed\n1,2\n", "it has no column dataset, metric, model, recipe, sparsity, status"),
        (b"", "it has no column dataset, metric, model, recipe, seed"),
        (b"a\xff", "'utf-8' codec can't decode"),
        (b"a,\0b\n1,2\n", ""),
        (HEAD, "no run is in it"),
        (HEAD + b"1,2\n", "line 2: it has not as many values as there are columns"),
        (HEAD + GOOD[:-1] + b",1\n", "line 2: it has not as many values as there are columns"),
        (HEAD + GOOD + GOOD.replace(b"0.5", b"abc"), "line 3: test/accuracy=abc is no number"),
        (HEAD + GOOD.replace(b"0.5", b"true"), "line 2: test/accuracy=True is no number"),
        (HEAD + GOOD.replace(b",0,", b",x,"), "line 2: seed=x is no number"),
        (HEAD + GOOD.replace(b",0,", b",,"), "line 2: seed has no value"),
        (
            b"training_seconds," + HEAD + b"long," + GOOD,
            "line 2: training_seconds=long is no number",
        ),
        (HEAD + GOOD.replace(b",0,", b",1.5,"), "line 2: seed=1.5 is no whole number"),
        (HEAD + GOOD.replace(b"mlp,x,ste", b"mlp,,"), "line 2: dataset, recipe has no value"),
        (HEAD + b",,,,,,,0.5\n", "line 2: dataset, metric, recipe, seed, sparsity, status has"),
        (HEAD + GOOD.replace(b"finished", b"1"), "line 2: status=1: no such status"),
        ((HEAD + GOOD).replace(b",", b";"), "between columns there have to be commas"),
        (b"seed," + HEAD + b"0," + GOOD, "it has more than one column seed"),
        (
            HEAD[:-1] + b",higher_is_better\n" + GOOD[:-1] + b",nein\n",
            "line 2: higher_is_better=nein: it takes true or false",
        ),
        (HEAD + GOOD.replace(b"2:4", b"9:4"), "line 2: 9:4 is not an N:M pattern"),
        (HEAD + GOOD.replace(b"finished", b"done"), "line 2: status=done: no such status"),
    ],
)
def test_another_file_gets_a_line(file, text, message):
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=rf"^{file}: no file of runs: .*{re.escape(message)}"):
        from_csv(file)


@pytest.mark.parametrize(
    "saved",
    [
        codecs.BOM_UTF8 + HEAD + GOOD,
        (HEAD + GOOD).replace(b"\n", b"\r\n"),
        HEAD + b"\n" + GOOD + b"\n",
        HEAD + b",,,,,,,\n" + GOOD,
        HEAD + GOOD.replace(b"2:4", b"02:04"),
        HEAD + GOOD.removesuffix(b"\n"),
    ],
    ids=[
        *(
            "a mark of UTF-8",
            "lines of Windows",
            "empty lines",
            "commas alone",
            "a ratio as a time",
        ),
        "no end of the last line",
    ],
)
def test_a_file_that_another_program_saved_is_read(file, saved):
    file.write_bytes(HEAD + GOOD)
    (ours,) = from_csv(file)
    file.write_bytes(saved)
    (theirs,) = from_csv(file)
    line = 3 if saved.startswith((HEAD + b"\n", HEAD + b",")) else 2
    assert repr(theirs) == repr({**ours, "folder": f"{file}:{line}"})  # NaN is not itself


def test_a_spreadsheet_writes_truth_values_in_capitals(tmp_path, table):
    # perplexity falls as accuracy grows, so the same row is bold
    head = HEAD[:-1].replace(b"accuracy", b"perplexity") + b",higher_is_better,trainer.compile\n"
    good = GOOD[:-1].replace(b"accuracy", b"perplexity") + b",false,true\n"
    worse = good.replace(b",ste,", b",asp,").replace(b"0.5", b"0.7")
    (tmp_path / "runs.csv").write_bytes(head + good + worse)
    (tmp_path / "excel.csv").write_bytes(
        head + (good + worse).replace(b"false,true", b"FALSE,TRUE").replace(b",0,", b",1,")
    )
    code, text, _ = table(paths=("runs.csv", "excel.csv"))
    assert code == 0
    assert re.search(r"\| ste +\| \*\*", text)


def test_names_of_a_file_are_no_commands_to_a_terminal(file, capsys):
    save(file, {**RUN, "recipe": "a\x1b[2J", "model\x9b.x": "\x1b]0;b\x07"})
    assert verb("table", str(file)) == 0
    assert verb("table", str(file), "--rows", "model\x9b.x") in (0, 2)
    out, err = capsys.readouterr()
    assert "a [2J" in out
    assert not set("\x1b\x07\x9b") & set(out + err.replace("--rows model\x9b.x", ""))


def test_a_line_a_run_as_csv_gives_the_same_table(file, tmp_path, write, printed):
    for seed in (0, 1, 2):
        write("dense", "dense", seed, 0.9 + seed / 100)
        write("sr_ste", "1:8", seed, 0.8 + seed / 50, recipe__decay=2e-4)
        write("step", "1:8", seed, 0.85 + seed / 50, recipe__threshold=None)
    file.write_text(printed("table", tmp_path / "outputs", "--runs"))
    asked = ("--baseline", "sr_ste", "--format", "csv")
    of_folders = printed("table", tmp_path / "outputs", *asked)
    assert printed("table", file, *asked) == of_folders
    assert of_folders.count("\n") == 4


def test_files_of_two_machines_tell_in_what_their_runs_differ(tmp_path, write, printed, capsys):
    files = [str(tmp_path / f"{seed}.csv") for seed in (0, 1)]
    for seed, lr in enumerate((0.1, 0.2)):
        write("ste", "2:4", seed, 0.9, root=f"machine{seed}", optimizer__lr=lr)
        Path(files[seed]).write_text(printed("table", tmp_path / f"machine{seed}", "--runs"))
    assert verb("table", *files) == 2
    assert "optimizer.lr" in capsys.readouterr().err
    assert printed("table", *files, "--rows", "recipe,optimizer.lr")


def test_a_line_a_run_says_what_happened(tmp_path, write, printed):
    happened = ["step 20: ASP pruned once, by magnitude", "step 30: all is well"]
    events = [{"kind": "", "step": 20, "sentence": sentence} for sentence in happened]
    rewrite(write("asp", "1:8", 0, 0.9), events=events)
    write("dense", "dense", 0, 0.9)
    of_runs = json.loads(printed("table", tmp_path / "outputs", "--runs", "--format", "json"))
    runs = {run["recipe"]: run["events"] for run in of_runs}
    assert runs == {"asp": "; ".join(happened), "dense": ""}


def test_digits_of_an_id_are_no_number(file, printed):
    texts = {"id": "0873122205", "commit": "12e4567", "dataset.sha256": "0012"}
    save(file, {**RUN, **texts})
    (run,) = json.loads(printed("table", file, "--runs", "--format", "json"))
    assert {key: run[key] for key in texts} == texts


@pytest.mark.parametrize(("other", "told"), [("", False), ("abd", True)])
def test_a_run_without_a_commit_is_of_no_version(other, told, file, printed):
    save(file, *({**RUN, "seed": seed, "commit": c} for seed, c in enumerate(("abc", other))))
    assert ("made by 2 versions of the code" in printed("table", file)) == told


@pytest.mark.parametrize(("without", "counts"), [(2, ["1 seed", "2 seeds"]), (3, ["3 seeds"])])
def test_runs_without_a_model_are_a_table_of_their_own(file, printed, without, counts):
    models = ["mlp"] * (3 - without) + [math.nan] * without
    save(file, *({**RUN, "seed": seed, "model": model} for seed, model in enumerate(models)))
    assert re.findall(r"\d seeds?", printed("table", file)) == counts


def test_a_report_of_the_columns_that_a_file_needs(file, printed, monkeypatch):
    file.write_bytes(HEAD + GOOD)
    monkeypatch.chdir(file.parent)
    assert printed("report", "runs.csv") == "report.html\n"
    text = file.with_name("report.html").read_text()
    assert "50.0" in text
    assert "Runs: 1 finished." in text
    assert "nan" not in text
    assert not re.findall(r'href="(?!http)[^"#]+"', text)


def test_ratios_of_single_layers_have_a_table_a_report_and_a_csv(file, tmp_path, write, printed):
    for seed in (0, 1):
        write("ste", "1:8", seed, 0.8, sparsity__overrides={"inner.1": "1:4"})
        write("ste", "2:4", seed, 0.9, sparsity__overrides={"inner.1": "1:2", "head": "dense"})
    folder = tmp_path / "outputs"
    asked = ("--rows", "recipe,sparsity.overrides", "--format", "csv")
    of_folders = printed("table", folder, *asked)
    assert "{'inner.1':'1:4'}" in of_folders
    file.write_text(printed("table", folder, "--runs"))
    assert printed("table", file, *asked) == of_folders
    printed("report", folder, "--out", tmp_path / "report.html")
