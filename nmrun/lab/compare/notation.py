"""How comparisons write names and numbers. Names are as on a command line, or as in papers. Numbers
have their unit, the digits that their spread justifies, and a real minus sign."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nmrun import ranges
from nmrun.lab.keys.options import recipe_facts
from nmrun.patterns import Pattern, PatternError
from nmrun.recipes import RECIPES

MINUS = "\N{MINUS SIGN}"
NEGLIGIBLE = 1e-6  # a spread that is a smaller share of the value is rounding
THOUSANDS = " kMGTPEZY"  # of FLOPs
TIMES = ("seconds", "training_seconds")  # metrics
# of metrics that are compared only if asked for; a task says it of its own metric
LOWER_IS_BETTER = {
    *("loss", "perplexity", "bits_per_token", "bits_per_character", "bits_per_byte"),
    *TIMES,
}
# the labels of a row or of a column, one for each config key that it stands for
Key = tuple[str, ...]

BREAK = re.compile(r"\s*\n\s*")
RESNET = re.compile(r"\bresnet(\d+)$")
LONG = 8  # characters of a number
RECIPE_ORDER = tuple(RECIPES)
PAPERS = {
    "sparsegpt": "SparseGPT",
    "wanda": "Wanda",
    "ria": "RIA",
    "adam": "Adam",
    "adamw": "AdamW",
    "sgd": "SGD",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "fashion_mnist": "Fashion-MNIST",
    "imagenet": "ImageNet",
    "glue": "GLUE",
    "multi30k": "Multi30k",
    "shakespeare": "Tiny Shakespeare",
    "wikitext2": "WikiText-2",
    "wikitext103": "WikiText-103",
    "densenet121": "DenseNet-121",
    "mobilenet_v2": "MobileNetV2",
    "vgg16_bn": "VGG-16-BN",
    "deit_tiny": "DeiT-Tiny",
    "deit_small": "DeiT-Small",
    "vit_tiny": "ViT-Tiny",
    "vit_small": "ViT-Small",
    "vit_base": "ViT-Base",
    "swin_v2_t": "SwinV2-T",
    "swin_v2_b": "SwinV2-B",
    "gpt2": "GPT-2",
    "gpt2_medium": "GPT-2 Medium",
    "gpt2_large": "GPT-2 Large",
    "gpt2_xl": "GPT-2 XL",
}
SETTINGS = {
    "dataset": "data set",
    "optimizer.lr": "learning rate",
    "optimizer.betas": "betas",
    "sparsity": "N:M",
    "sparsity.overrides": "N:M of single layers",
    "trainer.budget": "budget",
    "trainer.distill": "teacher",
    "trainer.test": "evaluation of the test split",
}
SPLITS = {"test": "test", "eval": "validation", "train": "training"}
METRICS = {
    "bleu": "BLEU",
    "f1": "F1",
    "flops/training_arithmetic": "FLOPs of training, without the multiplications by zero",
    "flops/training_dense": "FLOPs of dense training",
    "flops/training_hardware": "FLOPs of training on 2:4 tensor cores",
    "sparsity/flip_rate": "flip rate",
    "seconds": "time",
    "training_seconds": "time of training",
}


# --- numbers --------------------------------------------------------------------------------------


def scale(metric: str) -> float:
    """Accuracies are shown in percent."""
    return 100.0 if "accuracy" in metric else 1.0


def unit(metric: str, difference: bool = False) -> str:
    """The unit of ``printed``: ``%``, ``percentage points``, ``s``, ``FLOPs``, or nothing."""
    if "accuracy" in metric:
        return "percentage points" if difference else "%"
    return "s" if metric in TIMES else "FLOPs" if metric.startswith("flops/") else ""


def labelled(metric: str) -> str:
    """A metric with its unit, if that is not in its name: ``test/accuracy in %``."""
    return f"{metric} in %" if unit(metric) == "%" else metric


def deviates(value: float, spread: float | None) -> bool:
    """Whether a spread is more than rounding."""
    return spread is not None and spread > NEGLIGIBLE * abs(value)


def places(value: float, metric: str, spread: float | None = None) -> int:
    """How many digits after the point are shown; -2: whole hundreds.

    The last digit is the first one of the spread, or its second if the first is a 1. Without a
    spread, accuracies have one decimal and everything else four significant digits. ``value`` and
    ``spread``, a standard deviation or half an interval, are in the metric's own unit (accuracies
    from 0 to 1).
    """
    value, spread = abs(value) * scale(metric), (spread or 0.0) * scale(metric)
    if deviates(value, spread):
        mantissa, exponent = f"{spread:.1e}".split("e")
        return int(float(mantissa) < 2) - int(exponent)
    if scale(metric) == 100.0:
        return 1
    after = 3 - (math.floor(math.log10(value)) if value else 0)
    return after if value >= 1e8 else max(0, after)


def printed(value: float, metric: str, decimals: int | None = None) -> str:
    """A value in the unit of :func:`unit`, with ``decimals`` digits after the point.

    None: those of a value without spread, without zeros at the end where it is no percentage. FLOPs
    have a letter (``34.9G``), other numbers of nine digits and more an exponent.
    """
    value *= scale(metric)
    digits = places(value / scale(metric), metric) if decimals is None else decimals
    value = round(value, digits) + 0.0  # no -0.0
    if unit(metric) == "FLOPs" and abs(value) >= 1e3:
        power = min(int(math.log10(abs(value)) // 3), len(THOUSANDS) - 1)
        text = f"{value / 1000**power:.{max(0, digits + 3 * power)}f}"
        text = (text.rstrip("0").rstrip(".") if decimals is None and "." in text else text) + (
            THOUSANDS[power]
        )
    elif abs(value) >= 1e8:
        text = f"{value:.{max(0, math.floor(math.log10(abs(value))) + digits)}e}"
    else:
        text = f"{value:.{max(0, digits)}f}"
        if decimals is None and scale(metric) == 1.0 and "." in text:
            text = text.rstrip("0").rstrip(".")
    return text.replace("-", MINUS)


def signed(value: float, metric: str, decimals: int | None = None) -> str:
    """As ``printed``, with a plus sign in front of what is above 0."""
    text = printed(value, metric, decimals)
    return f"+{text}" if value > 0 and any(digit in text for digit in "123456789") else text


def interval(
    value: float, low: float | None, high: float | None, metric: str, error: float | None
) -> str:
    """A difference with its interval, ``-0.5 [-0.9, -0.1]``, all in the metric's own unit. It has
    the digits of the standard ``error``."""
    decimals = places(value, metric, error)
    ends = [signed(end, metric, decimals) for end in (low, high) if end is not None]
    return signed(value, metric, decimals) + (f" [{', '.join(ends)}]" if ends else "")


def two_digits(value: float, metric: str) -> str:
    """A value of a metric, to two significant digits."""
    return printed(value, metric, places(value, metric, value / 5))


def p_value(p: float | None) -> str:
    """`` p=0.012``, `` p<0.001``, or nothing for None."""
    return "" if p is None else " p<0.001" if p < 0.001 else f" p={p:.2g}"


def by_split(metrics: Mapping[str, float], metric: str) -> str:
    """The values of a metric, such as ``accuracy``, in words: ``test 0.9694, validation 0.9650``."""
    splits = {"test": "test", "validation": "eval"}
    values = {word: metrics.get(f"{split}/{metric}") for word, split in splits.items()}
    return ", ".join(f"{word} {value:.4f}" for word, value in values.items() if value is not None)


# --- names as a command line has them -------------------------------------------------------------


def label(value: Any) -> str:
    """A config value as on a command line, in one line; ``-`` for a key that the run does not have."""
    text = "-" if value != value else ranges.value_text(value)
    return BREAK.sub(" ", text) if "\n" in text else text


def labels_of(values: Iterable[Any]) -> set[str]:
    """The labels of many values, of which few differ."""
    # by their text: a dictionary has no hash, and 1, 1.0 and true are equal
    return {label(value) for value in {repr(value): value for value in values}.values()}


def short(label: str) -> str:
    """A label with four digits where it is a long number."""
    with contextlib.suppress(ValueError):
        return f"{float(label):.4g}" if len(label) > LONG else label
    return label


def named(key: str, label: str) -> str:
    """A label, with its key if it is a setting: ``lr=0.001``."""
    return f"{key.rpartition('.')[2]}={short(label)}" if "." in key else short(label)


def words(keys: Key, labels: Key) -> str:
    """The labels of a row or column, without dashes."""
    pairs = zip(keys, labels, strict=True)
    return " ".join(named(key, label) for key, label in pairs if label != "-") or "-"


def but_ratio(keys: Key, labels: Key) -> Key:
    """The labels of a row or column, without that of the ratio."""
    return tuple(text for key, text in zip(keys, labels, strict=True) if key != "sparsity")


def order(text: str) -> tuple[int, float, int, str]:
    """The place of a label: recipes in their order, ratios from dense to sparse, numbers, texts."""
    if text in RECIPE_ORDER:
        return (0, RECIPE_ORDER.index(text), 0, "")
    try:
        pattern = Pattern.parse(text)
        # densest first; 2:4 before 4:8, and 2:8 before 64:2:8
        return (1, -pattern.density, pattern.m, f"{pattern.v:06}")
    except PatternError:
        pass
    try:
        return (2, float(text), 0, "")
    except ValueError:
        return (3, 0.0, 0, text)


# --- names as papers write them -------------------------------------------------------------------


def written(label: str) -> str:
    """A label as papers write it, ``SR-STE`` for ``sr_ste``."""
    if label in RECIPES:
        return recipe_facts(RECIPES[label]).title
    return PAPERS.get(label, RESNET.sub(r"ResNet-\1", label))


def bare(name: str) -> str:
    """Words for a metric, without its unit: ``test accuracy``."""
    best = name.startswith("best/")
    split, _, rest = name.removeprefix("best/").partition("/")
    words = METRICS.get(name) or (
        f"{SPLITS[split]} {METRICS.get(rest, rest.replace('_', ' '))}" if split in SPLITS else name
    )
    return words + (" of the best epoch" if best else "")


def metric(name: str) -> str:
    """Words for a metric, with its unit: ``test accuracy (%)``."""
    its_unit = "" if name.startswith("flops/") else unit(name)
    return f"{bare(name)} ({its_unit})" if its_unit else bare(name)


def valued(name: str, value: float) -> str:
    """A metric with its value: ``validation accuracy 97.3 %``."""
    return " ".join(filter(None, [bare(name), printed(value, name), unit(name)]))


def setting(key: str) -> str:
    """Words for a config key: ``learning rate`` for ``optimizer.lr``."""
    group, dot, leaf = key.partition(".")
    text = leaf.replace("_", " ")
    named = f"{group} {text}" if group in ("model", "dataset", "schedule") else text
    return SETTINGS.get(key, named if dot else key)


def column(keys: Sequence[str], labels: Sequence[str]) -> list[str]:
    """The labels of a row or column as papers write them, settings with their names (``lr=0.001``)."""
    return [
        metric(label) if key == "metric" else written(named(key, label))
        for key, label in zip(keys, labels, strict=True)
        if label != "-"
    ] or ["-"]
