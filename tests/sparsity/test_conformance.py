"""What every recipe must do, whoever writes it: all of ``nmrun.recipes.RECIPES`` go through this."""

import pytest
import torch
from training import SPARSE, TOTAL, batch, start, train

from nmrun.recipes import RECIPES

MASKED = {"asp", "ste_periodic", "slope", "mdgf_linear", "mdgf_exponential"}  # at the end
FULL = {"ste", "sr_ste", "step", "s_ste", "sdgf_stepwise", "sdgf_geometric"}


@pytest.mark.parametrize("recipe", SPARSE)
def test_where_gradients_are_said_to_be_masked_those_of_pruned_weights_count_for_nothing(recipe):
    """Products that compute the others alone are then right."""
    ends, claims = [], []
    for noise in (0.0, 1.0):
        model, optimizer, handle = start(recipe)
        for step in range(TOTAL):
            model(batch(step)).square().mean().backward()
            if step == TOTAL - 2:
                claims = [handle.recipe.masks_gradient(weight) for weight in handle.sparse]
                for weight in handle.sparse:
                    weight.parameter.grad += noise * (weight.parameter.detach() == 0)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(torch.cat([weight.dense.detach().flatten() for weight in handle.sparse]))
    if recipe in MASKED or all(claims):
        assert all(claims)
        assert torch.equal(*ends)
    if recipe in FULL:
        assert not any(claims)
        assert not torch.equal(*ends)


# bytes of one float32 weight at 2:4 beside parameter and the optimizer's own state: the dense
# weight, then what the docstring says
PER_WEIGHT = {
    "dense": 0,
    "asp": 4 + 1,  # the mask
    "ste_periodic": 4 + 1,
    "t_sr_ste": 4 + 1,
    "lbc": 4 + 1 + 1.5 * (4 + 1),  # six scores for four weights, and which of them are left
    "maskllm": 4 + 1.5 * (4 + 4),  # six logits for four weights, and their softmax
    "ast": 4 + 1,
    "cast": 4 + 1 + 4 * 2 * (8 + 8) / (8 * 16 + 8 * 8),  # two scales for each output
    "proxsparse": 4 + 1 + 4,  # the mask, and the weights of before
    "sqft": 4 + 1 + 4 + 4 * 2 * (16 + 8 + 8 + 8) / (8 * 16 + 8 * 8),  # adapters of rank 2
}


@pytest.mark.parametrize("recipe", [n for n in RECIPES if n not in ("bi_mask", "slope")])
def test_memory(recipe):
    """All that is kept for the weights lies in the optimizer's state, and it is no more than said."""
    model, optimizer, handle = start(recipe)
    train(model, optimizer, range(TOTAL))
    before = {id(p) for p in model.parameters()}
    adams = {"step", "exp_avg", "exp_avg_sq", "frozen_denominator"}
    extra = 0
    for weight in handle.sparse:
        state = optimizer.state[weight.parameter]
        # those of parameters that the recipe has added are the optimizer's own too
        moments = {k for k in state if k.rpartition("/")[2] in adams}
        added = {k: t for k, t in state.items() if k not in moments}
        assert all(key.startswith("nmrun_") for key in added)
        assert weight.layer is None
        extra += sum(t.nbytes for t in added.values() if id(t) not in before)
        saved = {k: t for k, t in weight.saved().items() if f"nmrun_{k}" not in moments}
        assert sum(t.nbytes for t in saved.values()) == sum(t.nbytes for t in added.values())
    weights = sum(w.dense.numel() for w in handle.sparse)
    scalars = 8 * len(handle.sparse)  # such as S-STE's scale
    assert extra <= PER_WEIGHT.get(recipe, 4) * weights + scalars
