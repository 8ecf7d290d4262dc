"""What fairseq-train imports: options, an optimizer, and the call of ``nmrun.sparsify``.

fairseq has no hook that sees model and optimizer together before a checkpoint is loaded, so the
options are added to its ``optimization`` group, and ``Trainer._build_optimizer`` is followed by the
call. No annotation here is a text: fairseq reads the types of an option from the class.
"""

import ast
import atexit
import sys
from dataclasses import dataclass, field
from typing import Any

from fairseq import options
from fairseq.dataclass import configs
from fairseq.dataclass.initialize import hydra_init
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
from fairseq.trainer import Trainer

from nmrun import optim
from nmrun.errors import ConfigError, RunError, refuse
from nmrun.patterns import PatternError
from nmrun.step.handle import Handle
from nmrun.step.sparsify import sparsify


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
    """Read keyword arguments.

    Args:
        text: as between the parentheses of a call, with literal values.

    Returns:
        The values by name.

    Raises:
        ConfigError: for anything else.
    """
    try:
        call = ast.parse(f"_({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or None in [k.arg for k in call.keywords]:
            raise ValueError
        return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        raise ConfigError(
            f'--nm-options {text!r}: it takes arguments as of a call, such as "decay=0.1, '
            "exclude='decoder.*'\""
        ) from None


def check(cfg: Any) -> None:
    """Refuse what moves or averages other tensors than the weights.

    Args:
        cfg: of fairseq's trainer.

    Raises:
        ConfigError: with what to use instead.
    """
    common = cfg.common
    if (common.fp16 and not common.memory_efficient_fp16) or (
        common.bf16 and not common.memory_efficient_bf16
    ):
        raise ConfigError(
            "--fp16 and --bf16 step flat copies of the weights, which have no groups of M inputs: "
            "use --amp"
        )
    if cfg.ema.store_ema:
        raise ConfigError(
            "--store-ema averages what the network computes with, and an average of N:M weights is "
            "not N:M: leave it out"
        )


def begin(trainer: Trainer) -> Handle:
    """Make the weights of a fairseq trainer sparse, as its options ask for.

    Args:
        trainer: with its optimizer.

    Raises:
        ValueError: where options or optimizer cannot serve.
        TypeError: for an unknown hyperparameter.
    """
    asked, model, optimizer = trainer.cfg.optimization, trainer._model, trainer._optimizer.optimizer
    chosen = keywords(asked.nm_options)
    if asked.max_update > 0:
        chosen.setdefault("total_steps", asked.max_update)
    try:
        return sparsify(model, optimizer, asked.nm_recipe, asked.nm_pattern, **chosen)
    except ValueError as error:
        if "nmrun.optim." in str(error):
            raise ConfigError(f"{error}: --optimizer nm_adam") from None
        if "needs total_steps" in str(error):
            raise ConfigError(f"{error}: --max-update") from None
        raise


def finish(handle: Handle) -> None:
    """At the end of the process, say where the weights are not what was asked for.

    Args:
        handle: of the training. Checkpoints were written before.
    """
    try:
        handle.finalize()
    except RunError as error:
        refuse([str(error)])


build = Trainer._build_optimizer


def build_and_begin(trainer: Trainer) -> None:
    """Take the place of ``Trainer._build_optimizer``, which it calls."""
    if not trainer.cfg.optimization.get("nm_recipe"):
        build(trainer)
        return
    try:
        check(trainer.cfg)
        build(trainer)
        atexit.register(finish, begin(trainer))
    except (ConfigError, PatternError, TypeError) as error:
        sys.exit(refuse([str(error)]))


Trainer._build_optimizer = build_and_begin
