"""Recipes, networks, data sets and metrics as papers write them, for pictures and LaTeX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nmrun.lab.report.labels import named
from nmrun.lab.report.numbers import printed, unit

PAPERS = {
    "asp": "ASP",
    "ste": "STE",
    "ste_periodic": "STE, periodic",
    "sr_ste": "SR-STE",
    "step": "STEP",
    "s_ste": "S-STE",
    "t_sr_ste": "T-SR-STE",
    "bi_mask": "Bi-Mask",
    "mdgf_linear": "MdGf-Linear",
    "mdgf_exponential": "MdGf-Exponential",
    "sdgf_stepwise": "SdGf-Stepwise",
    "sdgf_geometric": "SdGf-Geometric",
    "decay_mask": "decaying mask",
    "decay_structure": "decaying structure",
    "lbc": "LBC",
    "maskllm": "MaskLLM",
    "slope": "SLoPe",
    "ast": "AST",
    "cast": "CAST",
    "proxsparse": "ProxSparse",
    "sqft": "SQFT",
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
    "resnet18": "ResNet-18",
    "resnet20": "ResNet-20",
    "resnet32": "ResNet-32",
    "resnet34": "ResNet-34",
    "resnet50": "ResNet-50",
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
    "sparsity/flip_rate": "flip rate",
    "seconds": "time",
}


def written(label: str, own: Mapping[str, str] | None = None) -> str:
    """A label of a table as papers write it.

    Args:
        label: such as ``sr_ste``.
        own: the user's names, which win.
    """
    return {**PAPERS, **(own or {})}.get(label, label)


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


def column(
    keys: Sequence[str], labels: Sequence[str], own: Mapping[str, str] | None = None
) -> list[str]:
    """The labels of a row or column, with the names of settings: ``SR-STE``, ``lr=0.001``.

    Args:
        keys: the config keys.
        labels: their values.
        own: the user's names, which win.
    """
    return [
        metric(label) if key == "metric" else written(named(key, label), own)
        for key, label in zip(keys, labels, strict=True)
        if label != "-"
    ] or ["-"]
