"""Whether a metric is better high or low, by its name."""

from __future__ import annotations

LOWER_IS_BETTER = ("loss", "perplexity", "error", "seconds", "nll", "bits", "flops")


def higher_is_better(metric: str) -> bool:
    """Say whether higher values of a metric are better.

    Args:
        metric: its name, such as ``eval/accuracy``.

    Returns:
        False for losses, perplexities, errors, bits, FLOPs and times.
    """
    return not any(word in metric.lower() for word in LOWER_IS_BETTER)
