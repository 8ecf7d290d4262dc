"""The keys of the config's groups and which values they take.

There is a class for each group, or for each of its kinds. Data sets and models have modules of
their own.

Defaults are in ``conf/``, which Hydra composes; here are none, so that each stands once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

from nmrun.ranges import (
    ACCELERATION,
    ACTIVATIONS,
    BETAS,
    BUDGET,
    CHECKPOINTS,
    COMPILE,
    DECAYED,
    EVALUATIONS,
    FLAG,
    FRACTION,
    INPUT_GRADIENTS,
    LOGGERS,
    OPTIONAL_TEXT,
    PATTERN,
    RATIOS,
    SEED,
    SEEDS,
    TAGS,
    TEXT,
    number,
    one_of,
    whole,
)


@dataclass(frozen=True)
class Group:
    """A group of keys, checked."""

    def values(self) -> dict[str, Any]:
        """The keys beside the name, with their values."""
        return {
            key.name: getattr(self, key.name)
            for key in dataclasses.fields(self)
            if key.name != "name"
        }


@dataclass(frozen=True)
class Named(Group):
    """A group of which there are several kinds, told apart by ``name``."""

    name: str

    def mapping(self) -> dict[str, Any]:
        """The group as its YAML file has it."""
        return {"name": self.name, **self.values()}


@dataclass(frozen=True)
class Run(Group):
    """The keys that are in no group."""

    seed: Annotated[int, SEED]
    seeds: Annotated[list[int] | None, SEEDS]
    init: Annotated[str | None, OPTIONAL_TEXT]
    output_dir: Annotated[str, TEXT]
    resume: Annotated[bool, FLAG]
    force: Annotated[bool, FLAG]
    dry: Annotated[bool, FLAG]


@dataclass(frozen=True)
class Sparsity(Group):
    """The ratio, which is checked as a pattern, and the layers that have another one."""

    n: int | None
    m: int | None
    v: Annotated[int, whole(1)]
    overrides: Annotated[dict[str, str] | None, RATIOS]
    pad: Annotated[bool, FLAG]


@dataclass(frozen=True)
class Recipe(Named):
    """A recipe: its hyperparameters are in ``options``, as the recipe's class knows them.

    ``target`` is the class of the user's own, else None.
    """

    target: str | None
    options: dict[str, Any]


@dataclass(frozen=True)
class Optimizer(Named):
    """What all optimizers have."""

    lr: Annotated[float, number(0, open_low=True)]
    head_lr: Annotated[float | None, number(0, open_low=True, optional=True)]
    weight_decay: Annotated[float, number(0)]
    decay: Annotated[str | None, DECAYED]


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam and AdamW."""

    betas: Annotated[list[float], BETAS]
    eps: Annotated[float, number(0, open_low=True)]


@dataclass(frozen=True)
class SGD(Optimizer):
    """SGD with momentum."""

    momentum: Annotated[float, FRACTION]
    nesterov: Annotated[bool, FLAG]


@dataclass(frozen=True)
class Schedule(Named):
    """A schedule of the learning rate."""


@dataclass(frozen=True)
class Decay(Schedule):
    """A warm-up, then a constant rate or a decay to ``final``."""

    warmup: Annotated[float, FRACTION]
    final: Annotated[float, number(0, 1)]
    cycles: Annotated[int, whole(1)]


@dataclass(frozen=True)
class InverseSqrt(Schedule):
    """A warm-up, then a decay with the inverse square root of the step."""

    warmup_steps: Annotated[int, whole(1)]
    init_lr: Annotated[float, number(0)]


@dataclass(frozen=True)
class Trainer(Group):
    """How long, on what and how exactly a run trains."""

    epochs: Annotated[int, whole(1)]
    steps: Annotated[int | None, whole(1, optional=True)]
    budget: Annotated[str | None, BUDGET]
    batch_size: Annotated[int, whole(1)]
    accumulate: Annotated[int, whole(1)]
    on_oom: Annotated[str, one_of("fail", "halve")]
    clip: Annotated[float | None, number(0, open_low=True, optional=True)]
    precision: Annotated[str, one_of("auto", "fp32", "bf16", "fp16")]
    device: Annotated[str, one_of("auto", "cpu", "cuda", "free")]
    distributed: Annotated[str, one_of("ddp", "fsdp")]
    compile: Annotated[bool | str, COMPILE]
    label_smoothing: Annotated[float, FRACTION]
    distill: Annotated[str | None, OPTIONAL_TEXT]
    distill_weight: Annotated[float, number(0, 1)]
    distill_temperature: Annotated[float, number(0, open_low=True)]
    mvue: Annotated[str | None, PATTERN]
    fp8: Annotated[bool, FLAG]
    input_gradient: Annotated[str, one_of(*INPUT_GRADIENTS)]
    activations: Annotated[str | None, ACTIVATIONS]
    activations_dense_start: Annotated[float, FRACTION]
    activations_dense_end: Annotated[float, FRACTION]
    acceleration: Annotated[str, one_of(*ACCELERATION)]
    evaluate: Annotated[str, one_of("sparse", "dense", "both")]
    test: Annotated[bool, FLAG]
    eval_every: Annotated[int | str, EVALUATIONS]
    log_every: Annotated[int, whole(1)]
    diagnose_every: Annotated[int | None, whole(1, optional=True)]
    checkpoint_every: Annotated[int | str, CHECKPOINTS]
    average: Annotated[int, whole(1)]
    limit_batches: Annotated[int | None, whole(1, optional=True)]
    limit_evaluation: Annotated[int | None, whole(1, optional=True)]
    threads: Annotated[int | None, whole(1, optional=True)]


@dataclass(frozen=True)
class Track(Named):
    """Where metrics go beside ``metrics.jsonl``: to the loggers of ``also`` alone."""

    also: Annotated[list[str], LOGGERS]
    tags: Annotated[list[str], TAGS]


@dataclass(frozen=True)
class WandB(Track):
    """Weights & Biases."""

    project: Annotated[str, TEXT]
    entity: str | None
    mode: Annotated[str, one_of("auto", "online", "offline")]
    group: str | None
    notes: Annotated[str | None, OPTIONAL_TEXT]
    git: Annotated[bool, FLAG]
    console: Annotated[bool, FLAG]
    system: Annotated[bool, FLAG]


@dataclass(frozen=True)
class MLflow(Track):
    """MLflow."""

    project: Annotated[str, TEXT]


OPTIMIZERS: dict[str, type[Optimizer]] = {"adam": Adam, "adamw": Adam, "sgd": SGD}
SCHEDULES: dict[str, type[Schedule]] = {
    **dict.fromkeys(("constant", "cosine", "linear"), Decay),
    "inverse_sqrt": InverseSqrt,
}
TRACKS: dict[str, type[Track]] = {
    **dict.fromkeys(("local", "tensorboard"), Track),
    "wandb": WandB,
    "mlflow": MLflow,
}
