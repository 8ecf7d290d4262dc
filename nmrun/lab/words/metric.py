"""What is to be said of a metric, by its name."""

from __future__ import annotations

from collections.abc import Mapping

LOWER_IS_BETTER = ("loss", "perplexity", "error", "seconds", "nll", "bits", "flops")


def higher_is_better(metric: str) -> bool:
    """Say whether higher values of a metric are better.

    Args:
        metric: its name, such as ``eval/accuracy``.

    Returns:
        False for losses, perplexities, errors, bits, FLOPs and times.
    """
    return not any(word in metric.lower() for word in LOWER_IS_BETTER)


def by_split(metrics: Mapping[str, float], metric: str) -> str:
    """The values of a metric: ``test 0.9694, validation 0.9650``.

    Args:
        metrics: of a run, by the names of ``metrics.jsonl``.
        metric: such as ``accuracy``.
    """
    splits = {"test": "test", "validation": "eval"}
    found = {word: metrics.get(f"{split}/{metric}") for word, split in splits.items()}
    return ", ".join(f"{word} {value:.4f}" for word, value in found.items() if value is not None)
