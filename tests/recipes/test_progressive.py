"""Mask decay and structure decay against loops written by hand, and the ways they can be asked for
wrongly.
"""

import math

import pytest
import torch
from reference import LR, TOTAL, ByHand, Net, data, follow, top, train_step
from torch import nn
from training import by_sgd

import nmrun
from nmrun.errors import RunError
from nmrun.patterns import Pattern, PatternError
from nmrun.recipes import SdGfGeometric, SdGfStepwise

PHASES = {"dense": 0.2, "final": 0.3}  # of 10 steps: dense for 2, then 5 in between, then 3 at N:M


def factor(shape: str, tau: float | None, t: int) -> float:
    j = t - 2
    if j < 0 or t >= 7:
        return 1.0 if j < 0 else 0.0
    if shape == "linear":
        return max(0.0, 1 - (0.2 if tau is None else tau) * j)
    return math.exp(-j * (math.log(1000) / 5 if tau is None else tau))


@pytest.mark.parametrize("tau", [None, 0.3])
@pytest.mark.parametrize("shape", ["linear", "exponential"])
@pytest.mark.parametrize("mode", ["scaled", "ste"])
def test_mask_decay(mode, shape, tau):
    def forward(t, i, w):
        m = top(w, 2, 4)
        return w * (m + (1 - m) * factor(shape, tau, t))

    def edit(t, i, w, g):
        m = top(w, 2, 4)
        return g * (m + (1 - m) * factor(shape, tau, t)) if mode == "scaled" else g

    follow(f"mdgf_{shape}", ByHand(Net().used, forward, edit), tau=tau, grad_mode=mode, **PHASES)


def test_densify_keeps_n():
    """N:(M * 2^i), as the authors' code has it; the density rises to the target's."""
    path = SdGfGeometric(densify=True).frames_to(Pattern(1, 8))
    assert [str(p) for p in path] == ["1:64", "1:32", "1:16", "1:8"]

    def forward(t, i, w):
        frames = [(1, 8)] * 2 + [(1, 4)] * 2 + [(1, 2)]
        return w if t < 2 else w * top(w, *(frames[t - 2] if t < 7 else (1, 2)))

    by_hand = ByHand(Net().used, forward)
    follow("sdgf_geometric", by_hand, "1:2", frames=3, densify=True, **PHASES)


FRAMES = {  # of steps 2 to 6, then 3 at the target
    ("sdgf_stepwise", "1:4"): [(3, 4)] * 2 + [(2, 4)] * 2 + [(1, 4)],
    ("sdgf_stepwise", "2:4"): [(3, 4)] * 3 + [(2, 4)] * 2,
    ("sdgf_geometric", "1:2"): [(4, 8)] * 2 + [(2, 4)] * 2 + [(1, 2)],
}


@pytest.mark.parametrize(("recipe", "pattern"), FRAMES)
def test_structure_decay(recipe, pattern):
    frames = FRAMES[recipe, pattern]
    target = frames[-1]

    def forward(t, i, w):
        return w if t < 2 else w * top(w, *(frames[t - 2] if t < 7 else target))

    options = {"frames": 3} if recipe == "sdgf_geometric" else {}
    follow(recipe, ByHand(Net().used, forward), pattern, **options, **PHASES)


def test_paths_of_patterns():
    def shown(path):
        return [str(p) for p in path]

    stepwise = SdGfStepwise().frames_to
    assert shown(stepwise(Pattern(1, 16))) == ["15:16", "8:16", "4:16", "2:16", "1:16"]
    assert shown(stepwise(Pattern(2, 4))) == ["3:4", "2:4"]
    assert shown(stepwise(Pattern(1, 2))) == ["1:2"]
    assert shown(stepwise(Pattern(4, 4))) == ["4:4"]
    assert shown(SdGfGeometric().frames_to(Pattern(1, 8))) == ["8:64", "4:32", "2:16", "1:8"]
    for n, m in ((3, 16), (1, 6), (2, 12), (1, 5)):
        with pytest.raises(PatternError, match="power of two"):
            stepwise(Pattern(n, m))


def test_the_weight_a_run_would_leave_is_always_nm():
    for recipe in ("mdgf_linear", "sdgf_stepwise"):
        model = Net()
        optimizer, handle = by_sgd(model, recipe, "1:4", 10, lr=0.0, dense=0.2, final=0.3)
        for _ in range(4):
            used = model.used
            assert all(layer["holds"] for layer in handle.report()["layers"])
            for weight in handle.sparse:
                nmrun.sparsity.check_nm(handle.final_weight(weight), "1:4")
            torch.testing.assert_close(model.used, used, rtol=0, atol=0)  # asking changes nothing
            optimizer.step()
        with pytest.raises(RunError, match="is not 1:4 after step 4"):
            handle.finalize()
        for _ in range(6):
            optimizer.step()
        handle.finalize()
        nmrun.sparsity.check_nm(model, "1:4", exclude=None)


@pytest.mark.parametrize(
    ("recipe", "pattern", "options", "words"),
    [
        (
            "mdgf_linear",
            "2:4",
            {"dense": 0.5, "final": 0.6},
            "fractions of one run: at most 1 toget",
        ),
        ("mdgf_linear", "2:4", {"final": 0.0}, "final=0.0: it takes a number above 0"),
        ("mdgf_exponential", "2:4", {"tau": -1.0}, "tau"),
        ("mdgf_exponential", "2:4", {"grad_mode": "scale"}, "scaled, ste"),
        ("sdgf_stepwise", "3:8", {}, "power of two"),
        ("sdgf_geometric", "2:4", {}, "multiple of the 32"),
        ("sdgf_geometric", "2:4", {"frames": 0}, "frames"),
    ],
)
def test_refused(recipe, pattern, options, words):
    model = Net()
    before = model.state_dict()
    with pytest.raises(ValueError, match=words):
        by_sgd(model, recipe, pattern, 10, **options)
    assert model.state_dict().keys() == before.keys()


@pytest.mark.parametrize("pad", [False, True])
def test_the_coarsest_pattern_has_to_fit_a_group_of_a_transposed_convolution(pad):
    """Each of the four groups sums over its own quarter of the inputs."""
    for inputs, refused in ((64, True), (128, False)):
        model = nn.Sequential(nn.ConvTranspose2d(inputs, 8, 1, groups=4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        given = (model, optimizer, "sdgf_geometric", "1:4", 10)
        if refused:
            with pytest.raises(ValueError, match="has 16 inputs of one group, not a mult"):
                nmrun.sparsify(*given, dense=0.0, pad=pad, exclude=None)
            continue
        nmrun.sparsify(*given, dense=0.0, pad=pad, exclude=None)
        kept = (model[0].weight != 0).view(4, 32, 2).sum(1)
        assert bool((kept == 8).all())


@pytest.mark.parametrize("recipe", ["mdgf_linear", "mdgf_exponential"])
def test_a_step_is_trained_at_the_pattern_whatever_final_is(recipe):
    """A hundredth of ten steps is none of them, and the last one is still N:M."""
    model = Net()
    optimizer, handle = by_sgd(model, recipe, "1:4", TOTAL, lr=LR, dense=0.2, final=0.01)
    for t in range(TOTAL):
        most = int((model[0].weight.detach().reshape(-1, 4) != 0).sum(1).max())
        assert (most == 1) == (handle.phase == "sparse") == (t == TOTAL - 1)
        train_step(model, optimizer, data(1)(t))


@pytest.mark.parametrize("recipe", ["sdgf_stepwise", "sdgf_geometric", "mdgf_linear"])
def test_a_dense_phase_may_leave_no_middle_one(recipe):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    options = {"frames": 2} if recipe == "sdgf_geometric" else {}
    handle = nmrun.sparsify(
        model, optimizer, recipe, "1:4", TOTAL, dense=0.8, final=0.2, exclude=None, **options
    )
    for t in range(TOTAL):
        handle.measure_flips = True
        assert handle.is_sparse == (t >= 0.8 * TOTAL)
        handle.report()
        train_step(model, optimizer, data(1)(t))
    handle.finalize()
