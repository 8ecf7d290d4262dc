"""What is done to a model in the middle of a training: exports, adapters, late memory, FSDP1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from errors import one_line
from torch import nn
from torch.nn.utils import parametrizations
from training import attach, batch, everything, net, start, train

import nmrun
from nmrun.errors import ConfigError, RunError

ONNX = pytest.param("onnx", marks=pytest.mark.minutes)


@pytest.mark.parametrize("how", ["export", "trace", ONNX])
def test_a_live_model_is_exported_and_trains_on(how, tmp_path):
    (model, optimizer, handle), plain = start("sr_ste"), start("sr_ste")
    train(model, optimizer, range(3))
    train(*plain[:2], range(6))
    x = batch(3)
    expected = model(x).detach()
    if how == "export":
        module = torch.export.export(model, (x,)).module()
        nmrun.sparsity.check_nm(module.state_dict()["0.weight"], "2:4")
        actual = module(x)
    elif how == "trace":
        actual = torch.jit.trace(model, x)(x)
    else:
        onnxruntime = pytest.importorskip("onnxruntime", reason="needs pip install '.[onnx]'")
        torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=True)
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
        name = session.get_inputs()[0].name
        actual = torch.from_numpy(session.run(None, {name: x.numpy()})[0])
    torch.testing.assert_close(actual, expected)
    train(model, optimizer, range(3, 6))
    assert everything(model, optimizer, handle) == everything(*plain)


def test_adapters_of_peft_are_refused_with_the_reason():
    """The base is frozen, and an N:M adapter would not make the merged weight N:M."""
    peft = pytest.importorskip("peft", reason="needs peft: pip install '.[integrations]'")
    model = peft.get_peft_model(net(), peft.LoraConfig(r=4, target_modules=["0", "2"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(ConfigError, match=r"no weight of this model .*and 2 more: frozen") as e:
        nmrun.sparsify(model, optimizer, "sr_ste", "2:4", exclude=None)
    # each reason once, however many weights it has
    assert str(e.value).count("frozen") == str(e.value).count("an adapter") == 1


def test_peft_on_a_finished_model_leaves_its_base_nm():
    peft = pytest.importorskip("peft", reason="needs peft: pip install '.[integrations]'")
    model, optimizer, handle = start("sr_ste")
    train(model, optimizer, range(3))
    handle.finalize()
    before = model[0].weight.detach().clone()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0", "2"]))
    other = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    train(adapted, other, range(2))
    base = adapted.base_model.model[0].base_layer.weight
    assert torch.equal(base, before)


@pytest.mark.parametrize("recipe", ["sr_ste", "s_ste", "asp"])
def test_memory_that_comes_after_sparsify_is_an_error(recipe):
    with torch.device("meta"):
        model = net()
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.02)
    handle = attach(model, optimizer, recipe)
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p)
    for step in range(2):
        with pytest.raises(RunError, match="to_empty or fully_shard after sparsify"):
            train(model, optimizer, [step])
    with pytest.raises(RunError, match="to_empty or fully_shard after sparsify"):
        handle.finalize()


def test_weights_that_are_assigned_after_sparsify_are_an_error_in_the_first_step():
    """The optimizer has the parameters from before, and would train nothing."""
    model, optimizer, _ = start("sr_ste")
    model.load_state_dict(net(3).state_dict(), assign=True)
    with pytest.raises(RunError, match=r"0\.weight is no longer .* load_state_dict\(assign=True\)"):
        train(model, optimizer, [0])


def test_memory_that_comes_before_is_fine():
    with torch.device("meta"):
        model = net()
    model.to_empty(device="cpu").load_state_dict(net().state_dict())
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.02, fused=False)
    handle, plain = attach(model, optimizer, "s_ste"), start("s_ste")
    for trained, other in ((model, optimizer), plain[:2]):
        train(trained, other, range(4))
    assert everything(model, optimizer, handle) == everything(*plain)


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_a_norm_put_on_later_is_an_error(norm):
    model, optimizer, handle = start("sr_ste")
    train(model, optimizer, range(2))
    norm(model[0])
    train(model, optimizer, range(2, 4))
    with pytest.raises(RunError, match="no longer the parameter that was made sparse"):
        handle.finalize()


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("original", [True, False])
def test_fsdp1_is_refused(original, one_process):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=original)
    optimizer = torch.optim.AdamW(model.parameters())
    with one_line(ConfigError, r"flattens the weights: use fully_shard \(FSDP2\)"):
        nmrun.sparsify(model, optimizer, "sr_ste", "2:4", exclude=None)


def test_deepspeed_is_refused():
    """Its optimizers are no torch optimizers, also inside accelerate's wrapper."""
    stage = type(
        "DeepSpeedZeroOptimizer", (), {"__module__": "deepspeed.runtime.zero.stage_1_and_2"}
    )()
    wrapper = type("DeepSpeedOptimizerWrapper", (), {"__module__": "accelerate.utils.deepspeed"})()
    wrapper.optimizer = stage
    for optimizer in (stage, wrapper):
        with one_line(ConfigError, r"flat copies of the weights, .* use DDP"):
            nmrun.sparsify(net(), optimizer, "sr_ste", "2:4", exclude=None)
