"""``nmrun bench infer``: forward passes of a whole network in evaluation, dense and with its sparse
layers 2:4, by batch size; on a CPU see ``infer_cpu``.

Weights and products are bfloat16. The layers that a run would make sparse are packed once, for each
2:4 path that is right on this GPU; what cannot be packed stays dense, and how many are is said.
Times are those of a call, with the time that the host takes to launch it.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.fast import measurement
from nmrun.fast.gpu import semi_structured
from nmrun.fast.gpu.linear import SemiStructuredLinear
from nmrun.lab import models
from nmrun.lab.bench import gemm, harness
from nmrun.lab.bench.harness import NO_MEMORY, Benchmark, Clock, Row, rounds, speedup
from nmrun.lab.bench.networks import composed, each, random_text
from nmrun.lab.keys.datasets import TokenBin
from nmrun.patterns import Pattern
from nmrun.sparsity.masks import hard_threshold
from nmrun.sparsity.select import select

PATTERN = Pattern(2, 4)


def compressed(model: nn.Module, names: Sequence[str], path: str) -> tuple[nn.Module, int]:
    """Pack layers of a copy of a model.

    Args:
        model: the model.
        names: of the linear layers.
        path: one of ``nmrun.fast.gpu.semi_structured``.

    Returns:
        The copy, and how many layers could be packed.
    """
    twin, count = copy.deepcopy(model), 0
    for name in names:
        layer = twin.get_submodule(name)
        try:
            weight = hard_threshold(layer.weight, PATTERN)  # type: ignore[arg-type]
            twin.set_submodule(name, SemiStructuredLinear(weight, layer.bias, path))  # type: ignore[arg-type]
            count += 1
        except torch.OutOfMemoryError:
            raise
        except measurement.ERRORS:
            continue
    return twin, count


@torch.no_grad()
def choose(model: nn.Module, dense: nn.Module, x: Tensor) -> None:
    """Let each packed layer take the library's fastest algorithm for what it is given.

    Args:
        model: with packed layers.
        dense: what it was packed from.
        x: an input.
    """
    layers = {m: name for name, m in model.named_modules() if isinstance(m, SemiStructuredLinear)}

    def look(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        weight = hard_threshold(dense.get_parameter(f"{layers[layer]}.weight"), PATTERN)  # type: ignore[index]
        layer.choose(inputs[0], weight)  # type: ignore[operator]

    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    model(x)
    for hook in hooks:
        hook.remove()


def right_paths(device: torch.device) -> tuple[list[str], list[Row]]:
    """The paths that compute the right thing here, and rows that say what is wrong with the others."""
    x, weight = (
        torch.randn(256, 512, device=device).to(gemm.DTYPE),
        semi_structured.transposable(384, 512, device),
    )
    expected, right, rows = x.float() @ weight.float().t(), list[str](), list[Row]()
    for name, path in semi_structured.candidates(fp8=False).items():
        why = "" if name != "one_pass" else "it prunes both ways, which weights of a run are not"
        try:
            if not why:
                semi_structured.fastest(name, x, path.pack(weight, None)[0], None, expected)
        except measurement.ERRORS as error:
            why = measurement.first_line(error)
        if why:
            rows.append({"arm": name, "wrong": why})
        else:
            right.append(name)
    return right, rows


def measure(
    words: Sequence[str],
    paths: Sequence[str],
    batches: Sequence[int],
    compiled: bool,
    count: int,
    device: torch.device,
) -> list[Row]:
    """Measure one network, dense and by each path.

    Args:
        words: the network's overrides.
        paths: names of paths.
        batches: numbers of sequences or images.
        compiled: compile all arms.
        count: rounds.
        device: a GPU.

    Raises:
        ConfigError: for words that are no overrides.
    """
    with tempfile.TemporaryDirectory() as name:
        random_text(Path(name))
        config = composed(Path(name), ["recipe=dense", *words])
    if isinstance(config.dataset, TokenBin):
        inputs: dict[str, Any] = {
            "vocabulary": config.dataset.vocabulary,
            "context": config.dataset.context,
        }
    else:
        side = config.dataset.values()["side"]
        inputs = {"shape": (3, side, side), "classes": 1000}
    torch.manual_seed(0)
    dense = (
        models.build(config.model.mapping(), inputs)
        .to(device, gemm.DTYPE)
        .eval()
        .requires_grad_(False)
    )
    candidates, _ = select(
        dense, PATTERN, include=config.model.include, exclude=config.model.exclude or ()
    )
    names = [weight.module_name for weight in candidates if isinstance(weight.module, nn.Linear)]
    rows: list[Row] = []
    try:
        networks = {"dense": (dense, 0)} | {path: compressed(dense, names, path) for path in paths}
    except torch.OutOfMemoryError:
        return [
            {"arm": arm, "batch": batch, "wrong": NO_MEMORY}
            for arm in ("dense", *paths)
            for batch in batches
        ]
    forward = {
        arm: torch.compile(network) if compiled else network
        for arm, (network, _) in networks.items()
    }
    for batch in batches:
        try:
            x = example(inputs, batch, device)
            for network, _ in networks.values():
                choose(network, dense, x)
            with torch.inference_mode():
                arms: dict[str, Callable[[], object]] = {
                    arm: partial(network, x) for arm, network in forward.items()
                }
                times = rounds(arms, count, Clock(device, flush=False))
        except torch.OutOfMemoryError:
            rows += [{"arm": arm, "batch": batch, "wrong": NO_MEMORY} for arm in networks]
            continue
        for arm, samples in times.items():
            layers = {"layers": f"{networks[arm][1]} of {len(names)}"}
            rows.append({"arm": arm, "batch": batch, **layers, **speedup(samples, times["dense"])})
    return rows


def example(inputs: Row, batch: int, device: torch.device) -> Tensor:
    """A batch of random tokens at full context, or of random images."""
    if "context" in inputs:
        return torch.randint(inputs["vocabulary"], (batch, inputs["context"]), device=device)
    return torch.randn(batch, *inputs["shape"], device=device).to(gemm.DTYPE)


def benchmark(
    models: Sequence[str], batches: Sequence[int], compile: bool, overrides: Sequence[str], rounds: int, device: str
) -> Benchmark:  # fmt: skip
    """``nmrun bench infer`` where there are 2:4 products."""
    place = harness.device_of(device)
    harness.needs_products(place)

    def cases() -> Iterator[list[Row]]:
        paths, wrong = right_paths(place)
        yield wrong
        yield from each(
            models,
            lambda words: measure([*words, *overrides], paths, batches, compile, rounds, place),
        )

    def page(rows: list[Row]) -> str:
        title = (
            "Forward passes in evaluation, bfloat16: milliseconds of dense ones, of those with 2:4 layers times as fast. "
            f"Median [quartiles] of paired rounds, n = {rounds}. Compiled: {'yes' if compile else 'no'}."
        )

        def cell(row: Row) -> str:
            layers = "" if row["arm"] == "dense" else f", {row['layers']} layers 2:4"
            return harness.speed(row) + layers

        lines = [
            {**row, "batch": f"{row['model']}, {row['batch']}"} for row in rows if "batch" in row
        ]
        unused = [f"{row['arm']}: {row['wrong']}" for row in rows if "batch" not in row]
        return "\n\n".join([title, harness.grid(lines, "batch", "arm", cell), *unused])

    return Benchmark(cases(), page, place)
