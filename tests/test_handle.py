"""The handle in a loop of one's own: saved and restored, finished, reported, and what it refuses."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from errors import one_line
from torch import nn
from training import SPARSE, TOTAL, batch, bits, by_sgd, everything, net, start, train

import nmrun
from nmrun.errors import ConfigError
from nmrun.recipes import RECIPES, STEP


def test_a_finished_handle_shows_where_the_model_is_nm():
    model, optimizer, handle = start("sr_ste")
    train(model, optimizer, range(TOTAL))
    before = handle.report()
    handle.finalize()
    title, *rows = repr(handle).splitlines()
    assert title == "nmrun.Handle: sr_ste, finished, step 10 of 10; 2 sparse weights, 1 left dense"
    assert rows[:2] == ["  0.weight  2:4  8 x 16", "  2.weight  2:4  8 x 8"]
    (dense,) = rows[2:]
    assert "4.weight [4, 8]: excluded" in dense
    assert handle.report() == before


# --- saved and restored ---------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize(("recipe", "fused"), [(name, i % 2 == 0) for i, name in enumerate(SPARSE)])
def test_a_step_that_loss_scaling_skips_changes_nothing(recipe, fused, clip):
    """An overflow at every third batch: no weight, moment, mask, score or clock moves, and the end
    is that of a run without any.
    """
    model, optimizer, handle = start(recipe, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=10**6)
    for step in range(TOTAL):
        for factor in [math.inf, 1.0] if step % 3 == 2 else [1.0]:
            scaler.scale(model(batch(step)).square().mean() * factor).backward()
            before = everything(model, optimizer, handle)
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            assert (everything(model, optimizer, handle) == before) == (factor == math.inf)
            scaler.update()
            optimizer.zero_grad()
    plain = start(recipe, fused=fused)
    for step in range(TOTAL):
        plain[0](batch(step)).square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(plain[0].parameters(), clip)
        plain[1].step()
        plain[1].zero_grad()
    assert scaler.get_scale() == 2.0**11
    assert everything(model, optimizer, handle) == everything(*plain)


@pytest.mark.parametrize("recipe", ["sr_ste", "sqft"])
def test_torch_s_fused_adam_skips_a_step_where_it_has_no_state_of_a_weight(recipe):
    """Of a layer whose first gradient overflows; under SQFT of every weight."""
    ends = []
    for factors in [1.0], [math.inf, 1.0]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 8), nn.Linear(16, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
        handle = nmrun.sparsify(model, optimizer, recipe, "2:4", exclude=None)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        for step in range(4):
            for factor in factors if step == 2 else [1.0]:
                out = model[0](batch(step))
                if step >= 2:
                    out = out + model[1](batch(step))
                scaler.scale(out.square().mean() * factor).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        twin, other = copy.deepcopy((model, optimizer))
        ends.append(everything(model, optimizer, handle))
        second = nmrun.sparsify(twin, other, recipe, "2:4", exclude=None)
        assert everything(twin, other, second) == ends[-1]
    assert ends[0]["used"] == ends[1]["used"]
    if recipe == "sr_ste":  # under SQFT Adam made moments of zeros where it skipped
        assert ends[0] == ends[1]


# --- finished -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "pattern"), [(name, ("2:4", "1:4")[i % 2]) for i, name in enumerate(RECIPES)]
)
def test_finalize_leaves_a_plain_model_and_the_same_parameters(recipe, pattern):
    """What was evaluated is what is left, exactly N:M."""
    model, optimizer, handle = start(recipe, pattern=pattern)
    objects, modules = dict(model.named_parameters()), [type(m) for m in model.modules()]
    train(model, optimizer, range(TOTAL))
    assert handle.is_sparse == (recipe != "dense")
    used = [model[i].weight.detach().clone() for i in (0, 2)]
    handle.finalize()
    assert (handle.sparse, handle.phase) == ([], "dense")
    assert (handle.is_sparse, handle.metrics()) == (False, {})
    assert all(map(torch.equal, (model[0].weight, model[2].weight), used))
    assert dict(model.named_parameters()).keys() == objects.keys()
    for name, p in model.named_parameters():
        assert type(p) is nn.Parameter
        assert p is objects[name]
        assert p.requires_grad
    assert (list(model.state_dict()), [type(m) for m in model.modules()]) == (
        list(net().state_dict()),
        modules,
    )
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert owned >= {id(p) for p in objects.values()}
    fresh = net(1)
    fresh.load_state_dict(pickle.loads(pickle.dumps(model)).state_dict())
    assert torch.equal(fresh(batch(0)), model(batch(0)))
    pruned = model[0].weight.detach() == 0
    density = 1 - float(pruned.float().mean())
    if recipe != "dense":
        names = nmrun.sparsity.check_nm(model, pattern, exclude="4")
        assert names == ["0.weight", "2.weight"]
        assert density > 0.5 * nmrun.Pattern.parse(pattern).density
    train(model, optimizer, range(1))
    # no hook sets them to zero any more
    assert not (model[0].weight == 0)[pruned].all() or recipe == "dense"
    again = nmrun.sparsify(model, optimizer, "ste", "1:4", exclude="4")
    train(model, optimizer, range(1))
    again.finalize()
    nmrun.sparsity.check_nm(model, "1:4", exclude="4")


# --- reported -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe", ["sr_ste", "s_ste", "asp", "sdgf_stepwise", "mdgf_linear", "lbc"]
)
def test_report_counts(recipe):
    """In every phase the numbers are of the weights that would be left, also where the forward pass
    uses denser ones.
    """
    patterns = {"0.weight": (2, 8), "2.weight": (1, 4)}
    model, optimizer, handle = start(
        recipe, pattern="1:4", exclude=(), overrides={"0": "2:8", "4": "dense"}
    )
    with torch.no_grad(), handle.dense_weights():
        model[0].weight[3].zero_()  # a row of zeros has fewer than N non-zeros in its groups
    for step in range(TOTAL):
        left = {w.name: handle.final_weight(w) for w in handle.sparse}
        report, total = handle.report(), 0
        assert [layer["name"] for layer in report["layers"]] == list(patterns)
        for layer in report["layers"]:
            (n, m), weight = patterns[layer["name"]], left[layer["name"]]
            groups = [row[i : i + m] for row in weight.tolist() for i in range(0, len(row), m)]
            counts = [sum(value != 0 for value in group) for group in groups]
            assert max(counts) <= n
            expected = {"pattern": f"{n}:{m}", "nonzeros": sum(counts), "holds": True, "dim": 1}
            expected |= {"numel": weight.numel(), "shape": list(weight.shape)}
            assert expected.items() <= layer.items()
            total += sum(counts)
        assert (report["pattern"], report["density"]) == ("1:4", total / (128 + 64))
        assert report["left_dense"] == [
            {"name": "4.weight", "shape": [4, 8], "reason": "dense by overrides"}
        ]
        train(model, optimizer, range(step, step + 1))


# --- refused --------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown recipe": ({"recipe": "sr_set"}, ValueError, "recipe=sr_set: no such recipe; did you mean sr_ste"),
    "no such class": ({"recipe": "collections.Nothing"}, ValueError, "recipe=collections.Nothing cannot be imported"),
    "no recipe class": ({"recipe": "collections.Counter"}, ValueError, "is not a subclass of nmrun.recipes.base.Recipe"),
    "no pattern": ({"pattern": "4:2"}, ConfigError, "4:2 is not an N:M pattern: it takes 1 <= N <= M"),
    "wrong hyperparameter": ({"recipe": "sr_ste", "decai": 1.0}, TypeError, "decai: no such hyperparameter; did you mean decay"),
    "an argument misspelt": ({"patern": "1:4"}, TypeError, r"ste: patern: no such hyperparameter; did you mean pattern\?"),
    "no such layer": ({"exclude": ["2", "head"]}, ValueError, "exclude: 'head' matches no layer's whole name; there are 0, 2, 4"),
    "a class": ({"recipe": STEP, "total_steps": 9}, ConfigError, r"it takes a name, a dotted path or a recipe such as STEP\(\)"),
    "no steps": ({"recipe": "step", "total_steps": 0}, ConfigError, "total_steps=0: it takes a whole number, 1 or more"),
    "no recipe": ({"recipe": None}, ConfigError, "recipe=None: it takes a name, a dotted path or a recipe"),
    "a number for a recipe": ({"recipe": 3}, ConfigError, "recipe=3: it takes a name"),
    "nothing fits": ({"pattern": "1:64"}, ValueError, r"can be 1:64 sparse \(0.weight \[8, 16\]: 16 inputs are not a multiple of 64"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_is_named_and_leaves_the_model_as_it_was(mistake):
    options, kind, message = REFUSED[mistake]
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = bits(model.state_dict())
    with one_line(kind, message):
        nmrun.sparsify(model, optimizer, **{"exclude": None, "recipe": "ste", **options})
    assert bits(model.state_dict()) == before
    nmrun.sparsify(model, optimizer, "ste", exclude=None)


def test_what_is_no_module_is_named():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for other in (model.state_dict(), model.parameters(), [model]):
        with one_line(ConfigError, f"{type(other).__name__} is no module: give sparsify the model"):
            nmrun.sparsify(other, optimizer, "ste", exclude=None)


def test_a_handle_is_not_copied_with_a_model_that_it_does_not_know():
    model, optimizer, handle = start("sr_ste")
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="neither copied nor pickled: save model and optimizer"):
            make((model, optimizer, handle))


def test_one_optimizer_over_two_models_takes_one_handle():
    first, second = net(), net()
    both = nn.ModuleList([first, second])
    optimizer = torch.optim.SGD(both.parameters(), 0.1)
    nmrun.sparsify(first, optimizer, "ste", exclude=None)
    with pytest.raises(ConfigError, match=r"nn\.ModuleList\(\[first, second\]\)"):
        nmrun.sparsify(second, optimizer, "ste", exclude=None)
    both = nn.ModuleList([net(), net()])
    optimizer, handle = by_sgd(both, "ste")
    for model in both:
        train(model, optimizer, range(1))
    handle.finalize()
    for model in both:
        nmrun.sparsity.check_nm(model, "2:4", exclude=None)


def test_an_optimizer_of_other_weights_and_a_model_without_any():
    model, other, embedding = net(), net(), nn.Embedding(8, 8)
    with pytest.raises(ValueError, match=r"0.weight \[8, 16\] and 2 more: not in the optimizer"):
        nmrun.sparsify(model, torch.optim.SGD(other.parameters(), 0.1), "ste", exclude=None)
    with pytest.raises(ValueError, match=r"can be 2:4 sparse \(weight \[8, 8\]: an embedding\)"):
        by_sgd(embedding, "ste")


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("recipe", ["sr_ste", "asp", "step", "lbc", "maskllm"])
def test_a_closure_gives_the_bits_of_a_plain_loop(recipe, by_name):
    """It is evaluated before the recipe edits gradients, once a step, and its loss comes back."""
    plain, closed = start(recipe), start(recipe)
    train(*plain[:2], range(TOTAL))
    model, optimizer, _ = closed
    called = []
    for step in range(TOTAL):

        def closure(step=step):
            called.append(step)
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            loss.backward()
            return loss

        expected = model(batch(step)).square().mean().item()
        loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert loss.item() == expected
    optimizer.zero_grad()
    assert called == list(range(TOTAL))
    assert everything(*closed) == everything(*plain)
