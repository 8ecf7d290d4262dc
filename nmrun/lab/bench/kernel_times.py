"""Where the time of a training step on a GPU goes, by the kinds of its kernels: what of it 2:4
products can make faster, and what bounds them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from nmrun.errors import tell

# by words in the names of CUDA kernels, the first that fits
KERNEL_KINDS = {
    "masks and packing": r"pack_(one|many|estimate)|project_(one|many)|estimate_one|find_largest|round_all|foreach.*copy|multi_tensor.*copy",
    "optimizer": r"adam|multi_tensor|foreach",
    "attention": r"flash|fmha|sdpa|attention",
    "2:4 products": r"sparse|spmma",
    "dense products": r"gemm|nvjet|cutlass|cublas|splitk",
    "copies": r"memcpy|memset|copy_kernel|fillfunctor",
}
OTHER, IDLE = "the rest", "idle"


def kind_of(kernel: str) -> str:
    return next(
        (kind for kind, words in KERNEL_KINDS.items() if re.search(words, kernel, re.I)), OTHER
    )


def by_kind(milliseconds: Mapping[str, float], step: float) -> dict[str, float]:
    """The milliseconds of each kind in a step of ``step``, from those of its kernels; what no
    kernel takes is idle."""
    parts = dict.fromkeys([*KERNEL_KINDS, OTHER], 0.0)
    for kernel, time in milliseconds.items():
        parts[kind_of(kernel)] += time
    return {**parts, IDLE: max(0.0, step - sum(parts.values()))}


def kernels_of(stretch: Callable[[], object], steps: int) -> dict[str, float]:
    """Milliseconds a step of each CUDA kernel in a stretch of ``steps``; none where the profiler
    sees no kernels or fails, by which the times that were measured before are not lost."""
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as record:
            stretch()
            torch.cuda.synchronize()
    except RuntimeError as error:
        tell([f"not profiled: {error}"])
        return {}
    return {
        event.key: event.self_device_time_total / 1e3 / steps
        for event in record.key_averages()
        if event.device_type == DeviceType.CUDA
    }
