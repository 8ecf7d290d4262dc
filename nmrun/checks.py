"""Which values the keys of the config take."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nmrun.patterns import Pattern, PatternError


@dataclass(frozen=True)
class Check:
    """What a key takes, in words and as a test; ``convert`` gives equal values one form (1 and 1.0), so that they are one run."""

    allowed: str
    holds: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    options: tuple[str, ...] = ()


def whole(low: int, high: float = math.inf, optional: bool = False) -> Check:
    return Check(
        f"a whole number, {low} {'or more' if high == math.inf else f'to {high}'}" + (", or null" if optional else ""),
        lambda value: (optional and value is None) or (type(value) is int and low <= value <= high),
    )


def number(
    low: float, high: float = math.inf, open_low: bool = False, open_high: bool = False, optional: bool = False
) -> Check:
    def holds(value: Any) -> bool:
        if value is None or type(value) not in (int, float) or not math.isfinite(value):
            return optional and value is None
        return (low < value if open_low else low <= value) and (value < high if open_high else value <= high)

    span = f"{'above' if open_low else 'at least'} {low:g}"
    span += "" if math.isinf(high) else f" and {'below' if open_high else 'at most'} {high:g}"
    return Check(f"a number {span}" + (", or null" if optional else ""), holds, lambda v: None if v is None else float(v))


def one_of(*options: str) -> Check:
    return Check(f"one of {', '.join(options)}", lambda value: value in options, options=options)


def _is_switch(value: Any) -> bool:
    return value in ("auto", "auto_geometric") or number(0, 1, open_low=True, open_high=True).holds(value)


def _is_expressions(value: Any) -> bool:
    try:
        return value is None or all(re.compile(item) for item in ([value] if isinstance(value, str) else value))
    except (re.error, TypeError):
        return False


def _is_pattern(value: Any) -> bool:
    try:
        return value is None or bool(Pattern.parse(value))
    except PatternError:
        return False


def _is_ratios(value: Any) -> bool:
    try:
        return value is None or all(re.compile(str(k)) and (v == "dense" or Pattern.parse(v)) for k, v in value.items())
    except (re.error, AttributeError, ValueError, TypeError):
        return False


def _is_budget(value: Any) -> bool:
    if value in (None, "flops:dense"):
        return True
    try:
        return value.startswith("flops:") and 0 < float(value.removeprefix("flops:")) < math.inf
    except (AttributeError, ValueError):
        return False


INPUT_GRADIENTS = ("exact", "transposable", "double_prune")  # see nmrun.sparsify
ACCELERATION = ("auto", "off", "force", "cusparselt", "cutlass", "one_pass", "cusparselt_fp8")  # see nmrun.acceleration
FLAG = Check("true or false", lambda value: isinstance(value, bool))
COMPILE = Check(
    "true, false, reduce-overhead (CUDA graphs) or max-autotune",
    lambda value: isinstance(value, bool) or value in ("reduce-overhead", "max-autotune"),
)
TEXT = Check("a text", lambda value: isinstance(value, str) and bool(value))
OPTIONAL_TEXT = Check("a text, or null", lambda value: value is None or TEXT.holds(value))
PATH = Check("the path of a file or folder", TEXT.holds)
FRACTION = number(0, 1, open_high=True)
SWITCH = Check("auto, auto_geometric or a fraction of all steps above 0 and below 1", _is_switch)
DECAY = Check(
    "a number at least 0, or auto (t_sr_ste)",
    lambda value: value == "auto" or number(0).holds(value),
    lambda value: value if value == "auto" else float(value),
)
EXPRESSIONS = Check(
    "a regular expression or a list of them", _is_expressions, lambda value: [value] if isinstance(value, str) else value
)
RATIOS = Check(
    "null or regular expressions with a ratio (in YAML in quotes) or dense for each, as in "
    "'sparsity.overrides={inner.1: 1:8, head: dense}'",
    _is_ratios,
    lambda value: (value and {str(k): v if v == "dense" else str(Pattern.parse(v)) for k, v in value.items()}) or None,
)
BETAS = Check(
    "two numbers from 0 to below 1",
    lambda value: isinstance(value, list) and len(value) == 2 and all(map(FRACTION.holds, value)),
    lambda value: [float(item) for item in value],
)
SPAN = Check(
    "two numbers above 0",
    lambda value: isinstance(value, list) and len(value) == 2 and all(map(number(0, open_low=True).holds, value)),
    lambda value: [float(item) for item in value],
)
PATTERN = Check(
    "an N:M pattern such as 2:4 (in quotes where it is YAML), or null",
    _is_pattern,
    lambda value: None if value is None else str(Pattern.parse(value)),
)
BUDGET = Check(
    "flops:dense, flops:<number above 0> such as flops:1e12, or null",
    _is_budget,
    lambda value: value if value in (None, "flops:dense") else f"flops:{float(value.removeprefix('flops:'))!r}",
)
WIDTHS = Check(
    "a list of at least two whole numbers, 1 or more",
    lambda value: isinstance(value, list) and len(value) >= 2 and all(map(whole(1).holds, value)),
)
SEEDS = Check(
    "null or a list of different whole numbers, 0 or more, such as [0,1,2]",
    lambda value: (
        value is None
        or (isinstance(value, list) and bool(value) and all(map(whole(0).holds, value)) and len(set(value)) == len(value))
    ),
)

CHECKS: dict[str, Check] = {
    "seed": whole(0),
    "seeds": SEEDS,
    "output_dir": TEXT,
    "resume": FLAG,
    "force": FLAG,
    "dry": FLAG,
    "sparsity.overrides": RATIOS,
    "sparsity.pad": FLAG,
    "dataset.split_seed": whole(0),
    "dataset.val_fraction": number(0, 0.5, open_low=True),
    "dataset.test_fraction": number(0, 0.5, open_low=True),
    "dataset.path": PATH,
    "dataset.resolution": whole(1),
    "dataset.train_size": whole(1, optional=True),
    "dataset.val_size": whole(1, optional=True),
    "dataset.test_size": whole(1, optional=True),
    "dataset.crop_scale": number(0, 1, open_low=True),
    "dataset.workers": whole(0, optional=True),
    "dataset.crop_padding": whole(0),
    "dataset.flip": FLAG,
    "dataset.randaugment": whole(0),
    "dataset.randaugment_magnitude": whole(0, 30),
    "dataset.erasing": number(0, 1),
    "dataset.mixup": number(0),
    "dataset.cutmix": number(0),
    "dataset.context": whole(1),
    "dataset.train": PATH,
    "dataset.val": OPTIONAL_TEXT,
    "dataset.test": OPTIONAL_TEXT,
    "dataset.folder": PATH,
    "dataset.sha256": TEXT,
    "dataset.task": one_of("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"),
    "dataset.held_out": number(0, 0.5),
    "dataset.limit": whole(1, optional=True),
    "dataset.size": whole(1),
    "dataset.max_length": whole(8),
    "dataset.tokenizer": TEXT,
    "dataset.vocabulary": whole(4),
    "dataset.source": OPTIONAL_TEXT,
    "dataset.target": OPTIONAL_TEXT,
    "dataset.subwords": one_of("none", "sentencepiece", "subword_nmt"),
    "dataset.moses": FLAG,
    "dataset.words": whole(1),
    "dataset.longest": whole(2),
    "dataset.max_tokens": whole(1),
    "dataset.beam": whole(1),
    "dataset.length_penalty": number(0),
    "model.pretrained": TEXT,
    "model.pooling": one_of("cls", "mean", "similarity"),
    "model.channels": WIDTHS,
    "model.hidden": WIDTHS,
    "model.layers": whole(1),
    "model.heads": whole(1),
    "model.width": whole(1),
    "model.dropout": FRACTION,
    "model.attention_dropout": FRACTION,
    "model.activation_dropout": FRACTION,
    "model.ffn": whole(1),
    "model.share_embeddings": one_of("auto", "none", "decoder", "all"),
    "model.depth": whole(8),
    "model.form": one_of("auto", "cifar", "imagenet"),
    "model.patch": whole(1, optional=True),
    "model.stochastic_depth": FRACTION,
    "model.name_in_timm": TEXT,
    "model.options": Check(
        "null or keyword arguments such as {drop_path_rate: 0.1}", lambda value: isinstance(value, dict | None)
    ),
    "model.include": EXPRESSIONS,
    "model.exclude": EXPRESSIONS,
    "recipe.prune_at": FRACTION,
    "recipe.permute": FLAG,
    "recipe.decay": DECAY,
    "recipe.switch": SWITCH,
    "recipe.t_min": number(0, 1),
    "recipe.t_max": number(0, 1),
    "recipe.eps_mode": one_of("inside", "outside", "floor"),
    "recipe.bias_correction": FLAG,
    "recipe.interval": whole(1),
    "recipe.candidates": whole(1),
    "recipe.gradient": one_of("ste", "masked"),
    "recipe.dense_end": FRACTION,
    "recipe.tau": number(0, open_low=True, optional=True),
    "recipe.dense": FRACTION,
    "recipe.final": number(0, 1, open_low=True),
    "recipe.grad_mode": one_of("scaled", "ste"),
    "recipe.frames": whole(1),
    "recipe.kind": one_of("mask", "mask_exponential", "structure", "structure_geometric"),
    "recipe.t_i": FRACTION,
    "recipe.t_f": number(0, 1, open_low=True, open_high=True),
    "recipe.kappa": SPAN,
    "recipe.temperature": SPAN,
    "recipe.prior": number(0),
    "recipe.reg": number(0),
    "recipe.lr_mult": number(0, open_low=True),
    "optimizer.lr": number(0, open_low=True),
    "optimizer.head_lr": number(0, open_low=True, optional=True),
    "optimizer.weight_decay": number(0),
    "optimizer.betas": BETAS,
    "optimizer.eps": number(0, open_low=True),
    "optimizer.momentum": FRACTION,
    "optimizer.nesterov": FLAG,
    "schedule.warmup": FRACTION,
    "schedule.final": number(0, 1),
    "schedule.warmup_steps": whole(1),
    "schedule.init_lr": number(0),
    "trainer.epochs": whole(1),
    "trainer.budget": BUDGET,
    "trainer.batch_size": whole(1),
    "trainer.accumulate": whole(1),
    "trainer.clip": number(0, open_low=True, optional=True),
    "trainer.on_oom": one_of("fail", "halve"),
    "trainer.precision": one_of("auto", "fp32", "bf16", "fp16"),
    "trainer.device": one_of("auto", "cpu", "cuda", "free"),
    "trainer.distributed": one_of("ddp", "fsdp"),
    "trainer.compile": COMPILE,
    "trainer.label_smoothing": FRACTION,
    "trainer.mvue": PATTERN,
    "trainer.fp8": FLAG,
    "trainer.input_gradient": one_of(*INPUT_GRADIENTS),
    "trainer.acceleration": one_of(*ACCELERATION),
    "trainer.eval_every": whole(1),
    "trainer.log_every": whole(1),
    "trainer.diagnose_every": whole(1, optional=True),
    "trainer.checkpoint_every": whole(1),
    "trainer.average": whole(1),
    "trainer.limit_batches": whole(1, optional=True),
    "trainer.threads": whole(1, optional=True),
    "track.mode": one_of("auto", "online", "offline"),
    "track.project": TEXT,
}


def near(word: str, options: Iterable[str]) -> str:
    """The option that was probably meant, as a question; else nothing. Swapped letters are the commonest slip, so an anagram wins."""
    options = list(options)
    meant = [option for option in options if sorted(option) == sorted(word)] or difflib.get_close_matches(word, options, 1)
    return f"; did you mean {meant[0]}?" if meant else ""
