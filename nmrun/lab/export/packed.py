"""Export to one packed file: :mod:`nmrun.fast.packed` says what is in it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from nmrun.fast.cpu.kernels import int8
from nmrun.fast.cpu.packed_int8 import TOLERANCE
from nmrun.fast.deploy import int8_layer
from nmrun.fast.packed import FILE, VERSION, VERSION_INT8, load, pack, scaled, sha256_of
from nmrun.fast.sites import install, sites, watch
from nmrun.lab.export.finished import Finished, network, write_about

SPLIT = "val"
Rounded = tuple[Tensor, Tensor]  # int8, and the scales of its rows


def write(run: Finished, folder: Path, precision: str | None = None) -> list[str]:
    """Write ``model.packed.safetensors``.

    In int8 are the linear layers whose outputs in the run's own validation are near enough; the
    metric of that is told before and after.

    It is read back and compared with the run's weights before it counts as written.

    Args:
        run: a finished run.
        folder: where to.
        precision: ``"int8"``, or None for the run's own.

    Returns:
        The lines to print.

    Raises:
        ValueError: where what is read back differs, and where there are no int8 products.
    """
    low, told = _in_int8(run) if precision else (dict[str, Rounded](), [])
    tensors, layers, expected = dict(run.state), [], dict(run.state)
    for layer in run.layers:
        weight = tensors.pop(layer.name)
        if layer.name in low:
            weight, tensors[f"{layer.name}.scales"] = low[layer.name]
            expected[layer.name] = scaled(weight, tensors[f"{layer.name}.scales"], layer.dim)
        tensors[f"{layer.name}.values"], tensors[f"{layer.name}.places"] = pack(
            weight, layer.pattern, layer.dim
        )
        layers.append({**layer.plain, "shape": list(weight.shape)})
    version = VERSION_INT8 if low else VERSION
    hashes = {name: sha256_of(tensor) for name, tensor in sorted(tensors.items())}
    header = json.dumps({"version": version, "layers": layers, "sha256": hashes})
    metadata = {"packed": header, "sha256": hashlib.sha256(header.encode()).hexdigest()}
    (folder / FILE).write_bytes(save(tensors, metadata))
    write_about(run.about(), folder)
    back = load(folder)
    for name, tensor in expected.items():
        if sha256_of(back[name]) != sha256_of(tensor):
            raise ValueError(f"{name} does not come back from the packed file with the same bits")
    before, after = (sum(t.nbytes for t in held.values()) for held in (run.state, tensors))
    which = f", {len(low)} of them in int8" if precision else ""
    return [
        f"{FILE}: {run.pattern} in {len(run.layers)} layers{which}, {after / before:.1%} of the plain size",
        *told,
    ]


def _in_int8(run: Finished) -> tuple[dict[str, Rounded], list[str]]:
    """The run's weights that can be int8, by name, and the lines to print."""
    if why := int8.obstacle():
        raise ValueError(f"--precision int8: {why}")
    model, task = network(run)
    model.load_state_dict(run.state)
    found, left = sites(model)
    before: dict[str, float] = {}
    watch(model, found, lambda: before.update(task.evaluate(model, SPLIT)))
    sparse = {layer.name: layer for layer in run.layers}
    kept = {name: why for name, why in left.items() if name in sparse}
    for site in (site for held in found.values() for site in held):
        name = site.name.partition("[")[0]  # of the weight that this is a part of
        if name in sparse:
            what = "convolutions stay as they are"
            if site.seen is not None:
                site.layer, what = int8_layer(site, TOLERANCE)
            if site.layer is None:
                kept[name] = what
    low: dict[str, Rounded] = {}
    for module, held in found.items():
        for site in held:
            name = site.name.partition("[")[0]
            if name in kept:
                site.layer = None
            elif name in sparse:
                low[name] = _rounded(run.state[name], sparse[name].dim)
        if any(site.layer is not None for site in held):
            install(model, module, held)
    after, metric = task.evaluate(model, SPLIT)[task.metric], task.metric
    told = [f"  eval/{metric}: {before[metric]:.6g} before, {after:.6g} in int8"]
    return low, told + [f"  {name} is not int8: {why}" for name, why in sorted(kept.items())]


def _rounded(weight: Tensor, dim: int) -> Rounded:
    """A matrix whose groups run along ``dim`` as int8, and the scales of its rows."""
    last = weight.movedim(dim, -1)
    row, column = last.nonzero(as_tuple=True)
    value, scales = int8.quantised(row, last[row, column], len(last))
    made = torch.zeros(last.shape, dtype=torch.int8)
    made[row, column] = value
    return made.movedim(-1, dim).contiguous(), scales
