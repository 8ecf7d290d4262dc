"""ONNX of the models for images and of GPT, weights as initializers, checked in onnxruntime.

What TensorRT's sparse kernels take is at most two non-zeros in every aligned four weights along the
dimension that is summed over:
input channels of a convolution, the columns of a Gemm with transB, the rows of a MatMul's second
input. Exporters transpose the weights of linear layers and fold batch norms into convolutions, so
this is counted in the graph that is written.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nmrun.errors import ConfigError, RunError, first_line, needs
from nmrun.lab.export.finished_run import (
    FinishedRun,
    network,
    refuse_pruned_activations,
    write_about,
)
from nmrun.lab.models.texts import GPTNetwork
from nmrun.patterns import hold

# bytes of weights that fit into the file, whose limit is 2 GiB; more go to a second file
LARGEST = 1 << 30


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
    refuse_pruned_activations(run)
    model, name, example, sizes = _build(run)
    graph = _graph(model, name, example(2), sizes)
    layers = locate(graph.graph, run, onnx.numpy_helper)
    about = run.about(layers)
    metadata = {key: json.dumps(value) for key, value in about.items() if key != "layers"}
    onnx.helper.set_model_props(graph, metadata)
    outside = sum(tensor.nbytes for tensor in run.state.values()) > LARGEST
    onnx.save_model(
        graph, str(folder / "model.onnx"), save_as_external_data=outside, location="model.onnx.data"
    )
    with _no_talk():
        session = runtime.InferenceSession(
            str(folder / "model.onnx"), providers=["CPUExecutionProvider"]
        )
    difference = 0.0
    for batch in (1, 3):
        inputs = example(batch)
        with torch.no_grad():
            expected = model(inputs)
        (logits,) = session.run(None, {name: inputs.numpy()})
        difference = max(
            difference,
            float((torch.from_numpy(logits) - expected).abs().max() / expected.abs().max()),
        )
    if not difference < 1e-3:  # also true for NaN
        raise RunError(
            f"onnxruntime's logits differ from torch's by {difference:.2g} of the largest: not written"
        )
    write_about(about, folder)
    fits, missing = sum(layer["tensorrt"] for layer in layers), len(run.layers) - len(layers)
    return [
        f"model.onnx: {hold(layer.pattern for layer in run.layers)} in {len(layers)} layers; "
        f"onnxruntime's logits differ by {difference:.1g} of the largest",
        f"  {fits} of them have two non-zeros in every four inputs at most, as TensorRT's sparse kernels need",
        *(
            [f"  {missing} sparse layers are not found in the graph: they count as dense there"]
            if missing
            else []
        ),
    ]


def _build(run: FinishedRun) -> tuple[nn.Module, str, Callable[[int], Tensor], dict[int, Any]]:
    """The run's network on the CPU; the name of its input; a function that draws an input of so
    many images or texts; and the input's dimensions of variable size."""
    model, task = network(run)
    batch = {0: torch.export.Dim("batch")}
    if "shape" in task.inputs:
        shape = tuple(task.inputs["shape"])
        return model, "images", lambda n: torch.randn(n, *shape, generator=_generator(n)), batch
    if not isinstance(model, GPTNetwork):
        name = run.result["config"]["model"]["name"]
        raise ConfigError(
            f"--format onnx takes models for images and GPT; model={name} is made from {' and '.join(task.inputs)}"
        )
    tokens, context = model.wte.num_embeddings, model.wpe.num_embeddings

    def texts(n: int) -> Tensor:
        return torch.randint(tokens, (n, max(2, context // n)), generator=_generator(n))

    return model, "tokens", texts, {**batch, 1: torch.export.Dim("length", max=context)}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _graph(model: nn.Module, name: str, inputs: Tensor, sizes: dict[int, Any]) -> Any:
    names: dict[str, Any] = {"input_names": [name], "output_names": ["logits"]}
    try:
        with _no_talk():
            program = torch.onnx.export(
                model,
                (inputs,),
                dynamo=True,
                dynamic_shapes=(sizes,),
                verbose=False,
                **names,
            )
        assert program is not None
        return program.model_proto
    except Exception as error:  # the exporter has many kinds, each with pages of text
        raise RunError(
            f"torch's ONNX exporter cannot take this model: {first_line(error)}"
        ) from None


def locate(graph: Any, run: FinishedRun, helper: Any) -> list[dict[str, Any]]:
    """The sparse weights in the graph, with the axis that is summed over; they get the model's
    names back, and +0.0 for -0.0. RunError if one is no longer N:M along that axis."""
    stored = {initializer.name: initializer for initializer in graph.initializer}
    values = {
        name: torch.from_numpy(helper.to_array(tensor).copy()) for name, tensor in stored.items()
    }
    axes = {
        node.input[1]: _axis(node)
        for node in graph.node
        if node.op_type in ("Conv", "Gemm", "MatMul")
    }
    layers = []
    for layer in run.layers:
        name = _initializer(layer.name, run.state[layer.name], values, axes)
        if name is None:
            continue
        weight = values.pop(name) + 0.0  # a folded batch norm's negative factor makes -0.0
        if not _holds(weight, layer.pattern.n, layer.pattern.m, axes[name]):
            raise RunError(
                f"{layer.name} is not {layer.pattern} in the graph that the exporter made"
            )
        stored[name].CopyFrom(helper.from_array(np.ascontiguousarray(weight.numpy()), layer.name))
        for node in graph.node:
            node.input[:] = [layer.name if used == name else used for used in node.input]
        layers.append(
            {**layer.plain, "dim": axes[name], "tensorrt": _holds(weight, 2, 4, axes[name])}
        )
    return layers


def _axis(node: Any) -> int:
    if node.op_type == "Gemm":
        return int(any(attribute.name == "transB" and attribute.i for attribute in node.attribute))
    return 1 if node.op_type == "Conv" else 0


def _initializer(
    name: str, weight: Tensor, values: dict[str, Tensor], axes: dict[str, int]
) -> str | None:
    """The initializer of this weight: the one of its name, else one that equals it, transposed or
    not."""
    if name in values and name in axes:
        return name
    for other, value in values.items():
        if other in axes and value.dim() == weight.dim() == 2:
            turned = value if axes[other] == 1 else value.T
            if turned.shape == weight.shape and torch.equal(turned, weight):
                return other
    return None


def _holds(weight: Tensor, n: int, m: int, axis: int) -> bool:
    last = weight.movedim(axis, -1)
    groups = nn.functional.pad(last, (0, -last.shape[-1] % m)).unflatten(-1, (-1, m))
    return bool(((groups != 0).sum(-1) <= n).all())


@contextlib.contextmanager
def _no_talk() -> Iterator[None]:
    logger, before = logging.getLogger("torch.onnx"), logging.getLogger("torch.onnx").level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
