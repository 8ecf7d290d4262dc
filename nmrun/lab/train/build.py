"""From a config to the parts of a run: device, task, loss, model, optimizer, and the recipe on top."""

from __future__ import annotations

import contextlib
import copy
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nmrun import recipes
from nmrun.errors import ConfigError, refused
from nmrun.fast.measurement import Choice, from_data
from nmrun.kernels import compiler
from nmrun.lab import output, ranks, tasks
from nmrun.lab.keys import options
from nmrun.lab.keys.config import Config
from nmrun.lab.runs.locks import free_gpu
from nmrun.lab.runs.run_folder import activations_of, weights_in
from nmrun.lab.tasks.base import Batch, Categorical, Loss, Task
from nmrun.lab.train import flops, weights
from nmrun.lab.train.checkpoint import seed_everything
from nmrun.lab.train.optimizers import optimizer_of
from nmrun.ranges import START
from nmrun.step.activations import SparseActivations
from nmrun.step.handle import Handle
from nmrun.step.sparsify import sparsify

# parameters: on a CPU smaller networks keep the bits of torch's defaults, larger ones are sped up
LARGE = 1_000_000
# from where on trainer.precision=auto is bf16 on CPUs that multiply such numbers: all weights, and the
# median of the matrices, since a small matrix takes longer to cast than it gains
WORTH_BF16 = 1_000_000, 100_000
BF16_FLAGS = {"avx512_bf16", "amx_bf16"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Parts:
    """What a loop trains with. ``cost`` is that of one item. ``seconds`` is what the recipe's
    beginning took, perhaps with a search for a permutation. ``events`` are what a trial found out.
    """

    task: Task
    loss: Loss
    model: nn.Module
    optimizer: torch.optim.Optimizer
    handle: Handle
    device: torch.device
    precision: str
    total_steps: int
    cost: flops.Flops
    activations: SparseActivations
    seconds: float
    accelerated: list[Choice] = field(default_factory=list)
    events: Sequence[str] = ()


def prepare(config: Config) -> torch.device:
    """Seed everything, and choose the device. ConfigError for one that is not there."""
    trainer = config.trainer
    if trainer.threads is not None:
        torch.set_num_threads(trainer.threads)
    # Reproducible bits where torch can give them: always on a CPU with the same number of threads,
    # mostly on a GPU.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # use_deterministic_algorithms does the same and imports the compiler
    torch.set_deterministic_debug_mode("warn" if trainer.deterministic else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs a pass over new tensors
    seed_everything(config.seed)
    return device_of(trainer.device)


def device_of(name: str) -> torch.device:
    """The device of ``auto``, ``cpu``, ``cuda`` or ``free``. It becomes torch's current device."""
    if name in ("cuda", "free") and not torch.cuda.is_available():
        raise ConfigError(
            f"trainer.device={name}: torch sees no CUDA device here; auto takes what there is"
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    number = free_gpu(torch.cuda.device_count()) if name == "free" else ranks.local_rank()
    # for clocks, and for libraries that use the current device
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def precision_of(name: str, device: torch.device, parameters: Iterable[nn.Parameter] = ()) -> str:
    """``fp32``, ``bf16`` or ``fp16``; ``auto`` is ``bf16`` where that trains these parameters
    faster."""
    if name != "auto":
        return name
    faster = False
    if device.type == "cuda":
        faster = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu" and BF16_FLAGS & compiler.processor_flags():
        sizes = [p.numel() for p in parameters if p.dim() > 1]
        weights, matrix = WORTH_BF16
        faster = sum(sizes) >= weights and statistics.median(sizes) >= matrix
    return "bf16" if faster else "fp32"


def build(config: Config, total_steps: int | None = None) -> Parts:
    """Build as :func:`assembled`, with faster products as of :func:`accelerated`."""
    return accelerated(config, assembled(config, total_steps), None)


def assembled(
    config: Config, total_steps: int | None = None, precision: str | None = None
) -> Parts:
    """Seed everything, choose device and precision, and build. ConfigError for what only the built
    model shows.

    Args:
        total_steps: None: those of ``trainer.steps``, ``trainer.epochs`` or a budget of FLOPs.
        precision: that of a run that goes on; None: what ``trainer.precision`` says here.
    """
    trainer = config.trainer
    device = prepare(config)
    task = tasks.build(config, device)
    if in_shards := trainer.distributed == "fsdp":
        from nmrun.lab.train import fsdp  # imported here, since it takes half a second
    if in_shards and ranks.world() > 1:
        model, whole = fsdp.build(config, task, device)
    else:
        model = whole = weights.network(config, task).to(device)
    precision = precision or precision_of(trainer.precision, device, whole.parameters())
    faster = device.type == "cpu" or precision != "fp32"
    if faster and not in_shards and not _is_small_on_cpu(model.parameters(), device):
        # the groups of a convolution's mask are contiguous then too; sums are in another order
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    loss = task.loss if trainer.distill is None else taught(config, task, model)
    optimizer = optimizer_of(config.optimizer, model)
    for key, place in options.weights_named(config.plain).items():
        if key.startswith("recipe."):  # the others have been read
            weights.check(place, f"{key}={place}")
    name = config.recipe.target or config.recipe.name
    kind = recipes.find(name)
    with refused("", TypeError):
        recipes.check_names(name, kind, config.recipe.options)
    # what else the user's own code raises is an error in it, of which run.log has the traceback
    with refused("", *(() if config.recipe.target else (ValueError, TypeError))):
        if total_steps is None:
            total_steps = _planned_steps(config, task, whole, device)
            if not (trainer.budget or "").startswith("seconds:"):  # whose length a trial says
                check_length(config, total_steps, task.batches_per_epoch)
        began = time.perf_counter()
        handle = _attached(config, model, optimizer, total_steps)
        seconds = time.perf_counter() - began
        activations = _activations(config, model, total_steps)
        recipe = handle.recipe
        if trainer.patience is not None and recipe.dense_steps >= total_steps:
            raise ConfigError(
                f"trainer.patience={trainer.patience}: {recipe.name} is N:M at its last step alone, "
                "and so cannot end before it"
            )
        if in_shards:
            fsdp.check(config, handle.recipe, task, precision)
    if not in_shards and config.optimizer.name != "custom":
        fuse(optimizer, device)
    has_teacher = trainer.distill is not None
    return Parts(
        task=task,
        loss=loss,
        model=model,
        optimizer=optimizer,
        handle=handle,
        device=device,
        precision=precision,
        total_steps=total_steps,
        cost=flops.count(whole, task, handle.sparse, has_teacher, activations),
        activations=activations,
        seconds=seconds,
    )


def _planned_steps(config: Config, task: Task, whole: nn.Module, device: torch.device) -> int:
    """The steps of a run by its config. A budget of FLOPs takes a trial, which leaves no trace."""
    trainer, batches = config.trainer, task.batches_per_epoch
    steps = trainer.steps or trainer.epochs * batches
    if not (trainer.budget or "").startswith(("flops:", "hardware_flops:")):
        return steps
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        twin = copy.deepcopy(whole)
        trial = _attached(config, twin, optimizer_of(config.optimizer, twin), steps)
    activations = _activations(config, twin, steps)
    cost = flops.count(twin, task, trial.sparse, trainer.distill is not None, activations)
    return flops.steps_in(str(trainer.budget), cost, trial.recipe, steps, task.mean_size())


def check_length(config: Config, steps: int, batches: int) -> None:
    """Raise ConfigError where a run of so many steps is too few epochs of ``batches`` steps each: a
    budget of less than one epoch, or fewer than those that are averaged."""
    trainer, epochs = config.trainer, f"{steps / batches:.2g} epochs"
    if trainer.budget is not None and trainer.steps is None and steps < batches:
        raise ConfigError(f"trainer.budget={trainer.budget} is {epochs}; it takes one or more")
    if trainer.average > -(-steps // batches):
        raise ConfigError(f"trainer.average={trainer.average}: the run has {epochs}")


def _attached(
    config: Config, model: nn.Module, optimizer: torch.optim.Optimizer, total_steps: int
) -> Handle:
    trainer, recipe = config.trainer, config.recipe
    return sparsify(
        model,
        optimizer,
        recipe=recipes.find(recipe.target or recipe.name)(**recipe.options),  # names are checked
        pattern=config.pattern or "2:4",  # unused by the dense recipe
        total_steps=total_steps,
        include=config.model.include,
        exclude=config.model.exclude,
        overrides=config.sparsity.overrides,
        pad=config.sparsity.pad,
        mvue=trainer.mvue,
        fp8=trainer.fp8,
        input_gradient=trainer.input_gradient,
    )


def _activations(config: Config, model: nn.Module, total_steps: int) -> SparseActivations:
    trainer = config.trainer
    return SparseActivations(
        model,
        trainer.activations,
        total_steps=total_steps,
        dense_start=trainer.activations_dense_start,
        dense_end=trainer.activations_dense_end,
    )


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    if precision == "fp32":  # to enter torch's, switched off, costs each micro-batch some time
        return contextlib.nullcontext()
    return torch.autocast(device.type, DTYPES[precision])


def fuse(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Let one kernel do the whole step: torch's, and for sparse weights nmrun's own where it can.
    It rounds differently, so small networks on a CPU are left alone."""
    if _is_small_on_cpu((p for group in optimizer.param_groups for p in group["params"]), device):
        return
    for group in optimizer.param_groups:
        group["fused"] = True


def _is_small_on_cpu(parameters: Iterable[nn.Parameter], device: torch.device) -> bool:
    return device.type == "cpu" and sum(p.numel() for p in parameters) < LARGE


def accelerated(config: Config, parts: Parts, times: Mapping[str, Any] | None) -> Parts:
    """Give layers the products that are faster, by ``times`` where the run has chosen by these
    before (``acceleration`` of its checkpoint): measured again they might choose others, with other
    roundings. To measure may take minutes."""
    trainer, model, device = config.trainer, parts.model, parts.device
    if trainer.acceleration == "auto" and _is_small_on_cpu(model.parameters(), device):
        why_not = "small networks are left alone"
        untouched = [Choice(weight.name, None, why_not) for weight in parts.handle.sparse]
        return replace(parts, accelerated=untouched)
    # a tenth of a second, which small networks need not wait for
    from nmrun.fast import acceleration
    from nmrun.fast.cpu.activations import pack_activations

    in_shards = ranks.world() > 1 and trainer.distributed == "fsdp"
    why_not = ""
    if in_shards and acceleration.is_24(device):
        why_not = "with trainer.distributed=fsdp weights are in shards"

    def pass_once() -> None:
        with autocast(device, parts.precision):
            count = trainer.accumulate * ranks.world()
            batch = parts.task.micro_batches(0, 0, count, range(1))[0]
            parts.task.loss(model.eval(), batch)
        model.train()

    mode, accumulate, known = trainer.acceleration, trainer.accumulate, from_data(times or {})
    clips = trainer.clip is not None
    choices = acceleration.accelerate(
        parts.handle, pass_once, mode, accumulate, why_not, clips, known, output.waiting
    )
    if device.type == "cpu":
        sparse, activations = parts.handle.sparse, parts.activations
        choices += pack_activations(
            model, activations, pass_once, choices, sparse, mode, accumulate, known
        )
    return replace(parts, accelerated=choices)


# --- a teacher ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distilled:
    """A task's loss with a teacher's term, ``trainer.distill``: of a network like the one that is
    trained, frozen, which says more of a batch than its labels.

    After Hinton et al. 2015 (arXiv 1503.02531, section 2). With the student's logits z, the
    teacher's v and the temperature T::

        (1 - weight) * loss(z) + weight * T^2 * KL(softmax(v / T) || softmax(z / T))

    T^2 keeps the size of the second term's gradient when T changes. The Adaptive Sparse Trainer
    (arXiv 2407.20584) retrains sparse networks so, with the dense network that it begins with as the
    teacher: its code has a weight of 0.67 and a T of 2, the defaults.
    """

    task: Categorical
    teacher: nn.Module
    weight: float
    temperature: float

    def __call__(self, model: Any, batch: Batch) -> Tensor:
        logits = self.task.logits(model, batch)
        with torch.no_grad():
            teacher_logits = self.task.logits(self.teacher, batch)
        term = divergence(logits, teacher_logits, self.temperature)
        return (1 - self.weight) * self.task.loss_of(logits, batch) + self.weight * term


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """``T^2 * KL(softmax(teacher / T) || softmax(student / T))`` in float32, of logits (...,
    classes)."""
    log_student, log_teacher = (
        functional.log_softmax(each.flatten(0, -2).float() / temperature, -1)
        for each in (student, teacher)
    )
    term = functional.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True)
    return temperature**2 * term


def taught(config: Config, task: Task, model: nn.Module) -> Distilled:
    """The loss with a teacher's term. ``model`` is as it begins; it is copied for a teacher.

    ConfigError for a task without logits over classes, and for a teacher that is not there or of
    another architecture.
    """
    trainer = config.trainer
    assert trainer.distill is not None
    setting = f"trainer.distill={trainer.distill}"
    if trainer.distributed == "fsdp":
        raise ConfigError(
            f"{setting} keeps a whole teacher in every process, and trainer.distributed=fsdp keeps "
            "shards: use trainer.distributed=ddp"
        )
    if not isinstance(task, Categorical) or task.inputs.get("classes") == 1:
        raise ConfigError(
            f"{setting} compares distributions over classes or tokens, and the task of "
            f"dataset={config.dataset.name} has none"
        )
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    if trainer.distill != START:
        alike = ("heads", "activation", "pooling")
        weights.load(teacher, config, trainer.distill, setting, alike)
        SparseActivations(teacher, activations_of(weights_in(trainer.distill)[0].config))
    return Distilled(task, teacher, trainer.distill_weight, trainer.distill_temperature)
