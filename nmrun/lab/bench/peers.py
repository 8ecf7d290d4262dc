"""What other people's runtimes make of a dense network: arms of ``nmrun bench infer``.

None of them is needed (nmrun's extra ``bench``): one that is missing, or that cannot take a
network, is a line of the page.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.errors import extra
from nmrun.kernels.compiler import processor_flags
from nmrun.products.attention import slow_path

Call = Callable[[Tensor], Tensor]
FLOAT32, BF16, INT8 = "float32", "bf16", "int8"
MISSING = f"not installed: {extra('bench')}"


def has_bf16() -> bool:
    """Whether this processor multiplies bfloat16 (AVX512-BF16, AMX, or Arm's)."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & processor_flags())


def versions() -> dict[str, str]:
    """Of the packages that arms come from, where they are installed."""
    numbers = {}
    for name in ("onnxruntime", "openvino", "nncf"):
        with contextlib.suppress(PackageNotFoundError):
            numbers[name] = version(name)
    return numbers


def arms(
    names: Sequence[str], model: nn.Module, x: Tensor, precisions: Sequence[str]
) -> tuple[dict[tuple[str, str], Call], dict[str, str]]:
    """What runtimes make of a model.

    Args:
        names: of ``RUNTIMES``.
        model: in float32 and evaluation.
        x: an input of the size that is measured; int8 is calibrated with it.
        precisions: that are wanted.

    Returns:
        A forward pass by precision and runtime, and why there are no more, by runtime.
    """
    calls: dict[tuple[str, str], Call] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            with _quiet(), torch.no_grad(), slow_path():
                for precision, call in RUNTIMES[name](model, x, precisions):
                    calls[precision, name] = call
        except ImportError as error:
            missing[name] = f"{error.name} is {MISSING}"
        except Exception as error:  # converters have many kinds, each with pages of text
            first = str(error).strip().partition("\n")[0]
            missing[name] = f"cannot take this network: {type(error).__name__}: {first}"
    return calls, missing


def cast(x: Tensor, precision: str) -> Tensor:
    """An input in a precision; token numbers stay."""
    return x.bfloat16() if precision == BF16 and x.is_floating_point() else x


def by_layers(model: Call, x: Tensor) -> Tensor:
    """A forward pass in which torch's encoders call their layers."""
    with slow_path():
        return model(x)


def compiled(model: nn.Module, x: Tensor, precisions: Sequence[str]) -> Iterator[tuple[str, Call]]:
    """``torch.compile``: on a GPU into CUDA graphs, on a CPU with the weights as constants, which lets
    oneDNN lay them out."""
    import copy

    how: dict[str, Any] = {"options": {"freezing": True}}
    if x.device.type == "cuda":
        how = {"mode": "reduce-overhead"}

    for precision in precisions:
        if precision == INT8:
            continue
        dense = copy.deepcopy(model).bfloat16() if precision == BF16 else model
        inner = torch.compile(dense, **how)

        def call(x: Tensor, inner: Any = inner, precision: str = precision) -> Tensor:
            return by_layers(inner, cast(x, precision))

        call(x)
        yield precision, call


def onnxruntime(
    model: nn.Module, x: Tensor, precisions: Sequence[str]
) -> Iterator[tuple[str, Call]]:
    """ONNX Runtime: float32, and weights and activations of its dynamic quantisation in int8.

    It has no bfloat16 on x86.
    """
    runtime = importlib.import_module("onnxruntime")
    onnx, _ = (importlib.import_module(name) for name in ("onnx", "onnxscript"))
    exported = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    assert exported is not None
    graph = exported.model_proto
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors alone
    for precision in precisions:
        if precision == BF16:
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/model.onnx"
            if precision == INT8:
                tool = importlib.import_module("onnxruntime.quantization")
                tool.quantize_dynamic(graph, file, weight_type=tool.QuantType.QInt8)
            else:
                onnx.save_model(graph, file)
            session = runtime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name

        def call(x: Tensor, session: Any = session, name: str = name) -> Tensor:
            return torch.from_numpy(session.run(None, {name: x.numpy()})[0])

        yield precision, call


def openvino(model: nn.Module, x: Tensor, precisions: Sequence[str]) -> Iterator[tuple[str, Call]]:
    """OpenVINO: float32, bfloat16, and int8 by NNCF's static quantisation."""
    runtime = importlib.import_module("openvino")
    core = runtime.Core()
    converted = runtime.convert_model(model, example_input=x)
    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    for precision in precisions:
        graph, config = converted, dict(settings)
        if precision == BF16:
            config["INFERENCE_PRECISION_HINT"] = "bf16"
        if precision == INT8:
            nncf = importlib.import_module("nncf")
            nncf.set_log_level(logging.ERROR)
            graph = nncf.quantize(
                converted,
                nncf.Dataset([x.numpy()]),
                model_type=nncf.ModelType.TRANSFORMER,
                subset_size=1,
            )
            if has_bf16():  # what is not int8 is as fast as it can be
                config["INFERENCE_PRECISION_HINT"] = "bf16"
        network = core.compile_model(graph, "CPU", config)

        def call(x: Tensor, network: Any = network) -> Tensor:
            return torch.from_numpy(network(x.numpy())[0])

        yield precision, call


RUNTIMES: dict[str, Callable[..., Iterator[tuple[str, Call]]]] = {
    "compiled": compiled,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars and warnings of converters."""
    sink = io.StringIO()
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            contextlib.redirect_stdout(sink),
            contextlib.redirect_stderr(sink),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
