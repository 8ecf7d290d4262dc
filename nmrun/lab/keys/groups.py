"""The keys of the run itself, the ratio, the optimizer, the schedule, the trainer and tracking."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from nmrun.errors import raise_all
from nmrun.ranges import (
    ACCELERATION,
    ACTIVATIONS,
    ARGUMENTS,
    BETAS,
    BUDGET,
    CHECKPOINTS,
    CLASS,
    DECAYED,
    EVALUATIONS,
    FLAG,
    FRACTION,
    INPUT_GRADIENTS,
    LOGGERS,
    MILESTONES,
    OPTIONAL_TEXT,
    PATTERN,
    RATIOS,
    SEED,
    TAGS,
    TEXT,
    WEIGHTS,
    number,
    one_of,
    whole,
)


@dataclass(frozen=True)
class Group:
    """A group of keys, checked."""

    @classmethod
    def of(cls, plain: Mapping[str, Any], group: str) -> Self:
        """The class with the values of ``plain``, whose other keys are left out.

        Raises ConfigError with each key of ``group`` that is not there.
        """
        keys = [key.name for key in dataclasses.fields(cls)]
        raise_all([f"{group}.{key}: missing" for key in keys if key not in plain])
        return cls(**{key: plain[key] for key in keys})

    def values(self) -> dict[str, Any]:
        """The keys beside the name, with their values."""
        return {
            key.name: getattr(self, key.name)
            for key in dataclasses.fields(self)
            if key.name != "name"
        }


@dataclass(frozen=True)
class Named(Group):
    """A group of which there are several options, told apart by ``name``."""

    name: str

    def mapping(self) -> dict[str, Any]:
        """The group as a config has it."""
        return {"name": self.name, **self.values()}


@dataclass(frozen=True)
class Run(Group):
    """The keys that are in no group."""

    seed: Annotated[
        int,
        SEED,
        "of the initial weights and the order of batches; the data split has a seed of its own",
    ] = 0
    init: Annotated[
        str | None,
        WEIGHTS,
        "weights that this run begins with: a finished run's folder, its best.safetensors or its "
        "dense.safetensors, or a state dict in a .safetensors, .pt, .pth or .bin file. It is of the "
        "same network, pruned or not; gpt_classifier and gpt_reader take gpt2's. null = the "
        "network's own",
    ] = None
    output_dir: Annotated[
        str,
        TEXT,
        "run folders go to <output_dir>/<dataset>/<model>/<recipe>/<ratio>/s<seed>-<id>/",
    ] = "outputs"
    resume: Annotated[bool, FLAG, "continue an interrupted run from its last checkpoint"] = True
    force: Annotated[bool, FLAG, "run again from the start, even if the run is finished"] = False
    dry: Annotated[
        bool,
        FLAG,
        "print the plan (layers, density, FLOPs) and train nothing; a sweep prints a line for"
        " each run",
    ] = False
    detach: Annotated[
        bool,
        FLAG,
        "with launcher=slurm: submit the jobs and return; nmrun status shows how far they are",
    ] = False


@dataclass(frozen=True)
class Sparsity(Group):
    """sparsity=N:M, any 1 <= N <= M, sets n and m; sparsity=dense makes any recipe the dense run."""

    n: Annotated[int | None, "non-zeros in a group, at most; sparsity=2:8 sets n and m"] = None
    m: Annotated[int | None, "weights in a group; null = no pattern"] = None
    v: Annotated[
        int,
        whole(1),
        "rows that share their columns, in V:N:M patterns; sparsity=64:2:8 sets all three",
    ] = 1
    overrides: Annotated[
        dict[str, str] | None,
        RATIOS,
        "other ratios for some layers, by regular expressions: '{inner.1: 1:8, stem: dense}'",
    ] = None
    pad: Annotated[
        bool,
        FLAG,
        "true: layers whose inputs M does not divide are sparse too, with a shorter last group",
    ] = False


@dataclass(frozen=True)
class RecipeKeys(Named):
    """A recipe, with its hyperparameters in ``options``. ``target`` is the class of the user's own,
    else None.
    """

    target: str | None
    options: dict[str, Any]


@dataclass(frozen=True)
class Optimizer(Named):
    """What all optimizers have."""

    lr: Annotated[float, number(0, open_low=True), "learning rate, which the schedule scales"] = (
        1e-3
    )
    head_lr: Annotated[
        float | None,
        number(0, open_low=True, optional=True),
        "learning rate of the layer named head, which is new where the rest is pretrained; "
        "null = lr",
    ] = None
    weight_decay: Annotated[
        float, number(0), "weight decay of the parameters that optimizer.decay names"
    ] = 0.0
    decay: Annotated[
        str | None,
        DECAYED,
        "which parameters decay: all, or matrices (no bias, norm or position table of images); "
        "null = what is usual with the model",
    ] = None


@dataclass(frozen=True)
class AdamKeys(Optimizer):
    """Adam, weight decay coupled (added to the gradient)."""

    betas: Annotated[
        Sequence[float],
        BETAS,
        "decay rates of the running means of the gradient and of its square",
    ] = (0.9, 0.999)
    eps: Annotated[
        float, number(0, open_low=True), "added to the denominator; AutoSwitch's threshold"
    ] = 1e-8


@dataclass(frozen=True)
class AdamWKeys(AdamKeys):
    """AdamW, weight decay decoupled (shrinks the weights directly)."""

    weight_decay: float = 0.01


@dataclass(frozen=True)
class SGDKeys(Optimizer):
    """SGD with momentum, weight decay coupled."""

    lr: float = 0.05
    weight_decay: float = 5e-5
    momentum: Annotated[
        float, FRACTION, "fraction of the last update that is added to the next one"
    ] = 0.9
    nesterov: Annotated[bool, FLAG, "Nesterov's momentum"] = False


@dataclass(frozen=True, kw_only=True)
class CustomOptimizer(Optimizer):
    """Any optimizer of torch's kind by its class, where the recipe allows it: step, ast and cast need
    Adam's moments.
    """

    target: Annotated[str, CLASS, "the class, such as torch.optim.NAdam or timm.optim.Lion"]
    options: Annotated[
        dict[str, Any] | None,
        ARGUMENTS,
        "further keyword arguments of the class, such as {momentum_decay: 0.004}; null = none",
    ] = None


@dataclass(frozen=True)
class Schedule(Named):
    """A schedule of the learning rate."""


@dataclass(frozen=True)
class Decay(Schedule):
    """A warm-up, then a constant rate or a decay to ``final``."""

    warmup: Annotated[
        float, FRACTION, "fraction of all steps in which the learning rate rises linearly from 0"
    ] = 0.0
    final: Annotated[
        float,
        number(0, 1),
        "learning rate at the end, as a fraction of optimizer.lr (constant: unused)",
    ] = 0.0
    cycles: Annotated[
        int,
        whole(1),
        "repetitions of the schedule, each with its warm-up; 2 with recipe=asp gives its "
        "paper's two trainings",
    ] = 1


@dataclass(frozen=True)
class Constant(Decay):
    """Learning rate: warm-up, then constant."""


@dataclass(frozen=True)
class Cosine(Decay):
    """Learning rate: warm-up, then cosine decay."""


@dataclass(frozen=True)
class Linear(Decay):
    """Learning rate: warm-up, then linear decay."""


@dataclass(frozen=True)
class MultiStep(Schedule):
    """Learning rate: warm-up, then times ``gamma`` at each of ``milestones``."""

    warmup: Annotated[
        float, FRACTION, "fraction of all steps in which the learning rate rises linearly from 0"
    ] = 0.0
    milestones: Annotated[
        Sequence[float], MILESTONES, "the fractions of all steps at which it falls"
    ] = (0.5, 0.75)
    gamma: Annotated[float, number(0, 1, open_low=True), "what it is multiplied by there"] = 0.1


@dataclass(frozen=True, kw_only=True)
class CustomSchedule(Schedule):
    """Any schedule of torch.optim.lr_scheduler that follows the step alone, by its class."""

    target: Annotated[
        str, CLASS, "the class, such as torch.optim.lr_scheduler.CosineAnnealingWarmRestarts"
    ]
    options: Annotated[
        dict[str, Any] | None,
        ARGUMENTS,
        "keyword arguments of the class, such as {T_0: 10}; T_max and total_steps are the run's "
        "length where they are needed and not given; null = none",
    ] = None
    interval: Annotated[
        str, one_of("epoch", "step"), "what its numbers count: epochs, or optimizer steps"
    ] = "epoch"


@dataclass(frozen=True)
class InverseSqrt(Schedule):
    """Learning rate: warm-up, then decay with the inverse square root of the step (Vaswani et al.
    2017, as in fairseq).
    """

    warmup_steps: Annotated[
        int, whole(1), "optimizer steps in which the learning rate rises linearly to optimizer.lr"
    ] = 4000
    init_lr: Annotated[float, number(0), "learning rate of the first step"] = 1e-7


@dataclass(frozen=True)
class Trainer(Group):
    """How long, on what and how exactly a run trains."""

    epochs: Annotated[int, whole(1), "passes over the training data"] = 12
    steps: Annotated[
        int | None,
        whole(1, optional=True),
        "length of the run in optimizer steps, in place of epochs; null = as many as epochs gives",
    ] = None
    budget: Annotated[
        str | None,
        BUDGET,
        "length of the run, in place of epochs: flops:1e12 (multiplications, without those by "
        "zero), hardware_flops:1e12 (as 2:4 tensor cores need), flops:dense or "
        "hardware_flops:dense (as dense training needs for epochs) or seconds:600 (of training, "
        "by a trial)",
    ] = None
    batch_size: Annotated[int, whole(1), "examples in an optimizer step, over all processes"] = 64
    accumulate: Annotated[
        int,
        whole(1),
        "micro-batches that make up a batch; the result is the same up to rounding, but for dropout and "
        "batch norm, which sees one of them at a time",
    ] = 1
    clip: Annotated[
        float | None,
        number(0, open_low=True, optional=True),
        "largest norm of the whole gradient; null = no clipping",
    ] = None
    precision: Annotated[
        str,
        one_of("auto", "fp32", "bf16", "fp16"),
        "auto (bf16 on GPUs that have it, and on CPUs that do for a million weights in matrices of mostly "
        "100,000 or more; else fp32), fp32, bf16, fp16 (with loss scaling)",
    ] = "auto"
    device: Annotated[
        str,
        one_of("auto", "cpu", "cuda", "free"),
        "auto (a GPU where there is one), cpu, cuda, free (waits for a GPU that no other run "
        "with this setting uses)",
    ] = "auto"
    deterministic: Annotated[
        bool,
        FLAG,
        "on a GPU take operations that have the same bits every time, where there are some; false: "
        "faster ones, such as attention's backward pass",
    ] = True
    distributed: Annotated[
        str,
        one_of("ddp", "fsdp"),
        "what each of several processes (torchrun) holds: ddp (the whole model) or fsdp (a "
        "shard, for models larger than a GPU or a host)",
    ] = "ddp"
    compile: Annotated[bool, FLAG, "compile the model by torch.compile (fullgraph)"] = False
    label_smoothing: Annotated[
        float, FRACTION, "share of a label's probability that is spread over all classes"
    ] = 0.0
    distill: Annotated[
        str | None,
        WEIGHTS,
        "teacher, whose term is added to the loss (Hinton et al. 2015): start (the network as"
        " it begins, for pretrained ones) or a finished run of the same network: its folder, or a"
        " file of its weights",
    ] = None
    distill_weight: Annotated[
        float, number(0, 1), "weight of the teacher's term; the task's loss has the rest"
    ] = 0.67
    distill_temperature: Annotated[
        float,
        number(0, open_low=True),
        "temperature of the teacher's term: both networks' logits are divided by it",
    ] = 2.0
    mvue: Annotated[
        str | None,
        PATTERN,
        'N:M pattern such as "2:4": weight gradients of sparse linear layers come from an '
        "unbiased N:M estimate along the tokens",
    ] = None
    fp8: Annotated[
        bool,
        FLAG,
        "round the operands of all products of sparse linear layers to FP8 (e4m3 forward, "
        "e5m2 backward), simulated",
    ] = False
    input_gradient: Annotated[
        str,
        one_of(*INPUT_GRADIENTS),
        "input gradient of sparse layers: exact, or by weights that are N:M along the outputs"
        " too. These are transposable (masks), double_prune (pruned once more, as in SLoPe) "
        "or mvue (an unbiased estimate, as in S-STE's table 3)",
    ] = "exact"
    activations: Annotated[
        str | None,
        ACTIVATIONS,
        'N:M or V:N:M pattern such as "2:4": the outputs of squared ReLUs '
        "(model.activation=relu2) are pruned to it, token by token; null = not",
    ] = None
    activations_dense_start: Annotated[
        float, FRACTION, "fraction of the steps at the start with dense activations"
    ] = 0.0
    activations_dense_end: Annotated[
        float,
        FRACTION,
        "fraction of the steps at the end with dense activations; the final network then has them",
    ] = 0.0
    acceleration: Annotated[
        str,
        one_of(*ACCELERATION),
        "faster products, with the kept weights or activations alone: auto (layer by layer, "
        "where they are right and faster), off, or force (also where slower). One way alone: "
        "packed (weights on a CPU) or cusparselt. On CPUs auto takes "
        "oneDNN for dense products",
    ] = "auto"
    evaluate: Annotated[
        str,
        one_of("sparse", "dense", "both"),
        "weights that are evaluated: sparse, dense (as some papers do; then no epoch is the "
        "best), or both (the dense ones as eval/dense/...)",
    ] = "sparse"
    test: Annotated[
        bool,
        FLAG,
        "evaluate the test split at the end, with the last weights and the best; false = do "
        "not, as in the trials of nmrun tune",
    ] = True
    eval_every: Annotated[
        int | str,
        EVALUATIONS,
        "epochs between evaluations on the validation split, or steps: 200steps",
    ] = 1
    patience: Annotated[
        int | None,
        whole(1, optional=True),
        "evaluations in a row without a new best one after which the run ends, counted while the "
        "weights are N:M; null = it goes to its last step",
    ] = None
    log_every: Annotated[
        int,
        whole(1),
        "optimizer steps between lines of metrics.jsonl; a multiple of it where there would "
        "be more than 20,000 lines",
    ] = 10
    checkpoint_every: Annotated[
        int | str,
        CHECKPOINTS,
        "time between checkpoints (30s, 10min, 2h); each end of an epoch has one too. With a "
        "number of epochs, only the end of every so many has one",
    ] = "10min"
    average: Annotated[
        int,
        whole(1),
        "number of last epochs whose weights, and running statistics of batch norm, are averaged "
        "to the final ones; 1 = those of the last step",
    ] = 1
    limit_batches: Annotated[
        int | None,
        whole(1, optional=True),
        "training batches in an epoch, for debugging; null = all",
    ] = None
    limit_evaluation: Annotated[
        int | None,
        whole(1, optional=True),
        "images, texts, sentences or windows of a text that are evaluated, for debugging; "
        "null = all",
    ] = None
    threads: Annotated[
        int | None, whole(1, 1024, optional=True), "CPU threads; null = what torch chooses"
    ] = None


@dataclass(frozen=True)
class Track(Named):
    """Where metrics go beside ``metrics.jsonl``: to the loggers of ``also`` alone."""

    tags: Annotated[
        Sequence[str], TAGS, "tags of the run, beside recipe, ratio, data set and model"
    ] = ()
    also: Annotated[Sequence[str], LOGGERS, "more loggers: tensorboard, mlflow"] = ()


@dataclass(frozen=True)
class Local(Track):
    """metrics.jsonl only."""


@dataclass(frozen=True)
class TensorBoard(Track):
    """Event files in each run's folder: tensorboard --logdir outputs."""


@dataclass(frozen=True)
class WandB(Track):
    """Weights & Biases: offline until track.mode=online; never a prompt."""

    project: Annotated[
        str | None,
        OPTIONAL_TEXT,
        "project in W&B; null = WANDB_PROJECT in the environment, or nmrun",
    ] = None
    entity: Annotated[str | None, "user or team; null = the one logged in"] = None
    mode: Annotated[
        str,
        one_of("offline", "online"),
        "offline (wandb sync uploads a run), or online for who is logged in; WANDB_MODE in the "
        "environment counts before it",
    ] = "offline"
    group: Annotated[str | None, "null = one group per sweep"] = None
    notes: Annotated[str | None, OPTIONAL_TEXT, "a text beside the run"] = None
    git: Annotated[
        bool, FLAG, "send the commit and the changes of the current folder's checkout"
    ] = False
    console: Annotated[bool, FLAG, "send what the run prints"] = False
    system: Annotated[bool, FLAG, "send statistics of the machine"] = False
    weights: Annotated[
        bool, FLAG, "send the final weights, model.safetensors, as an artifact: model-<id>"
    ] = False


@dataclass(frozen=True)
class MLflow(Track):
    """A server of MLFLOW_TRACKING_URI, or <output_dir>/mlflow.db: mlflow ui --backend-store-uri
    sqlite:///outputs/mlflow.db.
    """

    project: Annotated[str, TEXT, "the experiment"] = "nmrun"
