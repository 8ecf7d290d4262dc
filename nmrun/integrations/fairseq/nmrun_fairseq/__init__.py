"""What fairseq-train imports: options, an optimizer, and the call of ``nmrun.sparsify``.

fairseq has no hook that sees model and optimizer together before a checkpoint is loaded. So the
options join its ``optimization`` group, and the call follows ``Trainer._build_optimizer``. It has
no hook at the end either: the end of the recipe follows fairseq-train's ``main``. No annotation
here is a text: fairseq reads the types of an option from the class.
"""

import ast
import contextlib
import importlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils, options
from fairseq.dataclass import configs
from fairseq.dataclass.initialize import hydra_init
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
from fairseq.trainer import Trainer

from nmrun import optim
from nmrun.errors import ConfigError, RunError, refuse, refused
from nmrun.integrations.training import Training, warn_if_late
from nmrun.step.handle import Handle


@dataclass
class Optimization(configs.OptimizationConfig):
    """fairseq's options of the optimization, and nmrun's."""

    nm_recipe: str = field(
        default="", metadata={"help": "nmrun: train N:M sparse weights by this recipe"}
    )
    nm_pattern: str = field(default="2:4", metadata={"help": "nmrun: the N:M pattern"})
    nm_options: str = field(
        default="",
        metadata={
            "help": "nmrun: hyperparameters and other arguments of nmrun.sparsify, as "
            "\"switch=0.3, exclude='decoder.*'\""
        },
    )


options.OptimizationConfig = Optimization
group = configs.FairseqConfig.__dataclass_fields__["optimization"]
group.type = group.default = configs.FairseqConfig.__annotations__["optimization"] = Optimization
hydra_init()


@register_optimizer("nm_adam", dataclass=FairseqAdamConfig)
class NMAdam(FairseqAdam):
    """``nmrun.optim.AdamW``, under the options of fairseq's ``adam``: what recipe ``step`` needs."""

    def __init__(self, cfg: FairseqAdamConfig, params: Any) -> None:
        FairseqOptimizer.__init__(self, cfg)
        self._optimizer = optim.AdamW(params, **self.optimizer_config)


def keywords(text: str) -> dict[str, Any]:
    """Read keyword arguments with literal values, as between the parentheses of a call. Raises
    ConfigError for anything else."""
    takes = "it takes arguments as of a call, such as \"decay=0.1, exclude='decoder.*'\""
    with refused(f"--nm-options {text!r}: {takes}: ", SyntaxError, ValueError):
        call = ast.parse(f"dict({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("an argument without a name")
        return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}


def check(cfg: Any) -> None:
    """Refuse what moves or averages other tensors than the weights. Raises ConfigError with what to
    use instead."""
    common = cfg.common
    flat = (common.fp16 and not common.memory_efficient_fp16) or (
        common.bf16 and not common.memory_efficient_bf16
    )
    if flat or cfg.ema.store_ema:
        raise ConfigError(
            "--fp16, --bf16 and --store-ema step or average other tensors than the weights, which "
            "are not N:M: use --amp, without an average"
        )


def begin(trainer: Trainer, planned: int | None, made: int = 0) -> Handle:
    """Make the weights of a fairseq trainer sparse, as its options ask for; ``made`` of the
    ``planned`` updates are of a dense training before it. Raises ConfigError where options or
    optimizer cannot serve, TypeError for an unknown hyperparameter."""
    config, arguments = trainer.cfg.optimization, keywords(trainer.cfg.optimization.nm_options)
    total = arguments.pop("total_steps", None)
    training = Training(config.nm_recipe, config.nm_pattern, total, **arguments)
    return training._begin(trainer._model, trainer._optimizer.optimizer, planned, made=made)


def updates(trainer: Trainer) -> int | None:
    """After how many updates ``--max-update`` or ``--max-epoch`` ends the training; None without."""
    config = trainer.cfg.optimization
    limits = [config.max_update] if config.max_update > 0 else []
    if config.max_epoch > 0:
        # data that are read twice would begin their first epoch twice
        fresh = trainer.cfg.dataset.train_subset not in trainer.task.datasets
        epoch = trainer.get_train_iterator(1, load_dataset=fresh, disable_iterator_cache=fresh)
        batches, groups = len(epoch), config.update_freq
        rounded = math.floor if config.skip_remainder_batch else math.ceil
        in_epochs = [groups[min(e, len(groups) - 1)] for e in range(config.max_epoch)]
        limits.append(sum(rounded(batches / group) for group in in_epochs))
    return min(limits, default=None)


def compare_anew(trainer: Trainer, handle: Handle) -> None:
    """Let only sparse models compete for the best: when the weights become sparse, the comparison
    begins anew, and so does the count of early stopping. Files of ``--keep-best-checkpoints``
    are renamed then, since fairseq compares by their names."""
    was_sparse, folder = False, Path(trainer.cfg.checkpoint.save_dir)

    def before(*_: Any) -> None:
        nonlocal was_sparse
        was_sparse = handle.is_sparse
        warn_if_late(handle, trainer.get_num_updates())

    def after(*_: Any) -> None:
        if was_sparse or not handle.is_sparse:
            return
        for compared in (checkpoint_utils.save_checkpoint, command.should_stop_early):
            vars(compared).pop("best", None)
        if trainer.should_save_checkpoint_on_current_rank:
            for path in folder.glob("checkpoint.best_*.pt"):
                path.rename(path.with_name(f"dense_{path.name}"))

    handle.optimizer.register_step_pre_hook(before)
    handle.optimizer.register_step_post_hook(after)


# fairseq-train, which may itself be the main program
command: Any = sys.modules["__main__"]
if not hasattr(command, "should_stop_early"):
    command = importlib.import_module("fairseq_cli.train")
stock_build, stock_load = Trainer._build_optimizer, Trainer.load_checkpoint
stock_main, stock_validate = command.main, command.validate
begun: list[Handle] = []  # of the training of this process


def build_and_begin(trainer: Trainer) -> None:
    """Take the place of ``Trainer._build_optimizer``, which it calls."""
    if not trainer.cfg.optimization.get("nm_recipe"):
        stock_build(trainer)
        return
    with refusing():
        check(trainer.cfg)
        stock_build(trainer)
        begun.append(begin(trainer, updates(trainer)))
        compare_anew(trainer, begun[-1])


def load_and_begin(trainer: Trainer, *arguments: Any, **options: Any) -> Any:
    """Take the place of ``Trainer.load_checkpoint``, which it calls, and which makes the optimizer
    before it loads its state. After that of a dense training the recipe begins anew, with the
    updates that are left."""
    loaded, made = stock_load(trainer, *arguments, **options), trainer.get_num_updates()
    if begun and begun[-1].sparse and made and not begun[-1].stepper.resume.loaded:
        early = begun.pop()
        early.abandon()
        with refusing():
            begun.append(begin(trainer, early.recipe.total_steps, made))
            compare_anew(trainer, begun[-1])
    return loaded


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """End the process with a line where options cannot serve."""
    try:
        yield
    except (ConfigError, TypeError) as error:
        sys.exit(refuse([str(error)]))


def validate(*arguments: Any) -> Any:
    """Take the place of fairseq-train's ``validate``, which it calls."""
    with contextlib.ExitStack() as evaluation:
        for handle in begun:
            evaluation.enter_context(handle.evaluation_weights())
        return stock_validate(*arguments)


def main(cfg: Any) -> None:
    """Take the place of fairseq-train's ``main``, which it calls. Raises SystemExit with a line and
    status 1, where the weights are not what was asked for."""
    stock_main(cfg)
    for handle in begun:
        try:
            handle.finalize()
        except RunError as error:
            sys.exit(refuse([str(error)], 1))


Trainer._build_optimizer, Trainer.load_checkpoint = build_and_begin, load_and_begin
command.main, command.validate = main, validate
