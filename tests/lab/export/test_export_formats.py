"""Exports in every format: decoded and recomputed here, or loaded by libraries that know nothing of
nmrun.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoders import WORDS, save_encoder
from runs import config, rewrite, write_run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from training import bits
from verbs import verb

import nmrun
from nmrun.errors import RunError
from nmrun.fast import packed
from nmrun.lab import models, tasks
from nmrun.lab.config.identity import run_folder
from nmrun.lab.export import cli
from nmrun.lab.export.finished_run import FinishedRun, SparseLayer
from nmrun.lab.tasks.vision.images import load_digits
from nmrun.lab.train import runner
from nmrun.patterns import Pattern
from nmrun.sparsity import nm_mask

LAST = "model.packed.safetensors"


def sparse(
    shape: tuple[int, ...], pattern: str, dim: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    return torch.where(nm_mask(weight, pattern, dim, pad=True), weight, 0.0).to(dtype)


def small(place: Path) -> Path:
    state = {"a.weight": sparse((8, 16), "2:4", 1), "b.weight": sparse((10, 3), "1:4", 0)}
    kinds = (("a.weight", "2:4", 1), ("b.weight", "1:4", 0))
    layers = [{"name": name, "pattern": pattern, "dim": dim} for name, pattern, dim in kinds]
    return write_run(place, {**state, "a.bias": torch.randn(8)}, layers)


def run_of(place: Path, model: nn.Module, run_config: dict[str, Any], **options: Any) -> Path:
    """A run that ended with this model at 2:4, which itself stays as it is in training: its
    parameters are 2:4.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = nmrun.sparsify(model, optimizer, "ste", "2:4", 8, **{"exclude": None, **options})
    model.eval()
    return write_run(place, model.state_dict(), handle.report()["layers"], **run_config)


def exported(run: Path, to: Path, form: str) -> list[dict[str, Any]]:
    """Export a run; the lines on its layers."""
    assert cli.export([str(run), "--out", str(to), "--format", form]) == 0
    lines: list[dict[str, Any]] = json.loads((to / "sparsity.json").read_text())["layers"]
    return lines


def most_of_four(weight: Tensor) -> int:
    """The most non-zeros in four consecutive columns."""
    return int((weight.reshape(-1, 4) != 0).sum(1).max())


def refused(
    run: Path, to: Path, capsys: pytest.CaptureFixture[str], *words: str, status: int = 1
) -> str:
    before = sorted(to.parent.iterdir())
    assert verb("export", str(run), "--out", str(to), *words) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert sorted(to.parent.iterdir()) == before
    return line


# --- packed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern", ["2:4", "1:4", "3:4", "1:8", "4:8", "1:16", "3:5", "2:2", "1:1"]
)
@pytest.mark.parametrize(
    ("shape", "dim"), [((6, 16), 1), ((6, 18), 1), ((11, 3), 0), ((2, 10, 3, 3), 1), ((4, 3), 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_packed_comes_back_with_the_same_bits(pattern, shape, dim, dtype):
    weight, ratio = sparse(shape, pattern, dim, dtype), Pattern.parse(pattern)
    values, places = packed.pack(weight, ratio, dim)
    assert bits(packed.unpack(values, places, ratio, dim, list(shape))) == bits(weight)
    groups = weight.numel() // shape[dim] * -(-shape[dim] // ratio.m)
    assert values.numel() == groups * ratio.n
    width = len(bin(ratio.m - 1)) - 2 if ratio.m > 1 else 0
    assert places.numel() == -(-groups * min(ratio.m, ratio.n * width) // 8)


def test_a_value_behind_the_last_weight_is_refused():
    values, places = packed.pack(torch.ones(2, 4), Pattern(4, 4), 1)
    with pytest.raises(ValueError, match="a value behind the last of 3"):
        packed.unpack(values, places, Pattern(4, 4), 1, [2, 3])


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([5 | 5 << 3], "positions of a group that do not increase"),
        ([5 | 2 << 3], "positions of a group that do not increase"),
        ([], "places of [0] for 1 groups of 2:8"),
        ([2 | 5 << 3, 0], "places of [2] for 1 groups of 2:8"),
        ([[2 | 5 << 3]], "places of [1, 1] for 1 groups of 2:8"),
    ],
)
def test_places_that_no_weight_has_are_refused(places, message):
    values = torch.tensor([[1.0, 2.0]])
    right = packed.unpack(values, torch.tensor([2 | 5 << 3]).byte(), Pattern(2, 8), 1, [1, 8])
    assert right.tolist() == [[0, 0, 1, 0, 0, 2, 0, 0]]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        packed.unpack(values, torch.tensor(places).byte(), Pattern(2, 8), 1, [1, 8])


def test_the_documented_layout_is_read_by_hand():
    weight = torch.tensor([[0.0, 5, 0, 6, 7, 8, 0, 0, 0, 0, 0, 9]])
    values, places = packed.pack(weight, Pattern(2, 4), 1)
    bits = int.from_bytes(places.numpy().tobytes(), "little")
    positions = [bits >> 2 * i & 3 for i in range(6)]
    assert positions == [1, 3, 0, 1, 0, 3]
    assert values.tolist() == [[5, 6], [7, 8], [0, 9]]
    # 4 bits rather than 3 x 2
    _, mask = packed.pack(torch.tensor([[1.0, 0, 2, 3], [0, 4, 5, 6]]), Pattern(3, 4), 1)
    assert mask.tolist() == [0b1110_1101]


def test_the_packed_file_has_what_the_run_has(tmp_path, capsys):
    run, to = small(tmp_path / "run"), tmp_path / "to"
    assert exported(run, to, "packed")[1]["dim"] == 0
    assert capsys.readouterr().out.startswith(f"{to / LAST}: 2:4, 1:4 hold in 2 layers, ")
    back = packed.load(to)
    assert list(back) == sorted(back)
    assert bits(back) == bits(load_file(run / "model.safetensors"))
    with safe_open(to / LAST, "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert stored["a.weight.places"].numel() == 8 * 16 // 4 * 2 * 2 // 8


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    place = tmp_path_factory.mktemp("packed")
    exported(small(place / "run"), place / "to", "packed")
    return (place / "to" / LAST).read_bytes()


def test_a_changed_byte_of_a_tensor_shows(whole, tmp_path):
    begin = 8 + int.from_bytes(whole[:8], "little")
    for at in range(begin, len(whole), 7):
        (tmp_path / LAST).write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"^[^\n]*it was changed: the SHA-256 of [^\n]*$"):
            packed.load(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"2:4", b"1:4"), (b"a.weight.places", b"a.weight.plaxes"), (b"[8, 16]", b"[4, 32]")],
)
def test_a_changed_header(old, new, whole, tmp_path):
    (tmp_path / LAST).write_bytes(whole.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"was changed|not those of its header"):
        packed.load(tmp_path)


def test_other_files(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / LAST)
    with pytest.raises(ValueError, match="is no packed file of nmrun"):
        packed.load(tmp_path)


# --- what is refused leaves nothing ---------------------------------------------------------------


def test_a_damaged_model_is_one_line(tmp_path, capsys):
    run = small(tmp_path / "run")
    data = (run / "model.safetensors").read_bytes()
    for size in (len(data) // 2, 4, 0):
        (run / "model.safetensors").write_bytes(data[:size])
        rewrite(run)
        assert "is damaged or cut off" in refused(run, tmp_path / "to", capsys)


def test_a_dense_run(tmp_path, capsys):
    dense = write_run(tmp_path / "dense", {"a": torch.ones(2, 4)}, [])
    assert "is a dense run" in refused(dense, tmp_path / "to", capsys, status=2)


def test_where_it_cannot_go(tmp_path, capsys):
    run = small(tmp_path / "run")
    (tmp_path / "file").write_text("mine")
    assert f"{tmp_path}/file: File exists" in refused(run, tmp_path / "file", capsys)
    assert "the run's own folder" in refused(run, run, capsys, status=2)
    assert verb("export", str(run), "--out", "/proc/to") == 1
    assert capsys.readouterr().err.startswith("nmrun: /proc/")


def test_a_failure_half_way_leaves_what_was_there(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    run, to = small(tmp_path / "run"), tmp_path / "to"
    to.mkdir()
    (to / "sparsity.json").write_text("older")
    (to / "notes.txt").write_text("mine")
    monkeypatch.setattr(FinishedRun, "describe", full)  # when the weights are written already
    said = refused(run, to, capsys, "--format", "packed")
    assert re.search(f"nmrun: {to}: No space left on device, .* free there", said)
    deep = tmp_path / "deep"
    assert verb("export", str(run), "--out", str(deep / "er"), "--format", "packed") == 1
    assert not deep.exists()
    left = {path.name: path.read_text() for path in to.iterdir()}
    assert left == {"sparsity.json": "older", "notes.txt": "mine"}
    monkeypatch.undo()
    exported(run, to, "packed")
    assert sorted(path.name for path in to.iterdir()) == [LAST, "notes.txt", "sparsity.json"]
    assert "older" not in (to / "sparsity.json").read_text()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(5, "Input/output error")])
def test_no_mix_of_two_exports(error, tmp_path, capsys, monkeypatch):
    """Cut off before each of the renames some files may be missing."""
    to, renaming = tmp_path / "to", os.rename
    names = ("model.safetensors", "sparsity.json")

    def content():
        files = [to / name for name in names]
        return tuple(file.read_bytes() if file.exists() else None for file in files)

    def exported(run, stop=-1):
        left = itertools.count()

        def rename(*words):
            if next(left) == stop:
                raise error
            renaming(*words)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", rename)
            with contextlib.suppress(KeyboardInterrupt, RunError):
                cli.export([str(run), "--out", str(to)])
        return content()

    torch.manual_seed(0)
    first = exported(one := small(tmp_path / "one"))
    torch.manual_seed(1)
    other = small(tmp_path / "other")
    rewrite(other, id="other")
    second = exported(other)
    assert None not in (*first, *second)
    assert [a == b for a, b in zip(first, second, strict=True)] == [False, False]
    for stop in range(3):
        assert exported(one) == first
        now = exported(other, stop)
        assert {a for a, b in zip(now, second, strict=True) if a != b} <= {None, *first}
        pairs = [zip(now, whole, strict=True) for whole in (first, second)]
        assert not all(any(a == b for a, b in pair) for pair in pairs)
    assert exported(other) == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other", "to"]


def test_an_export_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda f: (synced.add(os.fstat(f).st_ino), fsync(f)))
    exported(small(tmp_path / "run"), tmp_path / "to", "packed")
    assert {path.stat().st_ino for path in (tmp_path / "to").iterdir()} <= synced


# --- others load it -------------------------------------------------------------------------------

ALONE = """
import sys
sys.modules["nmrun"] = None
import torch, torchvision
from safetensors.torch import load_file
model = torchvision.models.resnet18(num_classes=10).eval()
model.load_state_dict(load_file(sys.argv[1]))
images = torch.arange(2 * 3 * 32 * 32).view(2, 3, 32, 32).sin()
torch.set_num_threads(1)
with torch.no_grad():
    torch.save(model(images), sys.argv[2])
"""


@pytest.mark.slow
def test_torchvision_loads_the_weights_without_nmrun(tmp_path):
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model, threads = resnet18(num_classes=10), torch.get_num_threads()
    run = run_of(tmp_path / "run", model, {})
    assert cli.export([str(run), "--out", str(tmp_path / "to")]) == 0
    file, logits = tmp_path / "to" / "model.safetensors", tmp_path / "logits.pt"
    for name, tensor in load_file(file).items():
        if tensor.dim() > 1 and name != "conv1.weight":
            zeros = tensor[tensor == 0]
            assert len(zeros) >= tensor.numel() // 2
            assert not zeros.signbit().any()
    subprocess.run([sys.executable, "-c", ALONE, str(file), str(logits)], check=True, timeout=300)
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            expected = model(torch.arange(2 * 3 * 32 * 32).view(2, 3, 32, 32).sin())
    finally:
        torch.set_num_threads(threads)
    assert bits(torch.load(logits)) == bits(expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_transformers_loads_an_encoder(pooling, dtype, tmp_path, capsys):
    """The weights of a run are float32, whatever the pretrained ones are."""
    transformers = pytest.importorskip("transformers", reason="needs nmrun[transformers]")
    bert = save_encoder(tmp_path / "bert", num_hidden_layers=1)
    transformers.AutoModel.from_pretrained(bert, dtype=dtype).save_pretrained(bert)
    options = {"name": "hf_encoder", "pretrained": str(bert), "pooling": pooling, "dropout": 0.1}
    model = models.build(options, {"vocabulary": len(WORDS), "max_length": 16, "classes": 3})
    settings = {"model": options, "dataset": {"tokenizer": str(bert)}}
    run = run_of(tmp_path / "run", model, settings, exclude=[".*pooler.*|head"])
    to = tmp_path / "to"
    capsys.readouterr()
    lines = exported(run, to, "hf")
    assert "it/s" not in capsys.readouterr().err  # no progress bar
    tokenizer = transformers.AutoTokenizer.from_pretrained(to)
    texts = tokenizer(["it was good", "badly"], padding=True, return_tensors="pt")
    assert texts["input_ids"].shape == (2, 5)
    mask = texts["attention_mask"]
    with torch.no_grad():
        expected = model(texts["input_ids"], mask.bool(), texts["token_type_ids"])
        if pooling == "cls":
            theirs = transformers.AutoModelForSequenceClassification.from_pretrained(to)
            logits = theirs(**texts).logits
        else:
            states = transformers.AutoModel.from_pretrained(to)(**texts)[0]
            means = (states * mask[:, :, None].float()).sum(1) / mask.sum(1, keepdim=True).float()
            logits = nn.functional.linear(means, **load_file(to / "head.safetensors"))
    assert bits(logits) == bits(expected)
    weights = load_file(to / "model.safetensors")
    assert [most_of_four(weights[line["name"]]) for line in lines] == [2] * 6


def test_transformers_loads_a_gpt2(tmp_path, capsys):
    transformers = pytest.importorskip("transformers", reason="needs nmrun[transformers]")
    torch.manual_seed(1)
    sizes = {"vocab_size": 31, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "gpt2")
    options = {"name": "hf_gpt2", "pretrained": str(tmp_path / "gpt2"), "dropout": 0.1}
    model = models.build(options, {"vocabulary": 31, "context": 16})
    settings = {"model": options, "dataset": {"tokenizer": "byte"}}
    run = run_of(tmp_path / "run", model, settings, exclude=["lm_head"])
    to, tokens = tmp_path / "to", torch.randint(31, (3, 16))
    lines = exported(run, to, "hf")
    assert "no tokenizer is saved" in capsys.readouterr().out
    # their network, with our masked weights put in by hand
    for block, ours_block in zip(theirs.transformer.h, model.h, strict=True):
        for layer, ours in (
            (block.attn.c_attn, ours_block.attn.c_attn), (block.attn.c_proj, ours_block.attn.c_proj),
            (block.mlp.c_fc, ours_block.mlp.c_fc), (block.mlp.c_proj, ours_block.mlp.c_proj),
        ):  # fmt: skip
            layer.weight.data.copy_(ours.weight.data.T)
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(to)(tokens).logits
        assert bits(logits) == bits(theirs(tokens).logits)
        torch.testing.assert_close(logits, model(tokens), rtol=1e-4, atol=1e-5)
    assert {line["dim"] for line in lines} == {0}
    weights = load_file(to / "model.safetensors")
    assert max(most_of_four(weights[line["name"]].T) for line in lines) == 2


def test_models_that_are_not_hugging_faces(tmp_path, capsys):
    state = {"a": sparse((4, 8), "2:4", 1)}
    layers = [{"name": "a", "pattern": "2:4", "dim": 1}]
    run = write_run(tmp_path / "run", state, layers, model={"name": "mlp"})
    line = refused(run, tmp_path / "to", capsys, "--format", "hf", status=2)
    assert "model=mlp is no network of Hugging Face" in line


@pytest.mark.parametrize("options", [(), ("model.bias=false", "model.activation=relu2")])
def test_transformers_loads_a_gpt_of_ours(options, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs nmrun[transformers]")
    model, run = a_gpt(tmp_path, *options)
    to = tmp_path / "to"
    lines = exported(run, to, "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(to).eval()
    assert type(theirs) is transformers.GPT2LMHeadModel
    tokens = torch.randint(256, (3, 24))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=0, atol=1e-5)
    weights = load_file(to / "model.safetensors")
    found = [(line["dim"], most_of_four(weights[line["name"]].T)) for line in lines]
    assert found == [(0, 2)] * 4


def a_gpt(place: Path, *options: str) -> tuple[nn.Module, Path]:
    """A GPT whose norms and biases are not those of the start, and a run that ended with it."""
    cfg = config(
        place,
        *("model=gpt_tiny", "model.layers=1", "model.width=16", "model.heads=2"),
        *("dataset=stdlib_text", "dataset.context=24", *options),
    )
    model = models.build(cfg.model.mapping(), {"vocabulary": 256, "context": 24})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model, run_of(place / "run", model, cfg.plain, exclude=["lm_head"])


@pytest.mark.parametrize("form", ["hf", "onnx"])
def test_pruned_activations_are_refused(form, tmp_path, capsys):
    for package in ("transformers", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    _, run = a_gpt(tmp_path, "model.activation=relu2", "trainer.activations=2:4")
    line = refused(run, tmp_path / "to", capsys, "--format", form, status=2)
    assert "trainer.activations=2:4: its activations are pruned" in line


# --- onnx -----------------------------------------------------------------------------------------


def onnx_session(run: Path, to: Path) -> Any:
    """onnxruntime with what the run is exported to."""
    pytest.importorskip("onnxscript", reason="needs nmrun[onnx]")
    runtime = pytest.importorskip("onnxruntime")
    exported(run, to, "onnx")
    return runtime.InferenceSession(str(to / "model.onnx"), providers=["CPUExecutionProvider"])


@pytest.mark.slow
def test_onnx_computes_the_same_with_zeros_where_tensorrt_looks(tmp_path, capsys):
    onnx = pytest.importorskip("onnx", reason="needs nmrun[onnx]")
    cfg = config(tmp_path, "model=vit_tiny", "model.layers=1", "model.heads=2", "model.width=16")
    model = models.build(cfg.model.mapping(), {"shape": (1, 8, 8), "classes": 10})
    with torch.no_grad():
        model.heads.head.weight.normal_()  # zero at the start
    run = run_of(tmp_path / "run", model, cfg.plain, exclude=["conv_proj"])
    to, images = tmp_path / "to", torch.randn(5, 1, 8, 8)
    (logits,) = onnx_session(run, to).run(["logits"], {"images": images.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(logits), model(images), rtol=1e-4, atol=1e-5)
    graph = onnx.load(to / "model.onnx").graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    lines = json.loads((to / "sparsity.json").read_text())["layers"]
    assert len(lines) == 7
    for line in lines:
        (node,) = [node for node in graph.node if line["name"] in node.input]
        weight = torch.from_numpy(stored[line["name"]].copy())
        weight = weight.T if node.op_type == "MatMul" else weight
        assert node.op_type in ("MatMul", "Gemm")
        assert most_of_four(weight) == 2
        assert line["tensorrt"] is True


@pytest.mark.slow
def test_onnxruntime_alone_is_as_accurate_by_what_the_file_says(tmp_path):
    cfg = config(
        tmp_path,
        *("recipe=ste", "model=mlp", "model.hidden=[32,32]", "optimizer.lr=0.01"),
        *("trainer.epochs=2", "trainer.limit_batches=null"),
    )
    result, to = runner.run(cfg, run_folder(cfg)), tmp_path / "to"
    session = onnx_session(run_folder(cfg), to)
    said = session.get_modelmeta().custom_metadata_map
    metadata = {key: json.loads(value) for key, value in said.items()}
    image = metadata["input"]
    # the test images as their files have them: whole numbers from 0 to 16, whatever they are scaled to
    images, labels = load_digits()[0]["test"]
    levels, raw = np.unique(images.numpy(), return_inverse=True)
    assert image["range"] == [0, len(levels) - 1] == [0, 16]
    mean, std = (np.float32(image[key])[:, None, None] for key in ("mean", "std"))
    pixels = (raw.reshape(-1, *image["shape"]).astype(np.float32) - mean) / std
    (logits,) = session.run(None, {"images": pixels})
    names = np.array(metadata["classes"])[logits.argmax(1)]
    accuracy = result["metrics"]["final"]["test/accuracy"]
    assert np.mean(names == labels.numpy().astype(str)) == pytest.approx(accuracy, abs=1e-9)
    assert accuracy > 0.5  # of ten classes
    beside = json.loads((to / "sparsity.json").read_text())
    assert metadata == {key: value for key, value in beside.items() if key != "layers"}


def test_folded_and_transposed_weights_are_found_in_the_graph():
    onnx = pytest.importorskip("onnx", reason="needs nmrun[onnx]")
    from nmrun.lab.export.onnx_graph import locate

    conv, linear = sparse((2, 8, 1, 1), "2:4", 1), sparse((6, 8), "2:4", 1)
    folded = conv * torch.tensor([-1.0, 2.0])[:, None, None, None]
    stored = onnx.numpy_helper.from_array
    tensors = [stored(folded.numpy(), "c"), stored(linear.T.numpy().copy(), "val_3")]
    nodes = [
        onnx.helper.make_node("Conv", ["x", "c"], ["y"]),
        onnx.helper.make_node("MatMul", ["z", "val_3"], ["u"]),
    ]
    graph = onnx.helper.make_graph(nodes, "g", [], [], tensors)
    layers = [SparseLayer(name, Pattern(2, 4), 1) for name in ("c", "l")]
    run = FinishedRun(Path(), {}, {"c": conv, "l": linear}, layers)
    lines = locate(graph, run, onnx.numpy_helper)
    found = [(line["name"], line["dim"], line["tensorrt"]) for line in lines]
    assert found == [("c", 1, True), ("l", 0, True)]
    assert list(graph.node[1].input) == ["z", "l"]
    kept = torch.from_numpy(onnx.numpy_helper.to_array(graph.initializer[0]).copy())
    assert folded.signbit()[folded == 0].any()
    assert not kept.signbit()[kept == 0].any()
    dense = stored(torch.ones(2, 8, 1, 1).numpy(), "c")
    graph = onnx.helper.make_graph(nodes[:1], "g", [], [], [dense])
    with pytest.raises(RunError, match="c is not 2:4 in the graph"):
        locate(graph, FinishedRun(Path(), {}, {"c": conv}, layers[:1]), onnx.numpy_helper)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("model.bias=false", "model.activation=relu2")])
def test_onnx_of_a_gpt(options, tmp_path):
    onnx = pytest.importorskip("onnx", reason="needs nmrun[onnx]")
    model, run = a_gpt(tmp_path, *options)
    to = tmp_path / "to"
    session = onnx_session(run, to)
    for shape in ((1, 1), (1, 24), (5, 7)):
        tokens = torch.randint(256, shape)
        (logits,) = session.run(["logits"], {"tokens": tokens.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(logits), model(tokens), rtol=0, atol=1e-5)
    lines = json.loads((to / "sparsity.json").read_text())["layers"]
    assert len(lines) == 4
    graph = onnx.load(to / "model.onnx").graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for line in lines:
        weight = np.moveaxis(stored[line["name"]], line["dim"], -1)
        assert most_of_four(torch.from_numpy(weight.copy())) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "small_conv"])
def test_onnx_of_small_networks(name, tmp_path):
    cfg = config(tmp_path, f"model={name}")
    model = models.build(cfg.model.mapping(), {"shape": (1, 8, 8), "classes": 10})
    run = run_of(tmp_path / "run", model, cfg.plain, exclude=["stem", "head"])
    images = torch.randn(5, 1, 8, 8)
    session = onnx_session(run, tmp_path / "to")
    (logits,) = session.run(["logits"], {"images": images.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(logits), model(images), rtol=0, atol=1e-5)


def test_onnx_needs_its_packages(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    line = refused(small(tmp_path / "run"), tmp_path / "to", capsys, "--format", "onnx", status=2)
    assert "--format onnx needs onnx: pip install '.[onnx]'" in line


def test_onnx_is_for_images_and_gpt(tmp_path, capsys):
    pytest.importorskip("onnxscript", reason="needs nmrun[onnx]")
    cfg = config(tmp_path, "model=text_encoder", "dataset=generated_text")
    model = models.build(cfg.model.mapping(), tasks.build(cfg, torch.device("cpu")).inputs)
    run = run_of(tmp_path / "run", model, cfg.plain)
    line = refused(run, tmp_path / "to", capsys, "--format", "onnx", status=2)
    assert "--format onnx takes models for images and GPT; model=text_encoder is made from" in line
