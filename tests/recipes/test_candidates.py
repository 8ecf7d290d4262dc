"""LBC and MaskLLM, which learn a choice among all masks of a group, against loops over groups
written by hand.
"""

import itertools
import math

import pytest
import torch
from reference import LR, TOTAL, ByHand, Net, data, top, train_step
from safetensors.torch import save_file
from torch import Tensor, nn
from training import by_sgd

import nmrun
from nmrun.errors import ConfigError
from nmrun.recipes.maskllm import gumbel_softmax

MASKS = [list(c) for c in itertools.combinations(range(4), 2)]  # of 2:4, in order


def test_gumbel_noise_samples_the_softmax():
    """The largest of logits + Gumbel noise is entry k with probability softmax(logits)_k."""
    logits = torch.tensor([0.0, 1.0, -1.0]).repeat(40000, 1)
    picked = gumbel_softmax(logits, 0.01, seed=1).argmax(-1)
    frequency = torch.bincount(picked, minlength=3) / 40000
    expected = torch.softmax(logits[0], -1)
    assert ((frequency - expected).abs() < 5 * (expected * (1 - expected) / 40000).sqrt()).all()
    assert torch.equal(gumbel_softmax(logits, 1.0, 7), gumbel_softmax(logits, 1.0, 7))
    assert not torch.equal(gumbel_softmax(logits, 1.0, 7), gumbel_softmax(logits, 1.0, 8))


# --- LBC ------------------------------------------------------------------------------------------


class LBCByHand:
    """Scores in dictionaries {(weight, row, group): {candidate: score}}, plain SGD."""

    def __init__(self, weights: list[Tensor], t_f: int) -> None:
        self.t_f = t_f
        self.scores = {
            (i, r, c): dict.fromkeys(range(6), 1 / 3)
            for i in (0, 2)
            for r in range(weights[i].shape[0])
            for c in range(0, weights[i].shape[1], 4)
        }

    def mask(self, t: int, i: int, w: Tensor) -> Tensor:
        m = torch.zeros_like(w)
        for (j, r, c), scores in self.scores.items():
            if j == i:
                for k in scores:
                    for member in MASKS[k]:
                        m[r, c + member] = 1.0
        return m

    def learn(self, i: int, w: Tensor, g: Tensor) -> None:
        for (j, r, c), scores in self.scores.items():
            if j == i and len(scores) > 1:
                for k in scores:
                    scores[k] -= LR * sum(
                        float(g[r, c + member] * w[r, c + member]) for member in MASKS[k]
                    )

    def drop(self, t: int) -> None:
        left = 1 + math.ceil(5 * max(0.0, 1 - t / self.t_f) ** 3)
        for key, scores in self.scores.items():
            best = sorted(scores, key=lambda k: -scores[k])[:left]
            self.scores[key] = {k: scores[k] for k in best}


def test_lbc():
    hand = LBCByHand(Net().used, t_f=6)

    def edit(t, i, w, g):
        hand.learn(i, w, g)
        return g * hand.mask(t, i, w)

    reference = ByHand(Net().used, lambda t, i, w: w * hand.mask(t, i, w), edit)
    model = Net()
    optimizer, handle = by_sgd(model, "lbc", "2:4", TOTAL, lr=LR, t_f=0.6)
    batches = data(2)
    counts = []
    for t in range(TOTAL):
        torch.testing.assert_close(model.used, reference.used, rtol=1e-9, atol=1e-12)
        counts.append(handle.metrics()["lbc/candidates"])
        assert handle.is_sparse == (counts[-1] == 1)
        train_step(model, optimizer, batches(t))
        reference.step(batches(t))
        hand.drop(t + 1)
    assert counts == [6, 4, 3, 2, 2, 2, 1, 1, 1, 1]  # 1 + ceil(5 (1 - t/6)^3)
    handle.finalize()
    nmrun.sparsity.check_nm(model, "2:4", exclude=None)
    assert not any("scores" in name for name in model.state_dict())


def test_lbc_of_one_step_decides_by_its_gradient():
    hand, model = LBCByHand(Net().used, t_f=1), Net()
    optimizer, handle = by_sgd(model, "lbc", "2:4", 1, lr=LR)
    reference = ByHand(
        Net().used,
        lambda t, i, w: w * hand.mask(t, i, w),
        lambda t, i, w, g: (hand.learn(i, w, g), g)[1],
    )
    train_step(model, optimizer, data(2)(0))
    reference.step(data(2)(0))
    hand.drop(1)
    handle.finalize()
    torch.testing.assert_close(model.used, reference.used, rtol=1e-9, atol=1e-12)
    nmrun.sparsity.check_nm(model, "2:4", exclude=None)


def test_lbc_ends_early_with_its_best_candidate():
    model = nn.Sequential(nn.Linear(4, 1, bias=False))
    _, handle = by_sgd(model, "lbc", "2:4", 10)
    (weight,) = handle.sparse
    with torch.no_grad():
        # the third is {0, 3}
        handle.recipe.scores(weight).copy_(torch.tensor([[[0.0, 0.1, 0.9, 0.2, 0.3, 0.4]]]))
    dense = model[0].weight.detach().clone()
    assert torch.equal(model[0].weight, dense)  # all candidates: nothing pruned
    assert torch.equal(handle.final_weight(weight), dense * torch.tensor([1.0, 0, 0, 1.0]))


# --- MaskLLM --------------------------------------------------------------------------------------


def maskllm(total: int = 6, **options: float) -> tuple[Net, torch.optim.Optimizer, nmrun.Handle]:
    model = Net()
    optimizer, handle = by_sgd(model, "maskllm", "2:4", total, lr=LR, **options)
    return model, optimizer, handle


def test_maskllm_s_logits_get_the_gradient_of_its_objective():
    """Autograd through softmax((kappa * logits + noise) / temperature), with the noise recovered
    from the mask that was used.
    """
    kappa, temperature, reg = 2.0, 1.5, 0.1
    model, optimizer, handle = maskllm(
        dense=0.0, kappa=(kappa, kappa), temperature=(temperature,) * 2, reg=reg, prior=0.0
    )
    x, y = data(1)(0)[0]
    biases = [layer.bias.detach().clone() for layer in (model[0], model[2])]
    logits, used, dense = [], [], []
    for weight in handle.sparse:
        blend, scores = handle.recipe.soft[weight.name], handle.recipe.scores(weight).detach()
        noise = temperature * blend.log() - kappa * scores  # up to a constant a group
        leaf = scores.clone().requires_grad_()
        soft = torch.softmax((kappa * leaf + noise) / temperature, -1)
        w = weight.dense.clone()
        mask = torch.zeros(*soft.shape[:-1], 4, dtype=w.dtype)
        for k, members in enumerate(MASKS):
            for member in members:
                mask = mask + soft[..., k : k + 1] * torch.eye(4, dtype=w.dtype)[member]
        logits.append(leaf)
        used.append(w * mask.reshape(w.shape))
        dense.append(w)
        torch.testing.assert_close(weight.parameter.detach(), used[-1].detach())
    out = torch.tanh(x @ used[0].T + model[0].bias) @ used[1].T + model[2].bias
    objective = (out - y).square().mean() - reg * sum(u.square().sum() for u in used)
    expected = torch.autograd.grad(objective, logits)
    (model(x) - y).square().mean().backward()
    optimizer.step()
    for weight, leaf, g in zip(handle.sparse, logits, expected, strict=True):
        moved = handle.recipe.scores(weight).detach() - leaf.detach()
        torch.testing.assert_close(moved, -10 * LR * g, rtol=1e-6, atol=1e-10)  # lr_mult = 10
    assert all(torch.equal(w.dense, b) for w, b in zip(handle.sparse, dense, strict=True))
    assert all(torch.equal(model[i].bias, b) for i, b in zip((0, 2), biases, strict=True))


def test_maskllm_ends_with_the_likeliest_masks():
    model, optimizer, handle = maskllm(total=6, dense=0.5)
    batches = data(1)
    for t in range(6):
        assert handle.phase == ("dense" if t < 3 else "transition")
        train_step(model, optimizer, batches(t))
    assert handle.phase == "sparse"
    for weight in handle.sparse:
        dense, best = weight.dense, handle.recipe.scores(weight).argmax(-1)
        mask = torch.zeros(*best.shape, 4, dtype=dense.dtype)
        for place in itertools.product(*map(range, best.shape)):
            mask[place][MASKS[int(best[place])]] = 1.0
        assert torch.equal(weight.parameter.detach(), dense * mask.reshape(dense.shape))
    handle.finalize()
    nmrun.sparsity.check_nm(model, "2:4", exclude=None)


def test_the_prior_prefers_large_weights():
    """With a strong prior the likeliest mask is the magnitude mask from the start."""
    _, _, handle = maskllm(dense=0.0, prior=50.0)
    for weight in handle.sparse:
        dense, logits = weight.dense, handle.recipe.scores(weight)
        masks = top(dense, 2, 4).reshape(*logits.shape[:-1], 4)
        for place in itertools.product(*map(range, logits.shape[:-1])):
            likeliest = sorted(MASKS[int(logits[place].argmax())])
            assert likeliest == masks[place].nonzero().flatten().tolist()


def test_the_prior_prefers_the_masks_of_a_pruned_network(tmp_path):
    """Of a file: the smallest weights here, which no magnitude would keep. The dense weights stay."""
    masks = {f"{i}.weight": top(1 / Net()[i].weight.detach(), 2, 4) for i in (0, 2)}
    pruned = {name: weight * masks.get(name, 1) for name, weight in Net().state_dict().items()}
    save_file(pruned, tmp_path / "model.safetensors")
    for place in (tmp_path, tmp_path / "model.safetensors"):
        _, _, handle = maskllm(dense=0.0, prior=50.0, masks=str(place))
        for weight in handle.sparse:
            assert torch.equal(weight.dense, Net().get_parameter(weight.name))
            left = torch.where(masks[weight.name] > 0, weight.dense, 0.0)
            assert torch.equal(handle.final_weight(weight), left)
    with pytest.raises(ConfigError, match=r"masks=.*: 0.weight is not 2:4 there: it keeps 4"):
        save_file(Net().state_dict(), tmp_path / "model.safetensors")
        maskllm(dense=0.0, masks=str(tmp_path))
    with pytest.raises(ConfigError, match=r"another network: 0.weight is missing there"):
        save_file({"other": torch.ones(4)}, tmp_path / "model.safetensors")
        maskllm(dense=0.0, masks=str(tmp_path))
    with pytest.raises(ConfigError, match=r"masks=.*nowhere/model.safetensors: it cannot be read"):
        maskllm(dense=0.0, masks=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="it cannot be read"):  # before the dense phase
        maskllm(dense=0.5, masks=str(tmp_path / "nowhere"))


def test_every_weight_and_step_has_noise_of_its_own():
    """Of equal logits the blend is the noise's."""
    model = nn.Sequential(*(nn.Linear(4, 1, bias=False) for _ in range(80)))
    _, handle = by_sgd(model, "maskllm", "2:4", 1000, dense=0.0)
    recipe, blends = handle.recipe, []
    for step in (0, 1, 500):
        for weight in handle.sparse:
            recipe.scores(weight).data.zero_()
            with recipe.at(step):
                recipe.project(weight, torch.empty_like(weight.dense))
            blends.append(recipe.soft[weight.name].flatten())
    assert torch.stack(blends).unique(dim=0).shape == (240, 6)


@pytest.mark.parametrize("step", [0, 3, 10])
def test_kappa_and_temperature_change_linearly_up_to_the_last_step(step):
    chance = torch.Generator().manual_seed(1)

    def centred(logits):
        return logits - logits.mean(-1, keepdim=True)  # a softmax knows no more of them

    def blended(scale, **options):
        _, _, handle = maskllm(11, dense=0.0, **options)
        recipe, weight = handle.recipe, handle.sparse[0]
        scores = recipe.scores(weight).data
        scores.copy_(scale * torch.randn(scores.shape, generator=chance))
        with recipe.at(step):
            recipe.project(weight, torch.empty_like(weight.dense))
        return centred(recipe.soft[weight.name].log()), centred(scores)

    noise, _ = blended(0.0, kappa=(1.0, 1.0), temperature=(1.0, 1.0))
    blend, scores = blended(1.0, kappa=(2.0, 12.0), temperature=(4.0, 1.0))
    expected = ((2.0 + step) * scores + noise) / (4.0 - 0.3 * step)
    torch.testing.assert_close(blend, expected, rtol=1e-9, atol=1e-9)
