"""Runs as a CSV file: what is written is read again, and nothing else is taken for it."""

import codecs
import json
import math
import re

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


def test_what_is_written_is_read_again(tmp_path):
    file = tmp_path / "runs.csv"
    file.write_text(to_csv(pd.DataFrame([RUN], dtype=object)))
    (read,) = from_csv(file)
    assert read.pop("folder") == f"{file}:2"
    assert math.isnan(read.pop("recipe.decay"))
    gone = ("folder", "output_dir", "track.name", "recipe.decay")
    assert read.items() >= {key: value for key, value in RUN.items() if key not in gone}.items()
    assert type(read["seed"]) is int
    assert read["model.bias"] is True


def test_a_table_may_be_of_folders_and_files(tmp_path, write):
    write("ste", "1:8", 0, 0.5)
    file = tmp_path / "runs.csv"
    file.write_text(to_csv(pd.DataFrame([RUN], dtype=object)))
    assert list(collect([tmp_path / "outputs", file])["recipe"]) == ["=step", "ste"]


def test_a_key_that_one_file_has_not_is_no_difference(tmp_path, table):
    """Nor is it told of every row by how many trials it was tuned, where the rows say so."""
    before, after = HEAD[:-1], HEAD[:-1] + b",model.name,trainer.limit_batches,optimizer.lr"
    (tmp_path / "before.csv").write_bytes(before + b",optimizer.lr\n" + GOOD[:-1] + b",0.1\n")
    tuned = b",tuned.trials,tuned.over,tuned.by\n"
    line = GOOD[:-1].replace(b"0.5", b"0.6") + b",mlp,null,0.2,6,optimizer.lr 0.1,eval/accuracy\n"
    (tmp_path / "after.csv").write_bytes(after + tuned + line)
    lines = table("--rows", "recipe,tuned.trials", paths=("before.csv", "after.csv"))[1]
    trials = "6 trials by validation accuracy, the best two with three seeds (ste trials=6)"
    assert lines.splitlines()[2] == (
        f"not the same in all cells: learning rate; each cell tuned before by none (ste), {trials}"
    )


@pytest.mark.parametrize("text", ["2024_01", "1_0.5", "\u0663"])
def test_what_python_alone_takes_for_a_number_is_a_text(tmp_path, text):
    file = tmp_path / "runs.csv"
    lines = [HEAD.decode()[:-1] + ",dataset.revision", GOOD.decode()[:-1] + f",{text}"]
    file.write_text("\n".join(lines), encoding="utf-8")
    assert from_csv(file)[0]["dataset.revision"] == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            b"a,seed\n1,2\n",
            "it has no column dataset, metric, model, recipe, sparsity, status",
        ),
        (b"", "it has no column dataset, metric, model, recipe, seed"),
        (b"a\xff", "'utf-8' codec can't decode"),
        (b"a,\0b\n1,2\n", ""),
        (HEAD, "no run is in it"),
        (HEAD + b"1,2\n", "line 2: it has not as many values as there are columns"),
        (HEAD + GOOD[:-1] + b",1\n", "line 2: it has not as many values as there are columns"),
        (HEAD + GOOD + GOOD.replace(b"0.5", b"abc"), "line 3: test/accuracy=abc is no number"),
        (HEAD + GOOD.replace(b"0.5", b"true"), "line 2: test/accuracy=True is no number"),
        (HEAD + GOOD.replace(b",0,", b",x,"), "line 2: seed=x is no number"),
        (HEAD + GOOD.replace(b"2:4", b"9:4"), "line 2: 9:4 is not an N:M pattern"),
        (
            HEAD + GOOD.replace(b"finished", b"done"),
            "line 2: status=done: no such status",
        ),
    ],
)
def test_another_file_gets_a_line(tmp_path, text, message):
    file = tmp_path / "runs.csv"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=rf"^{file}: no file of runs: .*{re.escape(message)}"):
        from_csv(file)


@pytest.mark.parametrize(
    "saved",
    [
        codecs.BOM_UTF8 + HEAD + GOOD,
        (HEAD + GOOD).replace(b"\n", b"\r\n"),
        HEAD + b"\n" + GOOD + b"\n",
        HEAD + GOOD.removesuffix(b"\n"),
    ],
    ids=["a mark of UTF-8", "lines of Windows", "empty lines", "no end of the last line"],
)
def test_a_file_that_another_program_saved_is_read(tmp_path, saved):
    (tmp_path / "as_written.csv").write_bytes(HEAD + GOOD)
    (tmp_path / "saved.csv").write_bytes(saved)
    (ours,), (theirs,) = (from_csv(tmp_path / name) for name in ("as_written.csv", "saved.csv"))
    line = 3 if b"\n\n" in saved else 2
    assert theirs.pop("folder") == f"{tmp_path / 'saved.csv'}:{line}"
    assert repr(theirs) == repr({key: ours[key] for key in theirs})  # NaN is not itself


def test_a_metric_that_a_file_has_not_is_no_failure(tmp_path, capsys):
    (tmp_path / "runs.csv").write_bytes(HEAD + GOOD.replace(b"accuracy", b"perplexity"))
    assert verb("table", str(tmp_path / "runs.csv")) == 0
    assert "1 without a value" in capsys.readouterr().out


def test_names_of_a_file_are_no_commands_to_a_terminal(tmp_path, capsys):
    file, odd = tmp_path / "runs.csv", {**RUN, "recipe": "a\x1b[2J", "model\x9b.x": "\x1b]0;b\x07"}
    file.write_text(to_csv(pd.DataFrame([odd], dtype=object)))
    assert verb("table", str(file)) == 0
    assert verb("table", str(file), "--rows", "model\x9b.x") in (0, 2)
    out, err = capsys.readouterr()
    assert "a [2J" in out
    assert not set("\x1b\x07\x9b") & set(out + err.replace("--rows model\x9b.x", ""))


def test_a_line_a_run_as_csv_gives_the_same_table(tmp_path, write, capsys):
    for seed in (0, 1, 2):
        write("dense", "dense", seed, 0.9 + seed / 100)
        write("sr_ste", "1:8", seed, 0.8 + seed / 50, recipe__decay=2e-4)
        write("step", "1:8", seed, 0.85 + seed / 50, recipe__threshold=None)

    def printed(*words):
        assert verb("table", *words) == 0
        return capsys.readouterr().out

    (tmp_path / "runs.csv").write_text(printed(str(tmp_path / "outputs"), "--runs"))
    asked = ("--baseline", "sr_ste", "--format", "csv")
    of_folders = printed(str(tmp_path / "outputs"), *asked)
    assert printed(str(tmp_path / "runs.csv"), *asked) == of_folders
    assert of_folders.count("\n") == 4


def test_files_of_two_machines_tell_in_what_their_runs_differ(tmp_path, write, capsys):
    for seed, lr in enumerate((0.1, 0.2)):
        write("ste", "2:4", seed, 0.9, root=f"machine{seed}", optimizer__lr=lr)
        assert verb("table", str(tmp_path / f"machine{seed}"), "--runs") == 0
        (tmp_path / f"{seed}.csv").write_text(capsys.readouterr().out)
    files = [str(tmp_path / f"{seed}.csv") for seed in (0, 1)]
    assert verb("table", *files) == 2
    assert "optimizer.lr" in capsys.readouterr().err
    assert verb("table", *files, "--rows", "recipe,optimizer.lr") == 0


def test_a_line_a_run_says_what_happened(tmp_path, write, capsys):
    happened = ["step 20: ASP pruned once, by magnitude", "step 30: all is well"]
    events = [{"kind": "", "step": 20, "sentence": sentence} for sentence in happened]
    rewrite(write("asp", "1:8", 0, 0.9), events=events)
    write("dense", "dense", 0, 0.9)
    assert verb("table", str(tmp_path / "outputs"), "--runs", "--format", "json") == 0
    runs = {run["recipe"]: run["events"] for run in json.loads(capsys.readouterr().out)}
    assert runs == {"asp": "; ".join(happened), "dense": ""}


def test_digits_of_an_id_are_no_number(tmp_path, capsys):
    texts = {"id": "0873122205", "commit": "12e4567", "dataset.sha256": "0012"}
    file = tmp_path / "runs.csv"
    file.write_text(to_csv(pd.DataFrame([{**RUN, **texts}], dtype=object)))
    (read,) = from_csv(file)
    assert {key: read[key] for key in texts} == texts
    assert verb("table", str(file), "--runs", "--format", "json") == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["id"], run["commit"]) == ("0873122205", "12e4567")


def test_a_run_without_a_commit_is_of_no_version(tmp_path, capsys):
    file = tmp_path / "runs.csv"
    for commits, versions in ((("abc", ""), 1), (("abc", "abd"), 2)):
        runs = [{**RUN, "seed": seed, "commit": commit} for seed, commit in enumerate(commits)]
        file.write_text(to_csv(pd.DataFrame(runs, dtype=object)))
        assert verb("table", str(file)) == 0
        out = capsys.readouterr().out
        assert ("made by 2 versions of the code" in out) == (versions == 2)


@pytest.mark.parametrize(("without", "counts"), [(2, ["1 seed", "2 seeds"]), (3, ["3 seeds"])])
def test_runs_without_a_model_are_a_table_of_their_own(tmp_path, capsys, without, counts):
    models = ["mlp"] * (3 - without) + [""] * without
    lines = [
        GOOD.replace(b"mlp", model.encode()).replace(b",0,", b",%d," % seed)
        for seed, model in enumerate(models)
    ]
    (tmp_path / "runs.csv").write_bytes(HEAD + b"".join(lines))
    assert verb("table", str(tmp_path / "runs.csv")) == 0
    assert re.findall(r"\d seeds?", capsys.readouterr().out) == counts


def test_a_report_of_the_columns_that_a_file_needs(tmp_path, capsys, monkeypatch):
    (tmp_path / "runs.csv").write_bytes(HEAD + GOOD)
    monkeypatch.chdir(tmp_path)
    assert verb("report", "runs.csv") == 0
    assert capsys.readouterr().out == "report.html\n"
    text = (tmp_path / "report.html").read_text()
    assert "50.0" in text
    assert "Runs: 1 finished." in text
    assert "nan" not in text
    assert {
        link for link in re.findall(r'href="([^"#]+)"', text) if not link.startswith("http")
    } == set()


def test_ratios_of_single_layers_have_a_table_a_report_and_a_csv(tmp_path, write, capsys):
    for seed in (0, 1):
        write("ste", "1:8", seed, 0.8, sparsity__overrides={"inner.1": "1:4"})
        write("ste", "2:4", seed, 0.9, sparsity__overrides={"inner.1": "1:2", "head": "dense"})
    folder, file = str(tmp_path / "outputs"), tmp_path / "runs.csv"

    def printed(*words):
        assert verb(*words) == 0
        return capsys.readouterr().out

    asked = ("--rows", "recipe,sparsity.overrides", "--format", "csv")
    of_folders = printed("table", folder, *asked)
    assert "{'inner.1':'1:4'}" in of_folders
    file.write_text(printed("table", folder, "--runs"))
    assert printed("table", str(file), *asked) == of_folders
    printed("report", folder, "--out", str(tmp_path / "report.html"))
