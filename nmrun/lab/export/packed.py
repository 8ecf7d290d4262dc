"""Export to one packed file: :mod:`nmrun.fast.packed` says what is in it."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from nmrun.errors import RunError
from nmrun.fast.cpu.kernels import int8
from nmrun.fast.deploy import TOLERANCE, times, try_int8
from nmrun.fast.measurement import DENSE_INT8, INT8
from nmrun.fast.packed import FILE, VERSION, VERSION_INT8, pack, sha256_of
from nmrun.fast.sites import Site, install, sites, watch
from nmrun.lab.export.finished_run import FinishedRun, network

SPLIT = "val"
Rounded = tuple[Tensor, Tensor, str]  # int8, the scales of its rows, and which layer it is


def write(run: FinishedRun, folder: Path, precision: str | None = None) -> list[str]:
    """Write ``model.packed.safetensors``.

    With ``precision="int8"`` those linear layers are int8 whose outputs in the run's own validation
    are near enough; the metric of that is told before and after.
    """
    low, lines = _in_int8(run) if precision else (dict[str, Rounded](), [])
    tensors, layers = dict(run.state), []
    for layer in run.layers:
        weight = tensors.pop(layer.name)
        about = {**layer.plain, "shape": list(weight.shape)}
        if layer.name in low:
            weight, tensors[f"{layer.name}.scales"], about["layer"] = low[layer.name]
        tensors[f"{layer.name}.values"], tensors[f"{layer.name}.places"] = pack(
            weight, layer.pattern, layer.dim
        )
        layers.append(about)
    version = VERSION_INT8 if low else VERSION
    hashes = {name: sha256_of(tensor) for name, tensor in sorted(tensors.items())}
    header = json.dumps({"version": version, "layers": layers, "sha256": hashes})
    metadata = {"packed": header, "sha256": hashlib.sha256(header.encode()).hexdigest()}
    (folder / FILE).write_bytes(save(tensors, metadata))
    run.describe(folder)
    before, after = (sum(t.nbytes for t in state.values()) for state in (run.state, tensors))
    which = f", {len(low)} of them in int8" if precision else ""
    if count := sum(kind == DENSE_INT8 for *_, kind in low.values()):
        which += f" ({count} by dense products, which are faster)"
    return [f"{FILE}: {run.holds}{which}, {after / before:.1%} of the plain size", *lines]


def _in_int8(run: FinishedRun) -> tuple[dict[str, Rounded], list[str]]:
    """The run's weights that become int8, by name, and the lines to print."""
    if why := int8.KERNELS.obstacle():
        raise RunError(f"--precision int8: {why}")
    model, task = network(run)
    by_module, refusals = sites(model)
    before: dict[str, float] = {}
    watch(model, by_module, lambda: before.update(task.evaluate(model, SPLIT)))
    sparse = {layer.name: layer for layer in run.layers}
    reasons = {name: why for name, why in refusals.items() if name in sparse}
    parts: dict[str, list[Site]] = defaultdict(list)
    for site in (site for group in by_module.values() for site in group):
        name = site.name.partition("[")[0]  # it belongs to the weight of which this is a part
        if name in sparse:
            what = "convolutions stay as they are"
            if site.given:
                try_int8(site, True, TOLERANCE)
                what = "; ".join(site.notes)
            if INT8 not in site.candidates:
                reasons[name] = what
            parts[name].append(site)
    low, timings = dict[str, Rounded](), dict[Any, dict[str, float]]()
    for name in parts.keys() - reasons.keys():
        kind, dim = _faster(parts[name], timings), sparse[name].dim
        values, scales = int8.rounded(run.state[name].movedim(dim, -1))
        low[name] = values.movedim(-1, dim).contiguous(), scales, kind
        for site in parts[name]:
            site.layer = site.candidates[kind]
    for module, group in by_module.items():
        if any(site.layer is not None for site in group):
            install(model, module, group)
    after, metric = task.evaluate(model, SPLIT)[task.metric], task.metric
    lines = [f"  eval/{metric}: {before[metric]:.6g} before, {after:.6g} in int8"]
    return low, lines + [f"  {name} is not int8: {why}" for name, why in sorted(reasons.items())]


def _faster(parts: list[Site], timings: dict[Any, dict[str, float]]) -> str:
    """The int8 layer that the parts of one weight become: the fastest for what they were given.
    ``timings`` has the times of parts alike."""
    total: Counter[str] = Counter()
    for site in parts:
        if site.timing_key not in timings:
            timings[site.timing_key], _ = times([site])
        total.update(timings[site.timing_key])
    paths = set.intersection(*(set(site.candidates) for site in parts))
    return min(paths, key=lambda name: total[name])
