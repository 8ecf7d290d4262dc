"""2:4 products in training: which path a layer gets, and that training is the same with it. Paths
are played on the CPU.
"""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from played_gpu import COMPRESSED, MASKED, Machine, current_gpus, normal, play, two_values
from runs import config
from torch import Tensor, nn

import nmrun
from nmrun.errors import ConfigError
from nmrun.fast import acceleration, measurement
from nmrun.fast.acceleration import accelerate
from nmrun.fast.gpu import probe, semi_structured
from nmrun.fast.gpu.linear import SemiStructuredProducts
from nmrun.fast.measurement import Times
from nmrun.lab.config.identity import identity
from nmrun.lab.train import build
from nmrun.lab.train.flops import densities

CALLS = itertools.count()


def wrong(x: Tensor, parts: list[Tensor], bias: Tensor | None) -> Tensor:
    return COMPRESSED.multiply(x, parts, bias) * 1.05


def changing(x: Tensor, parts: list[Tensor], bias: Tensor | None) -> Tensor:
    return F.linear(x, parts[0], bias) * (1 + (next(CALLS) % 3 == 2) / 128)


def refusing(weight: Tensor) -> Any:
    raise RuntimeError("not on this machine\nand where")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return play(monkeypatch.setattr, tmp_path)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    ).bfloat16()


def sparse(
    model: nn.Module, recipe: str = "ste", **options: Any
) -> tuple[torch.optim.Optimizer, nmrun.step.handle.Handle]:
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"pattern": "2:4", "total_steps": 8, **options}
    return optimizer, nmrun.sparsify(model, optimizer, recipe, **{"exclude": None, **options})


def passing(model: nn.Module, tokens: int = 16) -> Any:
    x = normal(tokens, 32).to(next(model.parameters()).dtype)
    return lambda: model(x)


# --- which path -----------------------------------------------------------------------------------


PACKED = ["compressed", "compressed", None]  # 10 outputs are not multiples of 16


@pytest.mark.parametrize(
    ("machine_has", "options", "paths", "reason"),
    [
        # forward 1, input gradient stays dense 3, packing 0: 4 against 6
        ({}, {}, PACKED, "dense 6.000 ms, compressed 4.000 ms (1.50x)"),
        ({"fast": 4.0}, {}, [None] * 3, "dense 6.000 ms, compressed 7.000 ms (0.86x)"),
        ({"fast": 4.0}, {"mode": "force"}, PACKED, "compressed 7.000 ms (0.86x)"),
        # packing is shared by the micro-batches of a step: 1 + 3 + 5, and 1 + 3 + 5/4
        ({"pack": 5.0}, {}, [None] * 3, "compressed 9.000 ms (0.67x)"),
        ({"pack": 5.0}, {"accumulate": 4}, PACKED, "dense 6.000 ms, compressed 5.250 ms (1.14x)"),
    ],
)
def test_the_fastest_right_path_is_taken_where_it_beats_dense(
    machine_has: dict[str, float], options: Any, paths: list[Any], reason: str, machine: Machine
) -> None:
    vars(machine).update(machine_has)
    _, handle = sparse(model := mlp())
    choices = accelerate(handle, passing(model), **options)
    names = ("0.weight", "2.weight", "4.weight")
    assert {c.name: c.path for c in choices} == dict(zip(names, paths, strict=True))
    assert "10 outputs are not multiples of 16" in choices[2].reason
    assert reason in choices[0].reason
    packed = [getattr(weight.layer, "packed", None) for weight in handle.sparse]
    assert [isinstance(p, SemiStructuredProducts) for p in packed] == list(map(bool, paths))
    lines = measurement.lines(choices)
    if paths == PACKED:
        about = "  compressed: 0.weight, 32 to 64, 16 tokens, bfloat16: dense 6.000 ms, compressed "
        assert lines[0] == "N:M products in 2 of 3 sparse layers"
        assert lines[1].startswith(about)
    else:
        assert lines[0] == "masks only: no N:M product is faster than dense"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (semi_structured.Path(COMPRESSED.pack, wrong), "WRONG results"),
        (semi_structured.Path(refusing, wrong), "not on this machine"),
        (semi_structured.Path(MASKED.pack, changing), "results CHANGE from call to call"),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "force"])
def test_a_path_that_is_not_right_is_never_taken(
    path: semi_structured.Path, message: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    _, handle = sparse(model)
    monkeypatch.setattr(semi_structured, "PATHS", {"broken": path, "compressed": COMPRESSED})
    assert [c.path for c in accelerate(handle, passing(model), mode)] == PACKED
    monkeypatch.setattr(semi_structured, "PATHS", {"broken": path})
    if mode == "auto":
        choices = accelerate(handle, passing(model))
        assert [c.path for c in choices] == [None] * 3
        assert f"broken: {message}" in choices[1].reason
        return
    with pytest.raises(ConfigError, match=f"no layer can be accelerated .*broken: {message}"):
        accelerate(handle, passing(model), mode)


def test_what_no_memory_was_free_for_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    about = probe.SemiStructuredShape(32, 64, 16, torch.bfloat16), torch.device("cpu")

    def full(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    path = semi_structured.Path(COMPRESSED.pack, full)
    with monkeypatch.context() as for_now:
        for_now.setitem(semi_structured.PATHS, "compressed", path)
        times = probe.measured(*about)
    assert times["compressed"].wrong == "not enough memory is free to try it"
    assert not probe.measured(*about)["compressed"].wrong


def test_a_path_by_name(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where another is faster, but never where it is wrong."""
    _, handle = sparse(model := mlp())
    paths = {"packed": COMPRESSED, "cusparselt": semi_structured.Path(COMPRESSED.pack, wrong)}
    monkeypatch.setattr(semi_structured, "PATHS", paths)
    choices = accelerate(handle, passing(model), "packed")
    assert [c.path for c in choices] == ["packed", "packed", None]
    with pytest.raises(ConfigError, match=r"acceleration=cusparselt: no layer .*WRONG results"):
        accelerate(handle, passing(model), "cusparselt")


@pytest.mark.parametrize("counts", [(4, 16), (16, 4)])
def test_a_layer_is_timed_at_its_largest_input(counts: tuple[int, int]) -> None:
    """It sees some of its inputs a second time, or the first."""
    _, handle = sparse(model := mlp())
    x = normal(16, 32).bfloat16()
    choice = accelerate(handle, lambda: [model(x[:count]) for count in counts])[0]
    assert str(choice.shape) == "32 to 64, 16 tokens, bfloat16"


def test_dense_steps_at_the_beginning_are_exact() -> None:
    """From the first one on: neither weights nor the weights' gradients are pruned."""
    model = mlp()
    plain = copy.deepcopy(model)
    _, handle = sparse(model, "asp", prune_at=0.5, mvue="2:4")
    assert accelerate(handle, passing(model))[0].path == "compressed"
    x, results = normal(16, 32).bfloat16(), []
    for each in (model, plain):
        (y := each(x)).float().square().sum().backward()
        results.append((y, each[0].weight.grad))
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


def test_measured_once_a_shape_and_remembered(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    _, handle = sparse(model)
    accelerate(handle, passing(model))
    measured = machine.timed
    assert measured > 0
    assert accelerate(handle, passing(model))[0].path == "compressed"
    assert machine.timed == measured
    accelerate(handle, passing(model, tokens=48))
    assert machine.timed == 2 * measured
    known = json.loads((tmp_path / "probe24.json").read_text())
    ((name, shapes),) = known.items()
    assert name.startswith("Test GPU, cuSPARSELt ")
    assert f"torch {torch.__version__}, " in name
    assert len(shapes) == 4
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Another GPU")
    accelerate(handle, passing(model))
    assert machine.timed == 3 * measured
    (tmp_path / "probe24.json").write_text('{"Another GPU": [')
    assert accelerate(handle, passing(model))[0].path == "compressed"
    assert machine.timed == 4 * measured
    assert [file.name for file in tmp_path.iterdir()] == ["probe24.json"]


def test_a_run_that_goes_on_elsewhere_takes_no_algorithms_of_another_gpu(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are numbers, which mean something else there, or are wrong."""
    model = mlp()
    _, handle = sparse(model)
    choices = accelerate(handle, passing(model))
    known = {str(choice.shape): choice.times for choice in choices if choice.shape}
    known = measurement.from_data(json.loads(json.dumps(measurement.as_data(known))))
    measured = machine.timed
    accelerate(handle, passing(model), known=known)
    assert machine.timed == measured
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Another GPU")
    accelerate(handle, passing(model), known=known)
    assert machine.timed == 2 * measured


def test_times_are_of_one_version_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    monkeypatch.setattr(probe, "version", lambda files: hashed.extend(f.name for f in files))
    model = mlp()
    accelerate(sparse(model)[1], passing(model))
    assert {"probe.py", "triton_compression.py", "triton_groups.py"} <= {*hashed}


def test_a_layer_is_timed_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which need not be torch's current one, by whose stream events go."""
    current, seen = current_gpus(monkeypatch.setattr), []

    def measure(*about: Any) -> dict[str, Times]:
        seen.extend(current)
        return {"dense": Times(forward=1.0)}

    second = torch.device("cuda", 1)
    monkeypatch.setattr(probe, "measure", measure)
    probe.measured(probe.SemiStructuredShape(32, 64, 16, torch.bfloat16), second)
    assert seen == [second]
    assert not current


def test_each_layer_is_told_before_it_is_timed(machine: Machine) -> None:
    _, handle = sparse(model := mlp())
    messages: list[tuple[list[int], int]] = []

    def tell(text: str) -> None:
        messages.append(([int(word) for word in text.split() if word.isdigit()], machine.timed))

    accelerate(handle, passing(model), tell=tell)
    numbers, timed = zip(*messages, strict=True)
    total = len(messages)
    assert total >= 2
    assert [number[0] for number in numbers] == list(range(1, total + 1))
    assert {number[1] for number in numbers} == {len(handle.sparse)}
    assert timed[0] == 0 < timed[-1]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 32, 1)
        self.linear, self.turned = nn.Linear(32, 32), nn.Linear(32, 32)
        self.unused = nn.Linear(32, 32)
        self.narrow = nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.turned(self.linear(self.conv(x).mean((2, 3)))))


def test_why_layers_stay_dense() -> None:
    model = Mixed()
    x = torch.randn(4, 16, 3, 3)
    _, handle = sparse(model, overrides={"linear": "4:8"}, dims={"turned.weight": 0})
    reasons = {c.name: c.reason for c in accelerate(handle, lambda: model(x))}
    assert reasons == {
        "conv.weight": "torch has no sparse convolution",
        "linear.weight": "4:8 weights do not fit into 2:4",
        "turned.weight": "its groups do not run along its inputs (dims)",
        "unused.weight": "it is not called as a layer",
        "narrow.weight": "float32: 2:4 products are of bfloat16 or float16 (trainer.precision)",
    }
    with torch.autocast("cpu", torch.bfloat16):
        reasons = {c.name: c.reason for c in accelerate(handle, lambda: model(x))}
    assert reasons["narrow.weight"] == "32 inputs and 24 outputs are not multiples of 16"
    known = accelerate(handle, lambda: pytest.fail("no pass is needed"), why_not="it rains")
    assert measurement.lines(known) == ["masks only, nothing is accelerated: it rains"]
    assert accelerate(handle, lambda: pytest.fail("nor here"), "off") == []
    with pytest.raises(ConfigError, match="acceleration=fast: it takes one of auto, off, force, "):
        accelerate(handle, passing(model), "fast")
    with pytest.raises(ConfigError, match="whole_gradients=no: it takes true or false"):
        accelerate(handle, passing(model), whole_gradients="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", ["1:2", "1:3", "1:4", "2:8", "1:16"])
def test_sparser_patterns_whose_weights_are_2_of_4(pattern: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 32)).bfloat16()
    _, handle = sparse(model, pattern=pattern)
    x = normal(16, 48).bfloat16()
    assert accelerate(handle, lambda: model(x))[0].path == "compressed"
    assert torch.equal(model(x), F.linear(x, handle.sparse[0].weight, model[0].bias))


def test_machines_without_sparse_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert acceleration.obstacle(torch.device("mps")) == "nothing for mps"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert acceleration.obstacle(torch.device("cuda")) == "this GPU has no sparse tensor cores"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert acceleration.obstacle(torch.device("cuda")) == ""


# --- training -------------------------------------------------------------------------------------

RECIPES: dict[str, dict[str, Any]] = {
    "ste": {}, "sr_ste": {"decay": 1e-2}, "s_ste": {}, "asp": {}, "step": {"switch": 0.5}, "t_sr_ste": {"interval": 3}, "bi_mask": {"interval": 3},
    "mdgf_linear": {"dense": 0.25, "final": 0.25}, "sdgf_stepwise": {"dense": 0.25, "final": 0.25}, "lbc": {},
}  # fmt: skip


def train(
    model: nn.Module, optimizer: Any, handle: Any, steps: int = 8, accumulate: int = 2
) -> tuple[list[float], list[bool]]:
    """The losses, and for each step whether its weights were 2:4."""
    losses, were = [], []
    for step in range(steps):
        were.append(handle.is_sparse)
        for part in range(accumulate):
            x = normal(16, 32, seed=10 * step + part, dtype=torch.float32)
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), x.abs().argmax(1) % 10)
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [*were, handle.is_sparse]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_as_it_does_with_masks_alone(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The played path computes what the dense product does, so nothing but the order of sums may
    differ; the packed weight is written once per optimizer step at most, however many micro-batches
    there are, and used in every pass once weights are 2:4."""
    passes: list[str] = []
    writes: list[int] = []
    played = semi_structured.Path(
        COMPRESSED.pack, lambda *args: (passes.append(""), COMPRESSED.multiply(*args))[1]
    )
    monkeypatch.setattr(semi_structured, "PATHS", {"compressed": played})
    runs, wrote = {}, SemiStructuredProducts.write
    for mode in ("off", "auto"):
        model = mlp().float()
        optimizer, handle = sparse(model, recipe, exclude="4", **RECIPES[recipe])
        monkeypatch.setattr(
            SemiStructuredProducts,
            "write",
            lambda self, *args, h=handle: (writes.append(h.recipe.step), wrote(self, *args))[1],
        )
        with torch.autocast("cpu", torch.bfloat16):
            choices = accelerate(handle, passing(model), mode)
        assert [c.path for c in choices] == (["compressed"] * 2 if mode == "auto" else [])
        passes.clear(), writes.clear()
        losses, were = train(model, optimizer, handle)
        counted = len(passes), list(writes)
        handle.finalize()
        runs[mode] = losses, [p.detach().clone() for p in model.parameters()]
    torch.testing.assert_close(runs["auto"], runs["off"], rtol=1e-3, atol=1e-3)
    input_gradients = recipe == "t_sr_ste"  # of the second layer: nobody asks for the first one's
    assert any(were)
    assert counted[0] == sum(were[:-1]) * 2 * (2 + input_gradients)
    sparse_steps = [step for step in range(1, len(were)) if were[step]]
    assert counted[1] == [step for step in sparse_steps for _ in range(2)]
    assert all("forward" not in vars(layer) for layer in model)


def test_transposable_masks_make_the_input_gradient_sparse_and_others_do_not(
    machine: Machine,
) -> None:
    for recipe, options, both in (
        ("t_sr_ste", {}, True),
        ("bi_mask", {}, False),
        ("ste", {}, False),
        ("ste", {"input_gradient": "double_prune"}, True),
        ("sr_ste", {"input_gradient": "transposable"}, True),
    ):
        model = mlp()
        _, handle = sparse(model, recipe, **options)
        choice = accelerate(handle, passing(model))[0]
        assert choice.shape is not None
        assert choice.shape.both is both
        assert choice.reason.startswith(f"dense 6.000 ms, compressed {2 if both else 4}.000 ms")


def test_evaluation_reads_the_masked_weights_and_checkpoints_know_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = mlp()
    optimizer, handle = sparse(model)
    keys = list(model.state_dict())
    x = normal(16, 32).bfloat16()
    accelerate(handle, passing(model))
    assert list(model.state_dict()) == keys
    forward = SemiStructuredProducts.forward
    monkeypatch.setattr(
        SemiStructuredProducts, "forward", lambda *args: pytest.fail("packed weights in evaluation")
    )
    model.eval()
    h = F.relu(F.linear(x, handle.sparse[0].weight, model[0].bias))
    assert torch.equal(model[:2](x), h)
    with pytest.raises(pytest.fail.Exception):
        model.train()(x)
    monkeypatch.setattr(SemiStructuredProducts, "forward", forward)
    twin = copy.deepcopy(model)
    handle.finalize(twin)
    torch.testing.assert_close(twin(x), model(x))
    optimizer.step()
    handle.finalize()
    assert list(model.state_dict()) == list(mlp().state_dict())
    assert torch.equal(model[0](x), F.linear(x, model[0].weight, model[0].bias))


@pytest.mark.parametrize(
    "options", [{}, {"input_gradient": "double_prune"}], ids=["packed", "pruned again"]
)
def test_weights_loaded_or_changed_by_hand_are_used_at_once(
    options: dict[str, Any],
) -> None:
    model = mlp()
    optimizer, handle = sparse(model, **options)
    accelerate(handle, passing(model))
    x, dz = normal(16, 32).bfloat16().requires_grad_(), normal(16, 64, seed=1).bfloat16()
    before, weight = model(x), handle.sparse[0]
    for change in (
        lambda: weight.parameter.neg_(),
        lambda: model.load_state_dict({k: 3 * v for k, v in mlp().state_dict().items()}),
    ):
        with torch.no_grad():
            change()
        assert not torch.allclose(model(x), before)
        z = model[0](x)
        torch.testing.assert_close(z, F.linear(x, model[0].weight, model[0].bias))
        other = model[0].weight
        if options and weight.holds():  # an N:M weight is pruned again at once
            other = nmrun.sparsity.hard_threshold(other.detach(), "2:4", 0)
        torch.testing.assert_close(torch.autograd.grad(z, x, dz)[0], dz @ other)
        written = model[0].weight.detach().clone()
        model(x).float().square().mean().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
        optimizer.zero_grad()
        used = nmrun.sparsity.hard_threshold(written, "2:4")
        assert torch.equal(model[0].weight, used)
        torch.testing.assert_close(model[0](x), F.linear(x, used, model[0].bias))
        packed = zip(weight.layer.packed.buffers(), two_values(used), strict=False)
        assert all(torch.equal(part, new) for part, new in packed)


@pytest.mark.parametrize(
    "options", [{}, {"input_gradient": "double_prune"}], ids=["packed", "pruned again"]
)
def test_functional_call_computes_with_the_weights_that_it_is_given(
    options: dict[str, Any],
) -> None:
    """As of another model; and torch.func differentiates by them."""
    model, plain = mlp(), mlp()
    _, handle = sparse(model, **options)
    accelerate(handle, passing(model))
    given = {name: 3 * value for name, value in plain.state_dict().items()}
    plain.load_state_dict(given)
    x = normal(16, 32).bfloat16().requires_grad_()
    z, expected = torch.func.functional_call(model, given, (x,)), plain(x)
    torch.testing.assert_close(z, expected)
    dz = torch.ones_like(z)
    dx, other_dx = torch.autograd.grad(z, x, dz), torch.autograd.grad(expected, x, dz)
    torch.testing.assert_close(dx, other_dx)

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (x.detach(),)).float().square().mean()

    grads = torch.func.grad(loss)(given)
    plain(x).float().square().mean().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


def test_conv1d_of_hugging_face_stores_the_transpose() -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nf = 32
            self.weight, self.bias = nn.Parameter(normal(48, 32)), nn.Parameter(normal(32, seed=1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x, self.weight)

    model = nn.Sequential(Conv1D()).bfloat16()
    _, handle = sparse(model)
    x = normal(16, 48).bfloat16().requires_grad_()
    (choice,) = accelerate(handle, lambda: model(x))
    assert choice.shape is not None
    assert (choice.path, choice.shape.rows, choice.shape.columns) == ("compressed", 32, 48)
    used = handle.sparse[0].weight.clone().requires_grad_()
    z, expected = model(x), torch.addmm(model[0].bias, x, used)
    torch.testing.assert_close(z, expected)
    dz = normal(16, 32, seed=7).bfloat16()
    grads = torch.autograd.grad(z, (x, handle.sparse[0].parameter), dz)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (x, used), dz))


@pytest.mark.parametrize("recipe", ["ste", "step", "mdgf_linear"])
def test_compiled_as_one_graph(recipe: str) -> None:
    """Through a change of phase, and with new weights packed after each step."""
    results = []
    for compiled in (False, True):
        model = mlp().float()
        optimizer, handle = sparse(model, recipe, exclude="4", total_steps=16, **RECIPES[recipe])
        with torch.autocast("cpu", torch.bfloat16):
            assert accelerate(handle, passing(model))[0].path
        torch._dynamo.reset()
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        results.append(train(run, optimizer, handle, steps=16)[0])
    torch.testing.assert_close(results[0], results[1], rtol=2e-3, atol=2e-3)


# --- double pruning -------------------------------------------------------------------------------


def test_double_pruning_changes_the_input_gradient_alone() -> None:
    model = mlp().double()
    _, handle = sparse(model, input_gradient="double_prune")
    (event,) = handle.pop_events()
    assert str(event) == "input_gradient=double_prune can change nothing at 4.weight"
    x, weight = normal(5, 32).requires_grad_(), handle.sparse[0]
    dz = normal(5, 64, seed=1)
    dx, dw = torch.autograd.grad(model[0](x), (x, weight.parameter), dz)
    twice = weight.weight.clone()
    for group in twice.split(4):  # of every four outputs the two largest of what is left
        smallest = group.abs().argsort(dim=0, descending=True, stable=True)[2:]
        group.scatter_(0, smallest, 0.0)
    torch.testing.assert_close(dx, dz @ twice)
    torch.testing.assert_close(dw, dz.t() @ x)
    torch.testing.assert_close(model[0](x), F.linear(x, weight.weight, model[0].bias))
    assert not torch.allclose(dx, dz @ weight.weight)
    assert densities(handle.recipe, weight, 5, hardware=True) == (0.5, 0.5, 1.0)


def test_what_is_simulated_is_not_packed() -> None:
    for options, reason in (
        ({"input_gradient": "mvue"}, "its input gradient is by a new estimate of the weight"),
        ({"fp8": True}, "FP8 is simulated, in dense products"),
    ):
        _, handle = sparse(model := mlp(), **options)
        choice = accelerate(handle, passing(model))[0]
        assert choice.path is None
        assert choice.reason.startswith(reason)
    _, handle = sparse(mlp(), input_gradient="mvue")
    assert densities(handle.recipe, handle.sparse[0], 5, hardware=True) == (0.5, 0.5, 1.0)


# --- on the command line --------------------------------------------------------------------------


def test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LARGE", 0)  # the played GPU is a CPU, which leaves small ones alone
    network = ("model=mlp", "model.hidden=[32,32,32]", "trainer.precision=bf16", "recipe=ste")
    plain = config(tmp_path, *network)
    parts = build.build(plain)
    assert [choice.path for choice in parts.accelerated] == ["compressed", "compressed"]
    assert "N:M products in 2 of 2 sparse layers" in measurement.lines(parts.accelerated)
    assert identity(config(tmp_path, *network, "trainer.acceleration=off")) == identity(plain)
    assert build.build(config(tmp_path, *network, "trainer.acceleration=off")).accelerated == []
    pruned = config(tmp_path, *network, "trainer.input_gradient=double_prune")
    assert identity(pruned) != identity(plain)
    for weight in build.build(pruned).handle.sparse:
        assert weight.layer.prune_again in weight.dependents
    network = (*network, "trainer.acceleration=force")
    with pytest.raises(ConfigError, match=r"=force: 2:4 products take 2:4 weights .* not 4:8"):
        config(tmp_path, *network, "sparsity=4:8")
    whole = config(tmp_path, *network, "trainer.precision=fp32")
    with pytest.raises(ConfigError, match=r"=force: no layer can be accelerated here \(float32"):
        build.build(whole)


def test_times_come_back_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "cache_folder", lambda: tmp_path)
    named = ("cusparselt:17", "cusparselt:12")
    times = {"dense": Times(0.0, 2.0), "cusparselt": Times(1.0, 2.0, 3.0, algorithms=named)}
    measurement.remember("probe.json", "a GPU", "a shape", times)
    assert measurement.recall("probe.json", "a GPU", "a shape", times.keys()) == times
    as_json = json.loads(json.dumps(measurement.as_data({"a shape": times})))
    assert measurement.from_data(as_json) == {"a shape": times}
