"""Export to one packed file: :mod:`nmrun.fast.packed` says what is in it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from safetensors.torch import save

from nmrun.fast.packed import FILE, VERSION, load, pack, sha256_of
from nmrun.lab.export.finished import Finished, write_about


def write(run: Finished, folder: Path) -> list[str]:
    """Write ``model.packed.safetensors``.

    It is read back and compared with the run's weights before it counts as written.

    Args:
        run: a finished run.
        folder: where to.

    Returns:
        The lines to print.

    Raises:
        ValueError: where what is read back differs.
    """
    tensors, layers = dict(run.state), []
    for layer in run.layers:
        weight = tensors.pop(layer.name)
        tensors[f"{layer.name}.values"], tensors[f"{layer.name}.places"] = pack(
            weight, layer.pattern, layer.dim
        )
        layers.append({**layer.plain, "shape": list(weight.shape)})
    hashes = {name: sha256_of(tensor) for name, tensor in sorted(tensors.items())}
    header = json.dumps({"version": VERSION, "layers": layers, "sha256": hashes})
    metadata = {"packed": header, "sha256": hashlib.sha256(header.encode()).hexdigest()}
    (folder / FILE).write_bytes(save(tensors, metadata))
    write_about(run.about(), folder)
    back = load(folder)
    for name, tensor in run.state.items():
        if sha256_of(back[name]) != sha256_of(tensor):
            raise ValueError(f"{name} does not come back from the packed file with the same bits")
    before, after = (sum(t.nbytes for t in held.values()) for held in (run.state, tensors))
    return [
        f"{FILE}: {run.pattern} in {len(run.layers)} layers, {after / before:.1%} of the plain size"
    ]
