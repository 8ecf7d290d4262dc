"""``nmrun prune``: a run folder like others, from a run's weights or pretrained ones; ``init``, by
which a run begins with it.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
import runs
import torch
from safetensors.torch import load_file
from verbs import verb

import nmrun
from nmrun.errors import ConfigError
from nmrun.lab import models, tasks
from nmrun.lab.config.identity import identity
from nmrun.lab.export import finished_run
from nmrun.lab.pruning import calibration, read_config
from nmrun.lab.runs.run_folder import RunFolder
from nmrun.lab.train import runner
from nmrun.sparsity import check_nm

LANGUAGE = (
    *("dataset=stdlib_text", "dataset.context=16", "model=gpt_tiny", "model.width=16", "model.heads=2"),
    *("trainer.limit_evaluation=2000", "trainer.epochs=2", "trainer.batch_size=4"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Runs are pruned into ``outputs`` of the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A dense language model, trained."""
    root = tmp_path_factory.mktemp("outputs")
    config = runs.config(
        root, *LANGUAGE, "recipe=dense", "optimizer.lr=3e-3", "trainer.limit_batches=60"
    )
    result = runner.run(config, root / "dense")
    assert result["status"] == "finished", result.get("error")
    return root / "dense"


def prune(*words: str, capsys) -> tuple[dict, str]:
    """The result that the verb writes, and what it prints."""
    assert verb("prune", *map(str, words)) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    folder = printed.strip().splitlines()[-1].strip()
    return json.loads(Path(folder, "result.json").read_text()) | {"folder": folder}, printed


@pytest.mark.slow
def test_a_run_is_pruned_as_the_library_prunes(dense, capsys):
    result, printed = prune(dense, "method=wanda", "sparsity=1:4", "samples=10", capsys=capsys)
    before, config = runs.result_of(dense), read_config([str(dense)])
    assert result["config"]["recipe"] == {"name": "wanda", "samples": 10, "permute": False}
    assert "/stdlib_text/gpt_tiny/wanda/1of4/s0-" in result["folder"]
    run = finished_run.read(Path(result["folder"]))  # all files are sealed, all layers 1:4
    assert len(run.layers) == 8
    # by hand: the first ten windows that training with this seed draws
    task = tasks.build(config, torch.device("cpu"))
    windows = torch.cat([task.micro_batches(0, index, 1)[0][0] for index in range(3)])[:10]
    model = models.build(config.model.mapping(), task.inputs)
    model.load_state_dict(load_file(dense / "model.safetensors"))
    batches = windows.split([4, 4, 2])
    pruned = nmrun.prune(model, batches, "wanda", "1:4", exclude=["lm_head"])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, run.state[name]), name
    assert result["sparsity"]["layers"] == pruned.layers
    # before: what the run's end said; after: what the library's model gives
    final = result["metrics"]["final"]
    for key, value in before["metrics"]["final"].items():
        split, metric = key.split("/")
        assert final[f"{split}/dense/{metric}"] == pytest.approx(value, rel=1e-6)
    model.eval()
    assert final["test/perplexity"] == pytest.approx(task.evaluate(model, "test")["perplexity"])
    assert final["test/perplexity"] > final["test/dense/perplexity"]
    assert "test perplexity: " in printed
    lines = [line for line in printed.splitlines() if "output error" in line]
    assert re.match(r"  \[1/\d\] h\.0\.attn\.c_attn\.weight +1:4  output error 0\.", lines[0])
    assert len({line.index("output error") for line in lines}) == 1, "aligned"
    assert [line.split("]")[0] for line in lines] == [
        f"  [{number}/{len(lines)}" for number in range(1, len(lines) + 1)
    ]


@pytest.mark.slow
def test_in_bfloat16_the_metrics_are_those_of_the_pruned_weights(dense, capsys):
    words = ("trainer.precision=bf16", "sparsity=1:4", "samples=4")
    result, _ = prune(dense, *words, capsys=capsys)
    model, task = finished_run.network(finished_run.read(Path(result["folder"])))
    with torch.autocast("cpu", torch.bfloat16):
        loss = task.evaluate(model, "val")["loss"]
    assert result["metrics"]["final"]["eval/loss"] == pytest.approx(loss, rel=1e-6)
    assert result["environment"]["precision"] == "bf16"


@pytest.mark.slow
@pytest.mark.parametrize("dense_end", [0, 0.5])
def test_activations_are_pruned_as_at_the_end_of_the_run(dense_end, tmp_path, capsys):
    words = ("model.activation=relu2", "trainer.activations=1:8", "trainer.limit_batches=10")
    end = f"trainer.activations_dense_end={dense_end}"
    config = runs.config(tmp_path, *LANGUAGE, *words, end, "recipe=dense", "optimizer.lr=3e-3")
    before = runner.run(config, tmp_path / "run")["metrics"]["final"]
    options = (tmp_path / "run", "samples=4", f"output_dir={tmp_path}")
    result, _ = prune(*options, capsys=capsys)
    assert result["metrics"]["final"]["eval/dense/loss"] == pytest.approx(before["eval/loss"])
    model, task = finished_run.network(finished_run.read(Path(result["folder"])))
    if not dense_end:
        nmrun.sparse_activations(model, "1:8")
    loss = task.evaluate(model, "val")["loss"]
    assert result["metrics"]["final"]["eval/loss"] == pytest.approx(loss)


@pytest.mark.slow
def test_again_is_the_same_run_with_the_same_bits(dense, capsys):
    words = (dense, "sparsity=2:4", "samples=4", "method.damping=0.1")
    first, _ = prune(*words, capsys=capsys)
    weights = load_file(f"{first['folder']}/model.safetensors")
    assert first["config"]["recipe"] == {"name": "sparsegpt", "samples": 4, "damping": 0.1}
    again, printed = prune(*words, capsys=capsys)
    assert "finished already" in printed
    assert again == first
    forced, _ = prune(*words, "force=true", capsys=capsys)
    assert forced["folder"] == first["folder"]
    for name, tensor in load_file(f"{forced['folder']}/model.safetensors").items():
        assert torch.equal(tensor, weights[name]), name
    other, _ = prune(*words, "seed=1", capsys=capsys)  # other windows
    assert other["folder"] != first["folder"]
    assert other["sparsity"]["layers"] != first["sparsity"]["layers"]
    command = other["environment"]["command"]
    assert shlex.split(command)[:3] == ["nmrun", "prune", str(dense)]
    assert verb("rerun", other["folder"], "seed=0") == 0
    assert first["folder"] in capsys.readouterr().out


@pytest.mark.slow
def test_other_verbs_take_the_folder(dense, tmp_path, capsys):
    result, _ = prune(
        dense, "method=magnitude", "samples=2", f"output_dir={tmp_path}", capsys=capsys
    )
    assert (
        verb("export", result["folder"], "--out", str(tmp_path / "to"), "--format", "packed") == 0
    )
    assert verb("table", str(tmp_path), "--metric", "test/perplexity", "--format", "csv") == 0
    assert "magnitude" in capsys.readouterr().out
    prune(dense, "method=magnitude", "samples=2", "seed=1", f"output_dir={tmp_path}", capsys=capsys)
    assert verb("table", str(tmp_path), "--metric", "test/perplexity", "--format", "csv") == 0
    head, line = capsys.readouterr().out.splitlines()  # one cell of two seeds
    assert dict(zip(head.split(","), line.split(","), strict=True))["n"] == "2"
    assert verb("compare", str(dense), result["folder"]) == 0
    assert "\ninit " in capsys.readouterr().out


def test_nothing_is_tracked(dense):
    local = read_config([str(dense), "seed=1", "track=local"])
    assert local.plain["track"] == {"name": "local", "tags": [], "also": []}
    composed = ("dataset=stdlib_text", "model=gpt_tiny", f"init={dense}", "dataset.context=16")
    width = ("model.width=16", "model.heads=2")
    assert read_config([*composed, *width]).plain["track"] == local.plain["track"]


@pytest.mark.slow
def test_a_run_begins_with_the_pruned_weights(dense, tmp_path, capsys):
    """ASP from the first step keeps the one-shot mask."""
    result, _ = prune(dense, "method=wanda", "samples=4", f"output_dir={tmp_path}", capsys=capsys)
    start = load_file(f"{result['folder']}/model.safetensors")
    asp = (*LANGUAGE, "recipe=asp", "recipe.prune_at=0", "trainer.epochs=1")
    with_init = runs.config(tmp_path, *asp, f"init={result['folder']}")
    before = identity(with_init)
    assert before != identity(runs.config(tmp_path, *asp))
    after = runner.run(with_init, tmp_path / "tuned")
    assert after["status"] == "finished", after.get("error")
    trained = load_file(tmp_path / "tuned" / "model.safetensors")
    for layer in result["sparsity"]["layers"]:
        name = layer["name"]
        assert torch.equal(trained[name] == 0, start[name] == 0), name
        assert not torch.equal(trained[name], start[name]), name
    final = after["metrics"]["final"]["eval/perplexity"]
    assert final < result["metrics"]["final"]["eval/perplexity"]
    moved = Path(result["folder"]).rename(tmp_path / "moved")  # the same run in another place
    assert identity(runs.config(tmp_path, *asp, f"init={moved}")) == before


@pytest.mark.slow
def test_maskllm_begins_with_the_masks_of_a_pruned_network(dense, tmp_path, capsys):
    """The dense weights come from init, the masks from another folder."""
    result, _ = prune(dense, "method=wanda", "samples=4", f"output_dir={tmp_path}", capsys=capsys)
    start, pruned = (load_file(Path(x, "model.safetensors")) for x in (dense, result["folder"]))
    words = (
        *(*LANGUAGE, "recipe=maskllm", "recipe.dense=0", "recipe.prior=50", f"init={dense}"),
        *("trainer.epochs=1", "trainer.limit_batches=2", "optimizer.lr=1e-6"),
    )
    config = runs.config(tmp_path, *words, f"recipe.masks={result['folder']}")
    assert identity(config) != identity(runs.config(tmp_path, *words))
    after = runner.run(config, tmp_path / "learned")
    assert after["status"] == "finished", after.get("error")
    learned = load_file(tmp_path / "learned" / "model.safetensors")
    for layer in result["sparsity"]["layers"]:
        mask = pruned[layer["name"]] != 0
        assert torch.equal(learned[layer["name"]], torch.where(mask, start[layer["name"]], 0.0))
    before = identity(config)
    moved = Path(result["folder"]).rename(tmp_path / "moved")
    assert identity(runs.config(tmp_path, *words, f"recipe.masks={moved}")) == before
    assert verb(*LANGUAGE[:3], "recipe=maskllm", "recipe.masks=nowhere") == 2
    assert capsys.readouterr().err == "nmrun: recipe.masks=nowhere: no finished run is there\n"


def test_images(tmp_path, capsys):
    config = runs.config(tmp_path, "recipe=dense")
    assert runner.run(config, tmp_path / "dense")["status"] == "finished"
    result, printed = prune(
        tmp_path / "dense", "method=ria", "method.a=1", "samples=50", capsys=capsys
    )
    assert [layer["name"] for layer in result["sparsity"]["layers"]] == [
        "inner.0.weight",
        "inner.1.weight",
    ]
    assert "test accuracy: " in printed
    model = nmrun.Result("finished", result["config"], {}, Path(result["folder"])).model()
    assert check_nm(model, "2:4", exclude=["stem", "head"])


def test_the_run_that_is_pruned_may_be_moved_meanwhile(tmp_path, capsys, monkeypatch):
    config, module = runs.config(tmp_path, "recipe=dense"), "nmrun.oneshot.prune"
    assert runner.run(config, tmp_path / "dense")["status"] == "finished"
    by_library = importlib.import_module(module).prune

    def moved(*args, **settings):
        (tmp_path / "dense").rename(tmp_path / "moved")
        return by_library(*args, **settings)

    monkeypatch.setattr(f"{module}.prune", moved)
    result, _ = prune(tmp_path / "dense", "samples=50", f"output_dir={tmp_path}", capsys=capsys)
    assert RunFolder(result["folder"]).finished() is not None


def test_a_pretrained_network(tmp_path, capsys):
    transformers = pytest.importorskip("transformers", reason="needs nmrun[transformers]")
    options = {
        "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
    theirs.save_pretrained(tmp_path / "llama")
    words = (
        "dataset=stdlib_text",
        "dataset.context=16",
        "model=hf_causal",
        f"model.pretrained={tmp_path / 'llama'}",
    )
    small = (
        "samples=6",
        "trainer.limit_evaluation=100",
        "trainer.batch_size=4",
        f"output_dir={tmp_path}",
        "trainer.device=cpu",
    )
    result, _ = prune(*words, *small, "sparsity=2:4", capsys=capsys)
    assert len(result["sparsity"]["layers"]) == 14
    assert verb("export", result["folder"], "--out", str(tmp_path / "to"), "--format", "hf") == 0
    pruned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "to")
    for name, module in pruned.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            assert check_nm(module.weight, "2:4")
    assert torch.equal(pruned.lm_head.weight, theirs.lm_head.weight)


def test_calibration_is_cut_to_the_samples(dense):
    task = tasks.build(read_config([str(dense)]), torch.device("cpu"))
    sizes = [len(batch[0]) for batch in calibration(task, 10, 2)]
    assert sizes == [2, 2, 2, 2, 2]
    assert [len(batch[0]) for batch in calibration(task, 7, 1)] == [4, 3]
    with pytest.raises(
        ConfigError, match=r"samples=10000000: an epoch of the training split has \d+$"
    ):
        list(calibration(task, 10_000_000, 1))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["method=wander"], "method=wander: no such method; did you mean wanda? (there are magnitude, wanda, ria, sparsegpt)"),
        (["method=wanda", "method.damping=1"], "wanda: damping: no such hyperparameter (there are permute)"),
        (["samples=0"], "samples=0: it takes a whole number, 1 or more"),
        (["samples.x=3"], "samples.x: no such key"),
        (["sparsity=5:4"], "sparsity=5:4: 5:4 is not an N:M pattern: it takes 1 <= N <= M, such as 2:4 or 1:16"),
        (["sparsity=dense"], "sparsity=dense: nothing would be pruned"),
        (["recipe=ste"], "recipe=ste: nmrun prune has method= in the place of a recipe"),
        (["seed=1,2"], "seed=1,2: several values make a sweep, and this is one run"),
        (["model=mlp"], "model=mlp: the run has its own model; its keys (model.…) can change"),
        (["sparsity=1:128"], "no weight of this model can be pruned to 1:128 "),
        (["trainer.device=gpu"], "trainer.device=gpu: it takes one of auto, cpu, cuda, free"),
        (["more"], "more: one run folder; all else is key=value"),
        (["dataset.context=100000000"], "dataset.context=100000000: the "),
        (["track=wandb"], "track=wandb: nmrun prune has method= in the place of a recipe, tracks nothing"),
    ],
)  # fmt: skip
def test_mistakes_get_a_line(dense, tmp_path, capsys, words, line):
    assert verb("prune", str(dense), f"output_dir={tmp_path / 'out'}", *words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"nmrun: {line}"), error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()  # nothing half done


def test_without_trained_weights_nothing_is_pruned(dense, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert verb("prune", "dataset=stdlib_text", "model=gpt_tiny") == 2
    assert (
        "model=gpt_tiny comes untrained: name a finished run, or a pretrained"
        in capsys.readouterr().err
    )


def test_init_takes_a_finished_run_of_the_same_network(dense, tmp_path, capsys):
    words = [word for word in LANGUAGE if not word.startswith("model.width")]
    config = runs.config(tmp_path / "out", *words, "recipe=dense", f"init={dense}")
    with pytest.raises(
        ConfigError, match=r"init=.* is another network than this run's: .* there and .* here"
    ):
        runner.run(config, tmp_path / "out" / "run")
    assert verb("recipe=dense", f"init={tmp_path}", f"output_dir={tmp_path}") == 2
    assert capsys.readouterr().err.startswith(f"nmrun: init={tmp_path}: no finished run is there")


def test_a_run_from_elsewhere_does_not_say_where_it_is_pruned_to(dense, tmp_path):
    before = runs.result_of(dense)["config"]["output_dir"]
    assert before == str(dense.parent)
    assert read_config([str(dense)]).output_dir == "outputs"
    assert read_config([str(dense), f"output_dir={tmp_path}"]).output_dir == str(tmp_path)
