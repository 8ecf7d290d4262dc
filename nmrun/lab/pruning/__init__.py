"""What is done with a trained network: the verbs ``prune`` and ``ratios``."""
