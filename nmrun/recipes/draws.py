"""Random numbers of a recipe's own: each seed of a run has its own, and torch's stream, from which
dropout draws, is that of any other recipe.
"""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist


def seed() -> int:
    """Draw a seed from torch's generator, which stays where it is; replicas all get rank 0's.

    Returns:
        A whole number in [0, 2**31).
    """
    with torch.random.fork_rng(devices=[]):
        drawn = [int(torch.randint(2**31, ()))]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(drawn, src=0)
    return drawn[0]


def generator(*words: object) -> torch.Generator:
    """Make a generator on the CPU for some words.

    Args:
        words: such as a seed, the place of a weight among all (names differ within DDP) and a
            step; other words, other numbers.
    """
    return torch.Generator().manual_seed(zlib.crc32(" ".join(map(str, words)).encode()))
