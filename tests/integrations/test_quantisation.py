"""Training with N:M weights under fake quantisation, by other libraries: what is quantised is N:M too,
also in ONNX with Q/DQ, as onnxruntime computes it. TensorRT itself is not at hand.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import nmrun

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # theirs
SPARSE = ("2", "5")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(
        *convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(1024, 32), nn.ReLU(), nn.Linear(32, 10)
    )


def images(count: int = 32) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def trained(model: nn.Module) -> nn.Module:
    """Some steps, in which the dense weights and the quantisers are trained together."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = nmrun.sparsify(model, optimizer, "sr_ste", "2:4", 6, decay=0.01)
    labels = torch.arange(32) % 10
    for _ in range(6):
        functional.cross_entropy(model(images()), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [weight.module_name for weight in handle.sparse] == list(SPARSE)
    handle.finalize()
    return model.eval()


def most_of_four(weight: Tensor) -> int:
    """The most non-zeros in four consecutive inputs."""
    return int((weight.movedim(1, -1).reshape(-1, 4) != 0).sum(1).max())


def dequantised(file: Path, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """By onnxruntime: what each Conv, Gemm and MatMul has for its weight, by the number of the node,
    with inputs in the second dimension; and the logits."""
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    model = onnx.load(file)
    nodes = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]
    by_output = {name: node.op_type for node in model.graph.node for name in node.output}
    for node in nodes:
        assert by_output[node.input[1]] == "DequantizeLinear"
        model.graph.output.append(onnx.ValueInfoProto(name=node.input[1]))
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = runtime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    logits, *weights = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    turned = [
        torch.from_numpy(w if node.op_type == "Conv" or _by_rows(node) else w.T)
        for node, w in zip(nodes, weights, strict=True)
    ]
    return dict(zip(("0", "2", "5", "7"), turned, strict=True)), torch.from_numpy(logits)


def _by_rows(node: Any) -> bool:
    return any(attribute.name == "transB" and attribute.i for attribute in node.attribute)


def test_training_under_modelopt_gives_qdq_whose_weights_are_2_4(tmp_path):
    quantisation = pytest.importorskip("modelopt.torch.quantization", exc_type=ImportError)
    pytest.importorskip("onnxruntime")
    model, config = network(), copy.deepcopy(quantisation.INT8_DEFAULT_CFG)
    outputs = {"quantizer_name": "*output_quantizer", "cfg": {"num_bits": 8, "axis": None}}
    config["quant_cfg"].append(outputs)
    quantisation.quantize(model, config, lambda net: net(images()))
    trained(model)
    file = tmp_path / "model.onnx"
    with torch.no_grad():
        expected = model(images(2))
        torch.onnx.export(model, (images(2),), str(file), dynamo=False, opset_version=19)
    weights, logits = dequantised(file, images(2))
    step = 2 * float(expected.abs().max()) / 255  # a last rounding may differ
    torch.testing.assert_close(logits, expected, rtol=0, atol=2 * step)
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        torch.testing.assert_close(weight, layer.weight_quantizer(layer.weight).detach())
        if name in SPARSE:
            assert most_of_four(layer.weight) == most_of_four(weight) == 2
    assert most_of_four(weights["7"]) > 2  # the head is dense


def test_training_under_torchao_ends_2_4_in_what_it_quantises():
    qat = pytest.importorskip("torchao.quantization.qat")
    from torchao.quantization import quantize_

    model = network()
    weight = qat.IntxFakeQuantizeConfig(torch.int8, "per_channel", is_symmetric=True)
    inputs = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    quantize_(model, qat.QATConfig(activation_config=inputs, weight_config=weight, step="prepare"))
    trained(model)
    layer = model[5]
    assert most_of_four(layer.weight_fake_quantizer(layer.weight)) == 2
    quantize_(model, qat.QATConfig(step="convert"))
    assert type(model[5]) is nn.Linear
    assert most_of_four(model[5].weight) == 2


def test_quantising_a_finished_network_by_onnxruntime_keeps_2_4(tmp_path):
    """As TensorRT takes it: symmetric, and weights as a pair of Q and DQ."""
    pytest.importorskip("onnx")
    quantization = pytest.importorskip("onnxruntime.quantization")
    model, plain, file = trained(network()), tmp_path / "plain.onnx", tmp_path / "int8.onnx"
    torch.onnx.export(model, (images(2),), str(plain), dynamo=False, opset_version=19)
    quantization.quantize_static(
        plain, file, Reader(plain), quant_format=quantization.QuantFormat.QDQ, per_channel=True,
        extra_options={
            "ActivationSymmetric": True, "WeightSymmetric": True, "AddQDQPairToWeight": True,
            "QuantizeBias": False,
        },
    )  # fmt: skip
    weights, logits = dequantised(file, images(2))
    with torch.no_grad():
        expected = model(images(2))
    assert float((logits - expected).norm() / expected.norm()) < 0.1
    for name in SPARSE:
        assert most_of_four(weights[name]) == 2


class Reader:
    """Four batches to calibrate with."""

    def __init__(self, file: Path) -> None:
        import onnx

        given = onnx.load(file).graph.input[0].name
        self.batches = iter([{given: images(2).numpy()} for _ in range(4)])

    def get_next(self) -> dict[str, Any] | None:
        return next(self.batches, None)
