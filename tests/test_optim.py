"""Adam and AdamW: torch's own until frozen, after that a scalar Adam written out here."""

import copy
import io
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import bits

from nmrun import optim
from nmrun.lab.train import build
from nmrun.optim.adam import second_moment_change

PAIRS = [(optim.Adam, torch.optim.Adam), (optim.AdamW, torch.optim.AdamW)]
T0 = 6  # steps before freezing


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
        for shape in ((4, 6), (5,), (2, 3, 3))
    ]


def gradients(steps: int, dtype: torch.dtype = torch.float32) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        scale = 0.1 * 3**step if step < 4 else 1.0  # v must matter, and its maximum lie in the past
        yield [torch.randn(p.shape, generator=generator, dtype=dtype) * scale for p in parameters()]


def train(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], grads: Iterator[list[Tensor]]
) -> list[Tensor]:
    for step in grads:
        for p, grad in zip(params, step, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in params]


class ScalarAdam:
    """Adam for one number, straight from the papers, with STEP's second phase."""

    def __init__(
        self, w: float, decoupled: bool, lr: float, wd: float, maximize: bool, amsgrad: bool
    ) -> None:
        self.w, self.decoupled, self.lr, self.wd = w, decoupled, lr, wd
        self.maximize, self.amsgrad = maximize, amsgrad
        self.m = self.v = self.v_max = 0.0
        self.t, self.frozen = 0, None

    def step(self, g: float) -> None:
        b1, b2, eps = 0.9, 0.999, 1e-8
        self.t += 1
        g = -g if self.maximize else g
        if self.decoupled:
            self.w *= 1 - self.lr * self.wd
        else:
            g += self.wd * self.w
        self.m = b1 * self.m + (1 - b1) * g
        if self.frozen is None:
            self.v = b2 * self.v + (1 - b2) * g * g
            self.v_max = max(self.v_max, self.v)
            v = self.v_max if self.amsgrad else self.v
            denominator = math.sqrt(v / (1 - b2**self.t)) + eps
        else:
            denominator = self.frozen
        self.w -= self.lr * self.m / (1 - b1**self.t) / denominator

    def freeze(self, eps_mode: str, bias_correction: bool) -> None:
        v = self.v_max if self.amsgrad else self.v
        v /= 1 - 0.999**self.t if bias_correction else 1
        inside, shift = {"inside": (1e-8, 0), "outside": (0, 1e-8), "floor": (0, 1e-6)}[eps_mode]
        self.frozen = math.sqrt(v + inside) + shift


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize(
    "options", [{}, {"maximize": True}, {"amsgrad": True}, {"weight_decay": 0.1}], ids=str
)
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("eps_mode", optim.EPS_MODES)
def test_scalar_adam_after_freezing(kind, options, eps_mode, bias_correction):
    params = parameters(torch.float64)
    optimizer = kind(params, lr=0.02, **options)
    expected = []
    history = list(gradients(T0 + 7, torch.float64))
    train(optimizer, params, iter(history[:T0]))
    optimizer.freeze_second_moment(params, eps_mode, bias_correction)
    optimizer.param_groups[0]["lr"] = 0.01  # a schedule goes on
    train(optimizer, params, iter(history[T0:]))
    decay = optimizer.defaults["weight_decay"]
    for i, start in enumerate(parameters(torch.float64)):
        for j, w in enumerate(start.flatten().tolist()):
            how = kind is optim.AdamW, 0.02, decay, "maximize" in options, "amsgrad" in options
            scalar = ScalarAdam(w, *how)
            for t, grads in enumerate(history):
                if t == T0:
                    scalar.freeze(eps_mode, bias_correction)
                    scalar.lr = 0.01
                scalar.step(grads[i].flatten()[j].item())
            expected.append(scalar.w)
    result = torch.cat([p.detach().flatten() for p in params])
    assert result.tolist() == pytest.approx(expected, rel=1e-11, abs=1e-12)


def test_frozen_means_constant_and_only_for_those_asked_for():
    params, live = parameters(), parameters()
    optimizer, stock = optim.AdamW(params, lr=0.01), torch.optim.AdamW(live, lr=0.01)
    history = list(gradients(12))
    train(optimizer, params, iter(history[:T0]))
    optimizer.freeze_second_moment([params[0]])
    denominator = optimizer.state[params[0]]["frozen_denominator"].clone()
    assert "exp_avg_sq" not in optimizer.state[params[0]]
    grads = [g.clone() for g in history[T0]]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    optimizer.step()
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    assert all(map(torch.equal, grads, history[T0]))
    train(optimizer, params, iter(history[T0 + 1 :]))
    optimizer.freeze_second_moment([params[0]], "outside")  # frozen already: nothing happens
    assert torch.equal(optimizer.state[params[0]]["frozen_denominator"], denominator)
    train(stock, live, iter(history))
    assert torch.equal(params[1], live[1])
    assert torch.equal(params[2], live[2])
    assert not torch.equal(params[0], live[0])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
def test_state_dict_continues_with_the_same_bits(kind, frozen):
    params = parameters()
    optimizer = kind(params, lr=0.01, weight_decay=0.1)
    history = list(gradients(10))
    train(optimizer, params, iter(history[:T0]))
    if frozen:
        optimizer.freeze_second_moment(params[:2])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    again = copy.deepcopy(params)
    resumed = kind(again, lr=0.5)
    resumed.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    ends = train(optimizer, params, iter(history[T0:])), train(resumed, again, iter(history[T0:]))
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize("stock", [torch.optim.Adam, torch.optim.AdamW])
def test_hooks_fire_once_whatever_was_created_before(kind, stock):
    stock(parameters())  # torch wraps step of the class once an instance is made
    p = parameters()[0]
    optimizer = kind([p])
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    stock(parameters())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for frozen in (False, True):
        calls.clear()
        p.grad = torch.ones_like(p)
        optimizer.step()
        schedule.step()
        assert calls == ["before", "after"]
        if not frozen:
            optimizer.freeze_second_moment([p])
    p.grad = None
    assert optimizer.step(lambda: (p.sum() * 2).backward() or 7) == 7  # closures stay possible
    assert (p.grad == 2).all()


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize(
    "options", [{}, {"maximize": True}, {"amsgrad": True}, {"weight_decay": 0.3}], ids=str
)
def test_change_of_v_is_what_the_next_step_does(kind, options):
    params = parameters()
    optimizer = kind(params, **options)
    for t, grads in enumerate(gradients(4)):
        grads[0][:, :2] = 0.0
        for p, grad in zip(params[: 2 + t % 2], grads, strict=False):
            p.grad = grad
        moments = [optimizer.state[p].get("exp_avg_sq", torch.zeros_like(p)) for p in params[:2]]
        before = [v.double().clone() for v in moments]
        total, logs, nonzero = second_moment_change(optimizer, params[:2])
        optimizer.step()
        changes = (
            optimizer.state[p]["exp_avg_sq"] - v for p, v in zip(params, before, strict=False)
        )
        change = torch.cat([each.abs().flatten() for each in changes])
        moved = change[change > 0]
        assert int(nonzero) == len(moved)
        assert float(total) == pytest.approx(float(change.sum()), rel=1e-4)
        assert float(logs) == pytest.approx(float(moved.log().sum()), rel=1e-3)
    optimizer.zero_grad()
    assert [float(x) for x in second_moment_change(optimizer, params)] == [0, 0, 0]


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"maximize": True}], ids=str)
def test_change_of_v_with_the_others_in_a_group_of_their_own(options):
    params = parameters()
    optimizer = optim.Adam([{"params": params[:1]}, {"params": params[1:]}], **options)
    for p, grad in zip(params, next(gradients(1)), strict=True):
        p.grad = grad
    assert int(second_moment_change(optimizer, params[:1])[2]) == 24
    optimizer.freeze_second_moment(params[:1])
    optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_loss_scaling_changes_nothing(fused):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    params, plain = parameters(), parameters()
    optimizer, reference = (optim.AdamW(p, lr=0.01, fused=fused) for p in (params, plain))
    for t, grads in enumerate(gradients(8)):
        if t == T0:
            optimizer.freeze_second_moment(params[:2])
            reference.freeze_second_moment(plain[:2])
        scaler.scale(torch.zeros(()))  # as for a loss
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad * scaler.get_scale()
        if t == 2:
            params[0].grad[0, 0] = torch.inf  # skipped
        scaler.step(optimizer)
        scaler.update()
        if t != 2:
            train(reference, plain, iter([grads]))
    assert scaler.get_scale() == 2.0**11
    assert all(map(torch.equal, params, plain))


# --- without torch's compiler ---------------------------------------------------------------------

SGD = (optim.SGD, torch.optim.SGD)
ALONE = [
    *[(kinds, {"lr": 0.1, "weight_decay": 0.1}) for kinds in (*PAIRS, SGD)],
    *[(kinds, {"maximize": True, "foreach": True}) for kinds in (*PAIRS, SGD)],
    *[(kinds, {"fused": True, "weight_decay": 0.01}) for kinds in (*PAIRS, SGD)],
    *[(kinds, {"foreach": False, "amsgrad": True}) for kinds in PAIRS],
    *[(kinds, {"betas": (0.5, 0.9), "eps": 1e-3, "lr": 0.1}) for kinds in PAIRS],
    *[(kinds, {}) for kinds in PAIRS],
    (SGD, {"momentum": 0.9, "nesterov": True, "foreach": False}),
    (SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("kinds", "options"), ALONE, ids=str)
def test_bits_of_torch_without_its_compiler(kinds, options, monkeypatch):
    """Made, stepped with and without a closure, saved, loaded and emptied, with hooks, in sight of
    the profiler."""

    def course(kind, params):
        optimizer, seen = kind(params, **options), list[Any]()
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        optimizer.param_groups[0]["lr"] *= 0.5  # a schedule
        seen += [optimizer.defaults, train(optimizer, params, gradients(4))[0]]
        seen += [(key, t) for state in optimizer.state.values() for key, t in state.items()]
        again = kind(params, **options)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))

        def closure():
            again.zero_grad()
            loss = sum((p * p).sum() for p in params)
            loss.backward()
            return loss.detach()

        with torch.profiler.profile() as profile:
            seen.append(again.step(closure))
        steps = [e.key for e in profile.key_averages() if e.key.startswith("Optimizer.step")]
        again.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.5})
        return [*seen, steps, len(again.param_groups), *(p.grad is None for p in params), *params]

    ours, stock = kinds
    expected = course(stock, parameters())
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    actual = course(ours, parameters())
    assert "torch._dynamo" not in sys.modules
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert bits(one) == bits(other)


@pytest.mark.parametrize(("ours", "stock"), [*PAIRS, SGD])
def test_a_differentiable_step_without_torch_s_compiler(ours, stock, monkeypatch):
    """The gradient of the weight after a step by the weight before it."""

    def slope(kind):
        start = torch.tensor([0.3, -1.0], requires_grad=True)
        p = start.clone()
        optimizer = kind([p], lr=0.1, weight_decay=0.5, differentiable=True)
        p.grad = torch.ones(2)
        optimizer.step()
        return torch.autograd.grad(p.sum(), start)[0]

    expected = slope(stock)
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    assert torch.equal(slope(ours), expected)


def test_freezing_says_what_it_cannot_do():
    params = parameters()
    with pytest.raises(ValueError, match="eps_mode='middle': allowed are inside, outside, floor"):
        optim.Adam(params).freeze_second_moment(params, "middle")
    with pytest.raises(ValueError, match="neither capturable=True nor differentiable=True"):
        optim.Adam(params, capturable=True).freeze_second_moment(params)


def test_a_fused_step_is_for_gpus_and_large_networks():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for kind in (optim.AdamW, optim.Adam, torch.optim.SGD):
        for device, width, expected in ((cuda, 8, True), (cpu, 8, None), (cpu, 1000, True)):
            optimizer = kind([torch.nn.Parameter(torch.zeros(width, width))], lr=0.1)
            build.fuse(optimizer, device)
            assert [group["fused"] for group in optimizer.param_groups] == [expected]


@pytest.mark.parametrize("source", [torch.optim.Adam, torch.optim.AdamW])
def test_an_adamw_stays_one_whatever_state_it_loads(source):
    """A state of Adam, and one of an AdamW that did not say yet how it decays."""
    saved = source(parameters(), lr=0.1, weight_decay=0.5)
    train(saved, saved.param_groups[0]["params"], gradients(2))
    state = saved.state_dict()
    if source is torch.optim.AdamW:
        del state["param_groups"][0]["decoupled_weight_decay"]
    ends = []
    for kind in PAIRS[1]:
        params = parameters()
        optimizer = kind(params)
        optimizer.load_state_dict(copy.deepcopy(state))
        ends.append(train(optimizer, params, gradients(3)))
    assert all(map(torch.equal, *ends))
