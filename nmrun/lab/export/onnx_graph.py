"""ONNX of the models for images and of GPT, weights as initializers, checked in onnxruntime.

What TensorRT's sparse kernels take is at most two non-zeros in every aligned four weights along the
dimension that is summed over:
input channels of a convolution, the columns of a Gemm with transB, the rows of a MatMul's second
input. Exporters transpose the weights of linear layers and fold batch norms into convolutions, so
this is counted in the graph that is written.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nmrun.errors import ConfigError, RunError, first_line, needs
from nmrun.lab.export.finished_run import FinishedRun, network
from nmrun.lab.models.texts import GPTNetwork
from nmrun.lab.output import silent
from nmrun.patterns import Pattern, hold
from nmrun.sparsity.reference import grouped, holds

# bytes of weights that fit into the file, whose limit is 2 GiB; more go to a second file
LARGEST = 1 << 30
PRODUCTS = ("Conv", "Gemm", "MatMul")


def write(run: FinishedRun, folder: Path) -> list[str]:
    """Write ``model.onnx``; the file's metadata has what ``sparsity.json`` says, but for the
    layers, each key as JSON.

    Its input is ``images`` (batch, channels, height, width) float32, or ``tokens`` (batch, length)
    int64 of a GPT. Any batch and any length that the model takes will do. Its output is ``logits``.
    ConfigError for models that take other inputs; RunError if onnxruntime's logits differ from torch's.
    """
    with needs("--format onnx", "onnx"):
        onnx, runtime, _ = (
            importlib.import_module(name) for name in ("onnx", "onnxruntime", "onnxscript")
        )
    model, name, example, sizes = _inputs(run)
    with silent():
        graph = _graph(model, name, example(2), sizes)
    layers = locate(graph.graph, run, onnx.numpy_helper)
    about = run.describe(folder, layers)
    metadata = {key: json.dumps(value) for key, value in about.items() if key != "layers"}
    onnx.helper.set_model_props(graph, metadata)
    outside, file = sum(t.nbytes for t in run.state.values()) > LARGEST, str(folder / "model.onnx")
    onnx.save_model(graph, file, save_as_external_data=outside, location="model.onnx.data")
    with silent():
        session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    off = max(_off(session, model, name, example(batch)) for batch in (1, 3))
    if not off < 1e-3:  # also true for NaN
        raise RunError(
            f"onnxruntime's logits differ from torch's by {off:.2g} of the largest: not written"
        )
    fits, missing = sum(layer["tensorrt"] for layer in layers), len(run.layers) - len(layers)
    lines = [
        f"model.onnx: {hold(layer.pattern for layer in run.layers)} in {len(layers)} layers; "
        f"onnxruntime's logits differ by {off:.1g} of the largest",
        f"  {fits} of them have two non-zeros in every four inputs at most, as TensorRT's sparse kernels need",
    ]
    if missing:
        line = f"  {missing} sparse layers are not found in the graph: they count as dense there"
        lines.append(line)
    return lines


def _inputs(run: FinishedRun) -> tuple[nn.Module, str, Callable[[int], Tensor], dict[int, Any]]:
    """The run's network on the CPU; the name of its input; a function that draws an input of so
    many images or texts; and the input's dimensions of variable size."""
    model, task = network(run)
    batch = {0: torch.export.Dim("batch")}
    if "shape" in task.inputs:
        shape = tuple(task.inputs["shape"])
        return model, "images", lambda n: torch.randn(n, *shape, generator=_seeded(n)), batch
    if not isinstance(model, GPTNetwork):
        name = run.result["config"]["model"]["name"]
        raise ConfigError(
            f"--format onnx takes models for images and GPT; model={name} is made from {' and '.join(task.inputs)}"
        )
    tokens, context = model.wte.num_embeddings, model.wpe.num_embeddings

    def texts(n: int) -> Tensor:
        return torch.randint(tokens, (n, max(2, context // n)), generator=_seeded(n))

    return model, "tokens", texts, {**batch, 1: torch.export.Dim("length", max=context)}


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _graph(model: nn.Module, name: str, inputs: Tensor, sizes: dict[int, Any]) -> Any:
    names: dict[str, Any] = {"input_names": [name], "output_names": ["logits"]}
    how: dict[str, Any] = {"dynamo": True, "dynamic_shapes": (sizes,), "verbose": False, **names}
    try:
        program: Any = torch.onnx.export(model, (inputs,), **how)
        return program.model_proto
    except Exception as error:  # the exporter has many kinds, each with pages of text
        raise RunError(
            f"torch's ONNX exporter cannot take this model: {first_line(error)}"
        ) from None


def _off(session: Any, model: nn.Module, name: str, inputs: Tensor) -> float:
    """How far onnxruntime's logits are from torch's, as a share of the largest."""
    with torch.no_grad():
        expected = model(inputs)
    (logits,) = session.run(None, {name: inputs.numpy()})
    return float((torch.from_numpy(logits) - expected).abs().max() / expected.abs().max())


def locate(graph: Any, run: FinishedRun, helper: Any) -> list[dict[str, Any]]:
    """The sparse weights in the graph, with the axis that is summed over; they get the model's
    names back, and +0.0 for -0.0. RunError if one is no longer N:M along that axis."""
    stored = {initializer.name: initializer for initializer in graph.initializer}
    axes = {node.input[1]: _axis(node) for node in graph.node if node.op_type in PRODUCTS}
    values = {n: torch.tensor(helper.to_array(t)) for n, t in stored.items() if n in axes}
    layers = []
    for layer in run.layers:
        weight, name = run.state[layer.name], layer.name
        if name not in values:  # a matrix has another name, and may be transposed
            turned = ((n, v if axes[n] == 1 else v.T) for n, v in values.items() if v.dim() == 2)
            name = next((n for n, value in turned if torch.equal(value, weight)), "")
        if not name:
            continue
        axis = axes[name]
        found = values.pop(name) + 0.0  # a folded batch norm's negative factor makes -0.0
        if not _holds(found, layer.pattern.n, layer.pattern.m, axis):
            raise RunError(
                f"{layer.name} is not {layer.pattern} in the graph that the exporter made"
            )
        stored[name].CopyFrom(helper.from_array(np.ascontiguousarray(found.numpy()), layer.name))
        for node in graph.node:
            node.input[:] = [layer.name if used == name else used for used in node.input]
        layers.append({**layer.plain, "dim": axis, "tensorrt": _holds(found, 2, 4, axis)})
    return layers


def _axis(node: Any) -> int:
    if node.op_type == "Gemm":
        return int(any(attribute.name == "transB" and attribute.i for attribute in node.attribute))
    return 1 if node.op_type == "Conv" else 0


def _holds(weight: Tensor, n: int, m: int, axis: int) -> bool:
    return holds(*grouped(weight, Pattern(n, m), axis, True))
