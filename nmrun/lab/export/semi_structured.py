"""torch's semi-structured tensors: 2:4 weights in the layout that this GPU's sparse tensor cores
read, where that is faster.

The layout depends on the GPU's generation and on the library, so the file is for machines like the
one that wrote it.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from nmrun.fast.gpu.semi_structured import milliseconds
from nmrun.fast.measurement import ERRORS, fault, first_line
from nmrun.lab.export.finished_run import FinishedRun, SparseLayer, write_about

TOKENS = 4096  # rows of the input that a layer is timed with
DTYPE = torch.bfloat16


def write(run: FinishedRun, folder: Path) -> list[str]:
    """Write ``model.pt`` for ``model.load_state_dict(torch.load(file, weights_only=False),
    assign=True)``, in bfloat16 on the GPU.

    Linear weights that are 2:4 are compressed where the product is right and faster than the dense
    one; all others stay dense.

    Args:
        folder: where to.

    Raises:
        ValueError: without a GPU, and if no layer can be compressed.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "--format semi_structured needs a CUDA GPU, to compress for it and to time it; torch sees none here"
        )
    if torch.cuda.get_device_capability() < (8, 0):
        raise ValueError(
            f"{torch.cuda.get_device_name()} has no sparse tensor cores; --format semi_structured needs one that has"
        )
    state = {
        n: t.to("cuda", DTYPE if t.is_floating_point() else t.dtype) for n, t in run.state.items()
    }
    lines, faster = [], 0
    for layer in run.layers:
        reason = _unfit(state[layer.name], layer)
        if not reason:
            compressed, reason = best(state[layer.name])
            if compressed is not None:
                state[layer.name], faster = compressed, faster + 1
        lines.append(f"  {layer.name}: {reason}")
    if not faster:
        raise ValueError(
            f"no layer is faster compressed on this GPU: {'; '.join(line.strip() for line in lines)}"
        )
    torch.save(state, folder / "model.pt")
    write_about(
        {**run.about(), "device": torch.cuda.get_device_name(), "torch": torch.__version__}, folder
    )
    return [f"model.pt: {faster} of {len(run.layers)} layers compressed", *lines]


def _unfit(weight: Tensor, layer: SparseLayer) -> str:
    if (layer.pattern.n, layer.pattern.m, layer.dim) != (2, 4, 1) or weight.dim() != 2:
        return f"dense, since only linear 2:4 weights have such a kernel; it is {layer.pattern} with {weight.dim()} dimensions"
    return (
        ""
        if weight.shape[1] % 4 == 0
        else f"dense, since its {weight.shape[1]} inputs are not a multiple of 4"
    )


def best(weight: Tensor) -> tuple[Tensor | None, str]:
    """The compressed weight if its product is right and faster, else None; and what was found."""
    x = torch.randn(TOKENS, weight.shape[1], device=weight.device, dtype=weight.dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the format is a prototype
            compressed = torch.sparse.to_sparse_semi_structured(weight)
        wrong = fault(
            lambda: functional.linear(x, compressed), functional.linear(x.float(), weight.float())
        )
    except ERRORS as error:
        return None, f"dense, since {first_line(error)}"
    if wrong:
        return None, f"dense, since the compressed product is not to be used here: {wrong}"
    dense = milliseconds(lambda: functional.linear(x, weight))
    sparse = milliseconds(lambda: functional.linear(x, compressed))
    told = f"{sparse:.3f} ms with {TOKENS} tokens, dense {dense:.3f} ms"
    return (
        (compressed, f"faster: {told}")
        if sparse < dense
        else (None, f"dense, since compressed is not faster: {told}")
    )
