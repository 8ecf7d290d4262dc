"""``nmrun.sparsify``: make the weights of a model N:M sparse inside any training loop."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from nmrun import recipes
from nmrun.errors import ConfigError
from nmrun.patterns import Pattern
from nmrun.products import layer
from nmrun.ranges import FLAG, INPUT_GRADIENTS, check_values, one_of, total_steps_of
from nmrun.recipes.base import Recipe
from nmrun.sparsity.layers import check_module
from nmrun.sparsity.processes import check_shards
from nmrun.sparsity.select import LeftDense, candidates, select, why_none
from nmrun.sparsity.weight import LIVE, SparseWeight
from nmrun.step.handle import Handle
from nmrun.step.resume import (
    check_dense,
    check_saved,
    check_settings,
    dtypes_of,
    saved_settings,
)

# packages whose optimizers wrap another one, and the attribute that holds it
WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "fairseq")
INSIDE = ("optimizer", "_optimizer")


def sparsify(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: str | Recipe = "sr_ste",
    pattern: str | Pattern = "2:4",
    total_steps: int | None = None,
    *,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = "auto",
    overrides: Mapping[str, str | Pattern] | None = None,
    mvue: str | Pattern | None = None,
    fp8: bool = False,
    pad: bool = False,
    input_gradient: str = "exact",
    dims: Mapping[str, int] | None = None,
    **hyperparameters: Any,
) -> Handle:
    r"""Train ``model`` with N:M sparse weights: call this once, then train as always.

    ::

        optimizer = nmrun.optim.AdamW(model.parameters(), lr=1e-3)
        handle = nmrun.sparsify(model, optimizer, recipe="step", pattern="2:4", total_steps=T)
        for batch in loader:
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.finalize()   # checked: plain parameters, exactly 2:4

    From here on the parameters are the projected weights; in a dense phase of the recipe they are
    the dense ones. The dense weights, the recipe's clock and its tensors are in the optimizer's
    state, so a checkpoint of model and optimizer is complete. If the optimizer has loaded the state
    of such a training, that training goes on. Everything happens in hooks of ``optimizer.step``:
    gradient accumulation, clipping, ``torch.amp.GradScaler`` and closures need no change.

    Args:
        model: any module; no name, class or parameter of it is replaced.
        optimizer: the one that steps the model's parameters, or a wrapper around it (accelerate,
            Lightning, fairseq).
        recipe: a name (``asp``, ``ste``, ``sr_ste``, ``step``, ``s_ste``, ...), the dotted path of
            a subclass of :class:`nmrun.recipes.base.Recipe`, or a recipe such as
            ``STEP(switch=0.25)``.
        pattern: at most N non-zeros in every M consecutive weights along the input dimension, any 1
            <= N <= M. ``"64:2:8"`` is V:N:M (:class:`nmrun.patterns.Pattern`).
        total_steps: optimizer steps of the whole run. Recipes with phases need it.
        include: regular expressions for whole module names. By default every weight of a known
            layer whose inputs are a multiple of M is sparse; ``handle.left_dense`` says why the
            others are not.
        exclude: likewise, of modules that stay dense. By default (``"auto"``) these are the first
            layer and the heads; ``None`` excludes none.
        overrides: other patterns for some layers, by such expressions: ``{"layer3\..*": "1:8",
            "fc": "dense"}``. The first match counts, and it wins over ``exclude``.
        mvue: an N:M pattern. Sparse linear layers compute their weight gradients from an unbiased
            estimate of the output gradient, N:M along the tokens (S-STE, arXiv 2409.09099). It
            works with any recipe, in training mode, outside dense phases.
        fp8: round the operands of these layers' three products to FP8, simulated; likewise.
        pad: also make layers sparse whose inputs are not a multiple of M. Their last group is
            short.
        input_gradient: how sparse layers compute the gradient of their input. ``exact``: with the
            forward weight. ``transposable``: likewise, with masks that are N:M along the outputs as
            well; layers whose outputs M does not divide stay dense. ``double_prune``: with the
            forward weight pruned once more along the outputs (SLoPe, arXiv 2405.16325). ``mvue``:
            with an unbiased N:M estimate of it along the outputs, a new one in every backward pass
            (S-STE, table 3).
        dims: the dimension that groups run along, by regular expressions for whole parameter names,
            for weights of layers that nmrun does not know (``{"experts\..*": 1}``).
        hyperparameters: the recipe's own, under the names of its paper.

    Raises:
        ConfigError: (a ValueError) for an unknown recipe, pattern or value; a model whose weights
            cannot be sparse, or are already; an optimizer that the recipe cannot work with; and the
            loaded state of another training. Model and optimizer are unchanged then.
        TypeError: for an unknown hyperparameter.
    """
    pattern, estimate = Pattern.parse(pattern), None if mvue is None else Pattern.parse(mvue)
    recipe = recipes.build(recipe, hyperparameters, inspect.signature(sparsify).parameters)
    check_values(
        {"input_gradient": one_of(*INPUT_GRADIENTS), "fp8": FLAG, "pad": FLAG},
        {"input_gradient": input_gradient, "fp8": fp8, "pad": pad},
    )
    recipe.begin(pattern, total_steps_of(total_steps))
    check_module(model, "sparsify")
    optimizer = unwrapped(optimizer)
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ConfigError(
            "FullyShardedDataParallel (FSDP1) flattens the weights: use fully_shard (FSDP2)"
        )
    _refuse_second(model, optimizer)
    _refuse_masked(model)
    if recipe.name == "dense":
        weights = candidates(model, dims)
        left_dense = [LeftDense(c.name, c.shape, "recipe dense") for c in weights]
        return Handle(optimizer, recipe, [], left_dense, model)
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise ConfigError(
            "maximize=True turns the gradient that a recipe sees around, and its decay would grow "
            "pruned weights: minimize the negative"
        )
    if input_gradient == "transposable":
        recipe.make_transposable()
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    entries, left_dense = select(
        model, pattern, include, exclude, owned, overrides, recipe.refuses, pad, dims
    )
    if not entries:
        raise ConfigError(
            f"no weight of this model can be {pattern} sparse ({why_none(left_dense)})"
        )
    saved = saved_settings(optimizer.param_groups)
    sparse = [SparseWeight(entry) for entry in entries]
    if blocks := [weight.pattern for weight in sparse if weight.pattern.v > 1]:
        recipe.check_blocks(blocks[0])
    by_fsdp = any(hasattr(module, "reshard") for module in model.modules())
    across = "input_gradient=double_prune" if input_gradient == "double_prune" else ""
    check_shards(sparse, f"recipe {recipe.name}" if recipe.looks_across_rows else across, by_fsdp)
    undo = _Undo(model, optimizer, recipe, sparse)
    handle: Handle | None = None
    try:
        if saved is not None:
            check_settings(saved, recipe, sparse)
            for weight in sparse:
                weight.pop_state(optimizer, dtypes_of(saved))
            check_dense(saved, sparse)
            tensors = {weight.name: weight.saved() for weight in sparse}
            for weight in sparse:
                weight.clear()  # attach() begins with dense weights, and would overwrite these
        recipe.prepare(model)
        recipe.attach(sparse, optimizer)
        _install_products(recipe, sparse, estimate, fp8, input_gradient)
        if saved is not None:
            for weight in sparse:
                for key, value in tensors[weight.name].items():
                    weight.restore(key, value)
            recipe.load_state_dict(saved["state"])
        handle = Handle(optimizer, recipe, sparse, left_dense, model)
        check_saved(optimizer, sparse)
        return handle
    except BaseException:
        if handle is not None:
            handle.abandon()
        undo()
        raise


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside the wrappers of accelerate, Lightning or fairseq. Raises
    ConfigError for one that cannot serve."""
    while _package(optimizer) in WRAPPERS:
        inner = next((vars(optimizer)[key] for key in INSIDE if key in vars(optimizer)), None)
        if inner is None or inner is optimizer:
            break
        optimizer = inner
    if why := _unfit(optimizer):
        raise ConfigError(f"{type(optimizer).__name__} {why}")
    stepping: torch.optim.Optimizer = optimizer
    return stepping


def _package(thing: object) -> str:
    return type(thing).__module__.partition(".")[0]


def _unfit(optimizer: Any) -> str:
    """Why an optimizer cannot serve, as what follows its name; empty where it can."""
    if not isinstance(optimizer, torch.optim.Optimizer) or "state" not in vars(optimizer):
        if _package(optimizer) == "deepspeed":
            return "steps flat copies of the weights, which have no groups of M inputs: use DDP, or fully_shard (FSDP2)"
        return "is no torch optimizer: give sparsify the one that steps"
    if isinstance(optimizer, torch.optim.LBFGS):
        return "evaluates its closure several times a step, and masks change once a step: use SGD or one of the Adam kind"
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        return "leaves the dense weights out of its state dict, and a resume would lose them: use fully_shard (FSDP2)"
    if "_optimizer_state_dict_pre_hooks" not in vars(optimizer):
        return "is not made by torch's constructor, so its steps cannot be followed: use its base optimizer alone"
    if hasattr(optimizer, "train") and hasattr(optimizer, "eval"):
        return "exchanges the weights between train() and eval(), which nmrun would take for new ones: use one with a schedule"
    if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
        return "moves weights between two backward passes, which nmrun would take for an update: use its base optimizer"
    return ""


def _refuse_second(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    hooks = optimizer._optimizer_step_pre_hooks.values()
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    live = [n for n, p in model.named_parameters() if LIVE.get(id(p)) is p and id(p) in owned]
    if live or any(hasattr(hook, "nmrun") for hook in hooks):
        raise ConfigError(
            f"{live[0] if live else 'another model of this optimizer'} is sparse already: call "
            "finalize() on its handle first, or sparsify once, for nn.ModuleList([first, second])"
        )


def _refuse_masked(model: nn.Module) -> None:
    """Refuse ModelOpt's layers, which multiply their weight by a mask whenever it is read."""
    for name, module in model.named_modules():
        by = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
        if "modelopt" in by and getattr(module, "_weight_mask", None) is not None:
            raise ConfigError(
                f"{name or 'the model'} has a mask of ModelOpt's: make it a plain layer first "
                "(modelopt.torch.sparsity.export)"
            )


def _install_products(
    recipe: Recipe, sparse: Sequence[SparseWeight], mvue: Pattern | None, fp8: bool, grad: str
) -> None:
    left_alone = {}
    if mvue is not None or fp8:
        left_alone["mvue and fp8"] = layer.install(sparse, mvue, fp8)
    if grad in ("double_prune", "mvue"):
        if recipe.transposable or any(weight.dependents for weight in sparse):
            raise ConfigError(
                f"{recipe.name} makes the input gradient N:M by itself: input_gradient={grad} is "
                "for other recipes"
            )
        make = layer.prune_again if grad == "double_prune" else layer.estimate_again
        left_alone[f"input_gradient={grad}"] = make(sparse)
    for option, names in left_alone.items():
        says = f"{option} can change nothing at {', '.join(names)}"
        if len(names) == len(sparse):
            raise ConfigError(
                f"{says}: it is for linear layers (double_prune for convolutions without groups too) "
                "with groups along the inputs, and outputs in whole groups of M"
            )
        if names:
            recipe.say(says)


class _Undo:
    """Restores model and optimizer after :func:`sparsify` failed."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        sparse: Sequence[SparseWeight],
    ) -> None:
        self.model, self.optimizer, self.recipe = model, optimizer, recipe
        self.groups = list(optimizer.param_groups)
        self.states = {id(w): dict(optimizer.state.get(w.parameter, {})) for w in sparse}
        self.values = [(w, w.parameter.data, w.parameter.detach().clone()) for w in sparse]

    def __call__(self) -> None:
        if self.recipe.reordered:
            from nmrun.permutation.permute import put_back  # torch.fx takes half a second

            put_back(self.model, self.recipe.reordered, self.optimizer)
        with torch.no_grad():
            for weight, memory, values in self.values:
                weight.parameter.data = memory
                weight.parameter.copy_(values)
                layer.uninstall(weight)
                if state := self.states[id(weight)]:
                    self.optimizer.state[weight.parameter] = state
                else:
                    self.optimizer.state.pop(weight.parameter, None)
        self.optimizer.param_groups[:] = self.groups
