"""Dense networks by other libraries: arms of ``nmrun bench infer``.

OpenVINO is not needed (nmrun's extra ``bench``).
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nmrun.errors import ConfigError, extra, first_line
from nmrun.kernels.compiler import processor_flags
from nmrun.products.attention import slow_path
from nmrun.registry import version_of

Call = Callable[[Tensor], Tensor]
FLOAT32, BF16, INT8 = "float32", "bf16", "int8"


def has_bf16() -> bool:
    """Whether this processor multiplies bfloat16 (AVX512-BF16, AMX, or Arm's)."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & processor_flags())


def versions() -> dict[str, str]:
    """Of the packages that arms come from, where they are installed."""
    numbers = {name: version_of(name) for name in ("openvino", "nncf")}
    return {name: number for name, number in numbers.items() if number}


def cast(x: Tensor, precision: str) -> Tensor:
    """An input in a precision; token numbers stay."""
    return x.bfloat16() if precision == BF16 and x.is_floating_point() else x


def in_precision(model: nn.Module, precision: str) -> nn.Module:
    """The model, in bf16 a copy."""
    return copy.deepcopy(model).bfloat16() if precision == BF16 else model


def by_layers(model: Call, x: Tensor) -> Tensor:
    """A forward pass in which torch's encoders call their layers."""
    with slow_path():
        return model(x)


def compiled(model: nn.Module, x: Tensor, precision: str) -> Call:
    """``torch.compile``: on a GPU into CUDA graphs, on a CPU with the weights as constants, which lets
    oneDNN lay them out."""
    how: dict[str, Any] = {"options": {"freezing": True}}
    if x.device.type == "cuda":
        how = {"mode": "reduce-overhead"}
    inner: Any = torch.compile(in_precision(model, precision), **how)
    return lambda x: by_layers(inner, cast(x, precision))


def openvino(model: nn.Module, x: Tensor, precision: str) -> Call:
    """OpenVINO: float32, bfloat16, and int8 by NNCF's static quantisation, calibrated with ``x``.

    Raises ConfigError where it is not installed, and RuntimeError for a network that it cannot take.
    """
    try:
        with _quiet(), torch.no_grad(), slow_path():
            network = _openvino(model, x, precision)
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: {extra('bench')}") from None
    except Exception as error:  # converters have many kinds, each with pages of text
        why = f"{type(error).__name__}: {first_line(error)}"
        raise RuntimeError(f"it cannot take this network: {why}") from None
    return lambda x: torch.from_numpy(network(x.numpy())[0])


def _openvino(model: nn.Module, x: Tensor, precision: str) -> Any:
    runtime = importlib.import_module("openvino")
    graph = runtime.convert_model(model, example_input=x)
    config = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    if precision == INT8:
        nncf = importlib.import_module("nncf")
        nncf.set_log_level(logging.ERROR)
        samples, kind = nncf.Dataset([x.numpy()]), nncf.ModelType.TRANSFORMER
        graph = nncf.quantize(graph, samples, model_type=kind, subset_size=1)
    if precision == BF16 or (precision == INT8 and has_bf16()):  # of int8 what is left
        config["INFERENCE_PRECISION_HINT"] = "bf16"
    return runtime.Core().compile_model(graph, "CPU", config)


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
