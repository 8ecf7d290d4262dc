"""nmrun.load_packed: what an export wrote, straight into packed layers; a damaged file or one of
another model changes nothing.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import one_line
from runs import write_run
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import nmrun
from nmrun.errors import ConfigError, RunError
from nmrun.fast import deploy as deploying
from nmrun.fast import packed
from nmrun.fast.cpu.kernels import bf16, blocks, int8, products
from nmrun.fast.cpu.kernels.blocks import BlockMatrix
from nmrun.fast.cpu.onednn import DenseInt8Linear
from nmrun.fast.cpu.packed_convolution import PackedConvolution
from nmrun.fast.cpu.packed_linear import Bf16Linear, BlockLinear, Int8Linear, PackedLinear
from nmrun.lab.export import cli, finished_run
from nmrun.lab.export import packed as exported_packed

PACKED = (PackedLinear, PackedConvolution)
pytestmark = pytest.mark.skipif(
    bool(products.KERNELS.obstacle()), reason="no C compiler works here"
)


def encoder() -> nn.Module:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    return nn.Sequential(nn.Linear(18, 32), nn.TransformerEncoder(layer, 1), nn.Linear(32, 5))


def images() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 10))


def exported(place: Path, model: nn.Module, **options: Any) -> tuple[Path, nn.Module]:
    """A packed export of a run that ended with this model, and the model, dense."""
    dense = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = nmrun.sparsify(model, optimizer, "ste", "2:4", 8, **{"exclude": None, **options})
    run = write_run(place / "run", model.state_dict(), handle.report()["layers"])
    assert cli.export([str(run), "--out", str(place / "to"), "--format", "packed"]) == 0
    dense.load_state_dict(model.state_dict())
    return place / "to", dense.eval()


PADDED = {"pad": True, "overrides": {".*linear1": "1:8"}}


@pytest.mark.parametrize(
    ("make", "shape", "options", "layers"),
    [(encoder, (3, 7, 18), PADDED, 7), (images, (3, 4, 6, 6), {}, 2)],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_model_computes_what_the_run_did(tmp_path, make, shape, options, layers, device):
    path, dense = exported(tmp_path, make(), **options)
    x = torch.randn(shape)
    with torch.device(device):
        empty = make()
    model = nmrun.load_packed(path, empty)
    assert model is empty
    assert sum(isinstance(module, PACKED) for module in model.modules()) == layers
    with torch.no_grad():
        torch.testing.assert_close(model(x), dense(x), rtol=1e-4, atol=1e-5)


def test_a_model_of_hugging_face_with_tied_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    torch.manual_seed(0)
    path, dense = exported(tmp_path, transformers.GPT2LMHeadModel(config), exclude="lm_head")
    model = nmrun.load_packed(path, transformers.GPT2LMHeadModel(config))
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 2 * 4
    prompt = torch.randint(97, (2, 5))
    words = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 96}
    assert torch.equal(model.generate(prompt, **words), dense.generate(prompt, **words))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_values_are_cast_as_load_state_dict_would(tmp_path, device):
    path, dense = exported(tmp_path, images())
    with torch.device(device):
        empty = images().bfloat16()
    model = nmrun.load_packed(path, empty)
    assert {t.dtype for t in model[1].state_dict().values()} == {torch.bfloat16, torch.int64}
    assert torch.equal(model[0].weight, dense[0].weight.bfloat16())  # packed ones are float32
    assert torch.equal(model[3].dense(), dense[3].weight.bfloat16())


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("there", [False, True])
def test_a_model_in_bfloat16_gets_the_products_of_its_processor(
    tmp_path, monkeypatch, there, device
):
    path, dense = exported(tmp_path, encoder())
    x = torch.randn(3, 7, 18).bfloat16()
    expected = dense.double()(x.double()).detach()
    if not there:
        monkeypatch.setattr(bf16, "KERNELS", replace(bf16.KERNELS, sources=("nm_scratch",)))
    elif bf16.KERNELS.obstacle():
        pytest.skip("no AVX-512 with BF16")
    with torch.device(device):
        empty = encoder().bfloat16()
    model = nmrun.load_packed(path, empty)
    kinds = [type(m) for m in model.modules() if isinstance(m, PackedLinear)]
    assert kinds == [Bf16Linear if there else PackedLinear] * len(kinds)
    assert len(kinds) >= 5
    with torch.no_grad():
        output = model(x)
    assert float((output.double() - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("amx", [False, True])
def test_rows_that_share_their_columns_are_blocks_where_amx_is(tmp_path, monkeypatch, amx):
    if bf16.KERNELS.obstacle():
        pytest.skip("no AVX-512 with BF16")

    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(40, 32), nn.Linear(32, 16))

    torch.manual_seed(1)
    path, dense = exported(tmp_path, model(), overrides={"0|1": "16:4:8"})
    multiply, x = BlockMatrix.multiply, torch.randn(5, 40).bfloat16()
    monkeypatch.setattr(blocks, "tiles_obstacle", lambda: "" if amx else "no AMX")
    monkeypatch.setattr(BlockMatrix, "multiply", lambda *args: multiply(*args, by_tiles=False))
    loaded = nmrun.load_packed(path, model().bfloat16())
    assert [type(m) for m in loaded] == [BlockLinear if amx else Bf16Linear] * 2
    assert all(torch.equal(loaded[i].dense(), dense[i].weight.bfloat16()) for i in (0, 1))
    with torch.no_grad():
        expected = dense.double()(x.double())
        assert float((loaded(x).double() - expected).norm() / expected.norm()) < 0.02


def changed(path: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> None:
    """Write a file anew whose hashes fit."""
    file = path / packed.FILE
    with safe_open(file, "pt") as opened:
        header = json.loads(opened.metadata()["packed"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(tensors, header)
    sealed(file, tensors, header)


def sealed(file: Path, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    hashes = {name: packed.sha256_of(tensor) for name, tensor in tensors.items()}
    text = json.dumps(header | {"sha256": hashes})
    digest = hashlib.sha256(text.encode()).hexdigest()
    save_file(tensors, file, {"packed": text, "sha256": digest})


def _short(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    tensors["3.weight.values"] = tensors["3.weight.values"][:-1].clone()


def _twice(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    header["layers"].append(header["layers"][0])


def _beside(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    tensors["3.weight"] = torch.zeros(10, 128)


def _line(**changes: Any) -> Callable[[Path], None]:
    """A change of what the header says of one layer."""

    def forge(_: dict[str, Tensor], header: dict[str, Any]) -> None:
        next(line for line in header["layers"] if line["name"] == "3.weight").update(changes)

    return lambda file: changed(file.parent, forge)


def _renamed(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    tensors["4.bias"] = tensors.pop("3.bias")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_scales_are_float32(dtype, tmp_path):
    path, _ = exported(tmp_path, images())

    def forge(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        tensors["3.weight.values"] = tensors["3.weight.values"].to(torch.int8)
        tensors["3.weight.scales"] = torch.ones(10, dtype=dtype)

    changed(path, forge)
    with pytest.raises(ValueError, match="other scales"):
        packed.load(path)


def test_a_small_file_of_huge_weights_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "MOST_BYTES", 2**20)
    pattern, shape = packed.Pattern(1, 9999), [70, 9999]
    weight = torch.zeros(shape)
    weight[:, 7] = 1.0
    values, places = packed.pack(weight, pattern, 1)
    line = {"name": "w", "pattern": str(pattern), "dim": 1, "shape": shape}
    file = tmp_path / packed.FILE
    tensors = {"w.values": values, "w.places": places}
    sealed(file, tensors, {"version": 1, "layers": [line]})
    assert file.stat().st_size < 2**11
    with pytest.raises(ValueError, match="cannot be unpacked"):
        packed.load(file)
    monkeypatch.setattr(packed, "MOST_BYTES", 2**22)  # no fault of the pattern
    assert torch.equal(packed.load(file)["w"], weight)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-9]), "cannot be read"),
        (lambda file: file.write_bytes(file.read_bytes()[:-4] + b"\x01\x02\x03\x04"), "SHA-256 of"),
        (lambda file: file.unlink(), "cannot be read"),
        (lambda file: changed(file.parent, _short), "3.weight.values is"),
        (_line(shape=[20, 64]), "another model: 3.weight is [20, 64] there, [10, 128] here"),
        (lambda file: changed(file.parent, _renamed), "another model: 3.bias is missing there, [10] here"),
        (lambda file: changed(file.parent, _twice), "it has 0.weight twice"),
        (lambda file: changed(file.parent, _beside), "it has 3.weight twice"),
        *((_line(shape=shape), "3.weight has groups along 1 of")
          for shape in ([-10, 128], [10, -128], [0, 128], [10], [10.0, 128], [True, 128], "10", {}, None)),
        *((_line(dim=dim), "3.weight has groups along") for dim in (-1, 2, 1.0, True, "1", None)),
        *((_line(name=name), "cannot be unpacked") for name in (7, None, [], "0.weight", "4.weight")),
        *((_line(pattern=pattern), "cannot be unpacked")
          for pattern in ("4:2", "", None, 5, [2, 4], "2:999999999", "2:8")),
        (_line(pattern="2:9999"), "3.weight has groups of 9999 along 128 weights"),
    ],
)  # fmt: skip
def test_a_damaged_file_changes_nothing(tmp_path, damage, message):
    path, _ = exported(tmp_path, images())
    damage(path / packed.FILE)
    model = images()
    before, layers = copy.deepcopy(model.state_dict()), list(model)
    if "another model" not in message:
        with pytest.raises(ValueError, match=re.escape(message)):
            packed.load(path)
    with one_line(ConfigError, re.escape(message)):
        nmrun.load_packed(path, model)
    assert list(model) == layers
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_another_model_and_no_compiler(tmp_path, request):
    path, _ = exported(tmp_path, images())
    with pytest.raises(ConfigError, match=r"the file is of another model: "):
        nmrun.load_packed(path, encoder())
    with pytest.raises(ConfigError, match=r"^OrderedDict is no module: give load_packed the model"):
        nmrun.load_packed(path, images().state_dict())
    request.getfixturevalue("no_compiler")
    with pytest.raises(ConfigError, match="packed layers: no C compiler"):
        nmrun.load_packed(path, images())


# --- int8 -----------------------------------------------------------------------------------------

needs_int8 = pytest.mark.skipif(bool(int8.KERNELS.obstacle()), reason=int8.KERNELS.obstacle())


@needs_int8
@pytest.mark.slow
@pytest.mark.parametrize(
    ("faster", "kind"), [("int8", Int8Linear), ("dense int8", DenseInt8Linear)]
)
def test_a_run_in_int8(faster, kind, tmp_path, capsys, monkeypatch):
    """Exported and loaded: the metric that the export told is the loaded model's own, and each layer
    is the one that was the faster when it was written.
    """
    times = lambda arms, *_: {name: 1.0 - (name == faster) for name in arms}  # noqa: E731
    monkeypatch.setattr(deploying, "milliseconds", times)
    words = ["dataset=digits", "model=mlp", "recipe=ste", "sparsity=1:4", "trainer.epochs=2"]
    result = nmrun.run(words, output_dir=str(tmp_path / "runs"))
    plain, low = tmp_path / "plain", tmp_path / "low"
    run = str(result.folder)
    assert cli.export([run, "--out", str(plain), "--format", "packed"]) == 0
    capsys.readouterr()
    words = [run, "--out", str(low), "--format", "packed", "--precision", "int8"]
    assert cli.export(words) == 0
    first, second, *more = capsys.readouterr().out.splitlines()
    by = " (1 by dense products, which are faster)" if faster == "dense int8" else ""
    assert f"1:4 holds in 1 layers, 1 of them in int8{by}, " in first
    assert [line.layer for line in packed.read(low)[1]] == [faster]
    assert not more
    exact, rounded = packed.load(plain), packed.load(low)
    assert exact.keys() == rounded.keys()
    changed = [name for name in exact if not torch.equal(exact[name], rounded[name])]
    assert len(changed) == 1
    (name,) = changed
    step = exact[name].abs().amax(1, True) / 127
    assert bool(((exact[name] - rounded[name]).abs() <= 0.501 * step).all())
    assert (low / packed.FILE).stat().st_size < (plain / packed.FILE).stat().st_size
    model = nmrun.load_packed(low, result.model())
    layer = model.get_submodule(name.removesuffix(".weight"))
    assert type(layer) is kind
    assert torch.equal(layer.dense(), rounded[name])
    run_of_file = finished_run.read(Path(run))
    _, task = finished_run.network(run_of_file)
    after = task.evaluate(model, "val")[task.metric]
    before = result.metrics[f"eval/{task.metric}"]
    assert second == f"  eval/{task.metric}: {before:.6g} before, {after:.6g} in int8"


@needs_int8
def test_parts_of_attention_and_conv1d_come_from_int8(tmp_path):
    """A file made by hand: rows and scales of a part are its own."""
    place, dense = exported(tmp_path, encoder(), pad=True)
    tensors, lines = packed.read(place)
    header = {"version": packed.VERSION_INT8, "layers": []}
    for line in lines:
        values = tensors[f"{line.name}.values"]
        rows = values.view(line.shape[0], -1)
        scales = rows.abs().amax(1) / 127
        low = (rows / scales[:, None]).round().to(torch.int8)
        tensors[f"{line.name}.values"] = low.view_as(values)
        tensors[f"{line.name}.scales"] = scales
        about = {"name": line.name, "pattern": str(line.pattern), "dim": 1, "shape": line.shape}
        header["layers"].append(about)
    file = tmp_path / "low.safetensors"
    sealed(file, tensors, header)
    dense.load_state_dict(packed.load(file))
    model, x = nmrun.load_packed(file, encoder()), torch.randn(3, 7, 18)
    assert sum(isinstance(m, Int8Linear) for m in model.modules()) == 7
    with torch.no_grad():
        outputs, expected = model(x), dense(x)
    assert float((outputs - expected).norm() / expected.norm()) < 0.03
    header["layers"][0]["layer"] = "int4"
    sealed(file, tensors, header)
    with pytest.raises(ConfigError, match="none of int8, dense int8"):
        nmrun.load_packed(file, encoder())
    header["layers"][0]["layer"] = "dense int8"
    sealed(file, tensors, header)
    loaded = nmrun.load_packed(file, encoder())
    assert sum(isinstance(m, DenseInt8Linear) for m in loaded.modules()) == 1
    with torch.no_grad():
        assert float((loaded(x) - expected).norm() / expected.norm()) < 0.03
    del tensors[f"{lines[0].name}.scales"]
    sealed(file, tensors, header)
    with pytest.raises(ConfigError, match="int8 values with other scales"):
        nmrun.load_packed(file, encoder())


def test_int8_without_its_products_is_one_line(tmp_path, monkeypatch):
    exported(tmp_path, encoder(), pad=True)
    monkeypatch.setattr(int8, "KERNELS", replace(int8.KERNELS, sources=("nm_scratch",)))
    words = [str(tmp_path / "run"), "--out", str(tmp_path / "low"), "--format", "packed"]
    with pytest.raises(RunError, match=r"^--precision int8: this processor has no AVX-512"):
        cli.export([*words, "--precision", "int8"])
    assert not (tmp_path / "low").exists()


@pytest.mark.slow
def test_the_metric_before_int8_is_the_runs_own_with_its_pruned_activations(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(type(int8.KERNELS), "obstacle", lambda self: "")
    words = "dataset=stdlib_text model=gpt_tiny model.activation=relu2 trainer.activations=1:8"
    words += " recipe=ste sparsity=2:4 trainer.limit_batches=4 trainer.epochs=1"
    words += " trainer.acceleration=off trainer.threads=1 track=local"
    result = nmrun.run(words, output_dir=str(tmp_path / "runs"))
    monkeypatch.setattr(exported_packed, "try_int8", lambda *_: None)  # all stay as they are
    capsys.readouterr()
    to = [str(result.folder), "--out", str(tmp_path / "low"), "--format", "packed"]
    assert cli.export([*to, "--precision", "int8"]) == 0
    told = re.search(r"eval/perplexity: (\S+) before", capsys.readouterr().out)
    assert float(told[1]) == pytest.approx(result.metrics["eval/perplexity"], rel=1e-5)
