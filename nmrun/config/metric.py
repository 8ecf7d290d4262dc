"""What the name of a metric says about it."""

from __future__ import annotations

LOWER_IS_BETTER = ("loss", "perplexity", "error", "seconds", "nll", "bits", "flops")


def higher_is_better(metric: str) -> bool:
    """False for losses, perplexities, errors, bits, FLOPs and times, by name."""
    return not any(word in metric.lower() for word in LOWER_IS_BETTER)
