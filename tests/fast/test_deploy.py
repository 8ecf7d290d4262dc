"""nmrun.deploy: packed layers compute what the dense ones did, in every kind of model, or are left
alone with a reason. Times are made up where the outcome depends on them.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import played_gpu
import pytest
import torch
from deployed import share
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from training import by_sgd

import nmrun
from nmrun.errors import ConfigError
from nmrun.fast import deploy as deploying
from nmrun.fast.cpu import onednn
from nmrun.fast.cpu.kernels import int8, products
from nmrun.fast.cpu.packed_linear import PackedLinear
from nmrun.fast.gpu.linear import SemiStructuredLinear
from nmrun.fast.sites import PackedAttention, Site
from nmrun.patterns import Pattern
from nmrun.sparsity import nm_mask

needs_compiler = pytest.mark.skipif(
    bool(products.KERNELS.obstacle()), reason="no C compiler works here"
)


@pytest.fixture
def faster(deploy_times: dict[str, float]) -> None:
    deploy_times["packed"] = 0.5


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> played_gpu.Machine:
    """Deployed is to a GPU, which is played."""
    real = deploying.paths
    monkeypatch.setattr(
        deploying, "paths", lambda device, *about: real(torch.device("cuda"), *about)
    )
    return played_gpu.play(monkeypatch.setattr, tmp_path)


def prune(model: nn.Module, *patterns: str) -> nn.Module:
    """Every matrix by another pattern in turn; Conv1D's along its first dimension."""
    torch.manual_seed(0)
    matrices = 0
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 2 and not isinstance(module, nn.Embedding):
                dim = 0 if type(module).__name__ == "Conv1D" else 1
                pattern = patterns[matrices % len(patterns)]
                parameter.data *= nm_mask(parameter.data, pattern, dim, pad=True)
                matrices += 1
            elif name.endswith("bias"):
                parameter.data.normal_()
    return model.eval()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return prune(
        nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 30, bias=False)), "1:4", "2:5"
    )


def by_name(choices: list[Any]) -> dict[str, Any]:
    return {choice.name: choice for choice in choices}


@needs_compiler
@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 9, 100])
def test_an_mlp_of_two_patterns(tokens: int, dtype: torch.dtype) -> None:
    model, x = mlp().to(dtype), torch.randn(tokens, 40).to(dtype)
    weights = [model[i].weight.detach().clone() for i in (0, 2)]
    expected = model(x).detach()
    choices = nmrun.deploy(model, x)
    assert [(c.name, c.path, c.reason[:4]) for c in choices] == [
        ("0.weight", "packed", "1:4,"),
        ("2.weight", "packed", "2:5,"),
    ]
    assert all(f"{tokens} tokens: dense 1 ms, packed 0.5 ms" in c.reason for c in choices)
    assert all("(2.00x)" in c.reason for c in choices)
    rtol, atol = (2e-2, 1e-1) if dtype == torch.bfloat16 else (1e-5, 1e-5)
    torch.testing.assert_close(model(x), expected, rtol=rtol, atol=atol)
    for i, weight in zip((0, 2), weights, strict=True):
        assert isinstance(model[i], PackedLinear)
        assert torch.equal(model[i].dense(), weight)
    assert not list(model.parameters())


@needs_compiler
@pytest.mark.usefixtures("faster")
def test_a_single_number_is_an_output_like_others() -> None:
    """A head with one output, of one token."""
    model, x = prune(nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 1)), "1:4"), torch.randn(1, 40)
    expected = model(x).detach()
    assert [c.path for c in nmrun.deploy(model, x)] == ["packed"] * 2
    torch.testing.assert_close(model(x), expected)


@needs_compiler
@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_transformer_encoder(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=norm_first)
    model = prune(nn.TransformerEncoder(layer, 2), "2:4", "1:4", "1:8", "1:16")
    x, padding = torch.randn(3, 7, 32), torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 5:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    calls = [{}, {"src_key_padding_mask": padding}, {"mask": causal, "is_causal": True}]
    with torch.no_grad():
        expected = [model(x, **kwargs) for kwargs in calls]
        choices = [c for c in nmrun.deploy(model, x) if not c.always_dense]
        assert len(choices) == 2 * 5
        assert all(choice.path == "packed" for choice in choices)
        for kwargs, right in zip(calls, expected, strict=True):
            here = ~padding if "src_key_padding_mask" in kwargs else ...
            torch.testing.assert_close(model(x, **kwargs)[here], right[here], rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_attention_across_two_sequences(batch_first: bool, batched: bool) -> None:
    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=batch_first)

        def forward(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
            return self.attention(q, k, v, **kwargs)

    model = prune(Across(), "1:4", "2:4")
    q, k, v = torch.randn(5, 2, 32), torch.randn(6, 2, 32), torch.randn(6, 2, 32)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    masks = torch.rand(8, 5, 6) < 0.2
    if batch_first:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    if not batched:
        q, k, v = torch.randn(5, 32), torch.randn(6, 32), torch.randn(6, 32)
        padding, masks = padding[1], masks[:4]
    calls = [
        {},
        {"need_weights": False},
        {"key_padding_mask": padding, "average_attn_weights": False},
        {"attn_mask": masks, "need_weights": False},
        {"attn_mask": torch.randn(5, 6), "key_padding_mask": padding},
    ]
    with torch.no_grad():
        expected = [model(q, k, v, **kwargs) for kwargs in calls]
        choices = by_name(nmrun.deploy(model, (q, k, v)))
        assert isinstance(model.attention, PackedAttention)
        for part, seen in (("queries", q), ("keys, values", torch.cat((k, v)))):
            reason = choices[f"attention.in_proj_weight[{part}]"].reason
            assert f", {seen.numel() // 32} tokens" in reason
        for kwargs, right in zip(calls, expected, strict=True):
            torch.testing.assert_close(model(q, k, v, **kwargs), right, rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_language_model_of_hugging_face_generates_the_same_tokens(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=96,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, bos_token_id=0, eos_token_id=96,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    prune(model, "1:4", "2:4", "1:8")
    prompt = torch.randint(96, (2, 5))

    def generate() -> Tensor:
        return model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=96)

    expected = generate()
    choices = by_name(nmrun.deploy(model, generate))
    packed = {name for name, choice in choices.items() if choice.is_sparse}
    if kind == "gpt2":
        assert len(packed) == 2 * 4
        assert choices["lm_head.weight"].reason == "another module has the same weight"
    else:
        assert len(packed) == 2 * 7 + 1
    assert "of 8 calls" in choices[max(packed)].reason
    assert torch.equal(generate(), expected)


@needs_compiler
@pytest.mark.usefixtures("faster")
def test_a_compiled_model_that_was_called() -> None:
    model, x = mlp(), torch.randn(3, 40)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        expected = compiled(x)
        assert [choice.path for choice in nmrun.deploy(compiled, x)] == ["packed"] * 2
        assert isinstance(model[0], PackedLinear)
        torch.testing.assert_close(compiled(x), expected)


class Asking(nn.Module):
    """Casts what a layer gets to the dtype and device of its weight, as Mamba does before its head, and
    T5 in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x.to(self.up.weight.dtype)).relu()
        if isinstance(self.down.weight, Tensor) and x.dtype != self.down.weight.dtype:
            x = x.to(self.down.weight.dtype)
        return self.down(x.to(self.down.weight.device))


@needs_compiler
@pytest.mark.parametrize("path", ["packed", "int8", "dense int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_networks_that_ask_a_layer_for_the_dtype_of_its_weight(
    path: str, dtype: torch.dtype, deploy_times: dict[str, float]
) -> None:
    if path != "packed" and int8.KERNELS.obstacle():
        pytest.skip(int8.KERNELS.obstacle())
    torch.manual_seed(0)
    model, x = prune(Asking(), "1:4").to(dtype), torch.randn(3, 5, 64).to(dtype)
    expected = model(x)
    deploy_times[path] = 0.5
    choices = nmrun.deploy(model, x, precision="int8" if "int8" in path else None, tolerance=0.2)
    assert {choice.path for choice in choices} == {path}
    with torch.no_grad():
        for one in (model, torch.compile(model, backend="eager", fullgraph=True)):
            assert one(x).dtype == dtype
            assert share(one(x), expected) < 0.05
        assert not any(name.endswith("weight") for name in model.state_dict())
        model.bfloat16()
        assert model.up.weight.dtype == model(x).dtype == torch.bfloat16


@needs_compiler
def test_dense_is_kept_where_it_is_faster_or_where_packed_is_wrong(
    deploy_times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = mlp(), torch.randn(3, 40)
    layers = list(model)
    deploy_times["packed"] = 1.5
    choices = nmrun.deploy(model, x)
    assert [c.path for c in choices] == [None, None]
    assert choices[0].reason == "1:4, 3 tokens: dense 1 ms, packed 1.5 ms (0.67x)"
    deploy_times["packed"] = 0.5
    monkeypatch.setattr(
        PackedLinear, "forward", lambda self, x: torch.zeros(*x.shape[:-1], self.out_features)
    )
    choices = nmrun.deploy(model, x)
    assert [c.path for c in choices] == [None, None]
    assert {c.reason for c in choices} == {"packed: WRONG results"}
    assert list(model) == layers


@needs_compiler
def test_each_size_counts_as_often_as_the_sample_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed is faster for one token, five times, and slower for six, once: 5.5 ms against 6."""

    def milliseconds(arms: Any, *how: Any) -> dict[str, float]:
        packed = 0.5 if len(arms["dense"][0]()) == 1 else 3.0
        return {name: packed if name == "packed" else 1.0 for name in arms}

    monkeypatch.setattr(deploying, "milliseconds", milliseconds)
    model = nn.Sequential(prune(nn.Linear(40, 50), "1:4"))
    (choice,) = nmrun.deploy(model, lambda: [model(torch.randn(n, 40)) for n in (6, *[1] * 5)])
    assert choice.path == "packed"
    assert "1 tokens, one of 6 calls: dense 1 ms, packed 0.5 ms" in choice.reason
    assert choice.reason.endswith("(1.09x)")


@needs_compiler
@pytest.mark.skipif(not onednn.available(), reason="torch has no oneDNN here")
@pytest.mark.parametrize(
    ("onednn", "packed", "expected", "ratio"),
    [
        (0.5, 0.7, ["onednn", "onednn"], "2.00x"),
        (0.5, 0.3, ["packed", "onednn"], "1.67x"),
        (0.98, 0.99, [None, None], "1.02x"),  # as far apart as two probes
        (1.2, 0.9, ["packed", None], "1.11x"),
    ],
)
def test_what_is_dense_is_computed_by_the_faster_library(
    onednn: float,
    packed: float,
    expected: list[str | None],
    ratio: str,
    deploy_times: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deploy_times.update({"onednn": onednn, "packed": packed})
    monkeypatch.setattr("nmrun.fast.cpu.probe.SMALLEST", 1)
    torch.manual_seed(0)
    model = nn.Sequential(prune(nn.Linear(40, 50), "1:4"), nn.ReLU(), nn.Linear(50, 30, bias=False))
    x = torch.randn(2, 3, 40)
    output, keys = model(x), set(model.state_dict())
    choices = nmrun.deploy(model, x)
    assert [c.path for c in choices] == expected
    assert choices[0].reason.endswith(f"({ratio})")
    assert "dense, 6 tokens: dense 1 ms, onednn" in choices[1].reason
    again = pickle.loads(pickle.dumps(model))
    for one in (model, copy.deepcopy(model), again):
        torch.testing.assert_close(one(x), output, rtol=1e-5, atol=1e-5)
    if "packed" not in expected:
        assert set(model.state_dict()) == keys
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x).float(), output, rtol=0.05, atol=0.05)


@needs_compiler
@pytest.mark.parametrize("path", ["packed", "onednn"])
def test_layers_that_are_called_by_keyword(
    path: str, deploy_times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.linear = nn.Conv2d(8, 12, 3), nn.Linear(12, 20)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(input=self.convolution(input=x).mean((2, 3)))

    deploy_times[path] = 0.5
    monkeypatch.setattr("nmrun.fast.cpu.probe.SMALLEST", 1)
    model, x = prune(ByName(), "1:4"), torch.randn(3, 8, 5, 5)
    weight = model.convolution.weight.data
    weight *= nm_mask(weight, "1:4", 1)
    expected = model(x)
    choices = by_name(nmrun.deploy(model, x))
    assert choices["linear.weight"].path == path
    assert choices["convolution.weight"].path == ("packed" if path == "packed" else None)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_all_stays_dense() -> None:
    model = mlp()
    layers, choices = list(model), nmrun.deploy(model, torch.randn(3, 40))
    assert list(model) == layers
    assert {(c.path, c.reason) for c in choices} == {
        (None, "no C compiler works here (cc, gcc, clang or $CC)")
    }


def test_what_is_left_dense_has_a_reason() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)
            self.twice = self.shared = nn.Linear(16, 16)
            self.tied = nn.Linear(16, 16)
            self.tied.weight = self.dense.weight
            self.conv, self.out = nn.Conv1d(16, 16, 1), nn.Linear(16, 16).double()
            self.hooked = nn.Linear(16, 16)
            self.hooked.register_forward_hook(lambda *call: None)

        def forward(self, x: Tensor) -> Tensor:
            x = self.hooked(self.twice(self.shared(self.conv(self.dense(x).t()).t())))
            return self.out(self.tied(x).double())

    model = Mixed()
    model.twice.weight.data[:] = 1.0
    model.out.weight.data *= nm_mask(model.out.weight.data, "2:4")
    reasons = {n: c.reason for n, c in by_name(nmrun.deploy(model, torch.randn(16, 16))).items()}
    assert reasons == {
        "dense.weight": "another module has the same weight",
        "tied.weight": "another module has the same weight",
        "unused.weight": "the sample does not call it as a layer",
        "twice.weight": "its weight is not N:M",
        "conv.weight": "no packed layer stands for this Conv1d",
        "hooked.weight": "it has hooks or a forward of its own",
        "out.weight": "float64: packed weights on the CPU are float32 or bfloat16",
    }


class OwnAttention(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(("kind", "kdim"), [(OwnAttention, 16), (nn.MultiheadAttention, 32)])
def test_each_weight_of_an_attention_that_is_left_alone_has_a_reason(kind: Any, kdim: int) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = kind(16, 2, kdim=kdim)

        def forward(self, x: Tensor, key: Tensor) -> Tensor:
            return self.attention(x, key, x)[0]

    model = Attends()
    choices = nmrun.deploy(model, (torch.randn(3, 5, 16), torch.randn(3, 5, kdim)))
    weights = [name for name, weight in model.named_parameters() if weight.dim() > 1]
    assert sorted(choice.name for choice in choices) == sorted(weights)
    assert {(c.path, c.reason) for c in choices} == {
        (None, f"no packed layer stands for this {kind.__name__}")
    }


def test_training_and_odd_samples_are_refused_in_one_line() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    by_sgd(model, "ste", "2:4")
    with pytest.raises(ConfigError, match=r"^0\.weight is in training: call finalize\(\)"):
        nmrun.deploy(model, torch.randn(2, 16))
    assert model.training
    with pytest.raises(ConfigError, match="sample is a float"):
        nmrun.deploy(mlp(), 1.0)
    with pytest.raises(ConfigError, match=r"^dict is no module: give deploy the model$"):
        nmrun.deploy({**model.state_dict()}, torch.randn(2, 16))
    with pytest.raises(ConfigError, match=r"^compile=no: it takes true or false$"):
        nmrun.deploy(mlp(), torch.randn(2, 40), compile="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^the model is on meta: load its weights first$"):
        nmrun.deploy(mlp().to("meta"), torch.randn(2, 40, device="meta"))


@pytest.mark.parametrize("pattern", ["2:4", "1:8", "3:7", "1:32"])
def test_the_pattern_is_found(pattern: str) -> None:
    weight = torch.rand(64, 32 * 7) + 0.1
    weight *= nm_mask(torch.randn(64, 32 * 7), pattern, 1)
    assert deploying.pattern_of(weight) == Pattern.parse(pattern)
    assert deploying.pattern_of(torch.ones(4, 4)) is None


def test_on_cuda_two_of_four_are_packed_by_the_fastest_right_path(
    deploy_times: dict[str, float], gpu: played_gpu.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(
        played_gpu.COMPRESSED, multiply=lambda x, parts, bias: x.new_zeros(len(x), len(parts[0]))
    )
    monkeypatch.setitem(deploying.semi_structured.PATHS, "broken", wrong)
    deploy_times.update({"compressed": 0.25, "broken": 0.25})
    model = prune(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)), "2:4", "3:4").bfloat16()
    x = torch.randn(6, 32).bfloat16()
    expected = model(x)
    choices = nmrun.deploy(model, x)
    assert [c.path for c in choices] == ["compressed", None]
    assert "3:4 does not fit into 2:4" in choices[1].reason
    torch.testing.assert_close(model(x), expected)
    assert model[0].path == "compressed"


def test_on_cuda_the_algorithm_of_layers_alike_is_looked_for_once(
    gpu: played_gpu.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[bool] = []

    def milliseconds(call: Any, repeats: int = 20, graph: bool = False) -> float:
        timed.append(graph)
        return gpu.fast

    monkeypatch.setattr(deploying.semi_structured, "milliseconds", milliseconds)
    monkeypatch.setattr(nn.Module, "compile", lambda model, **how: None)
    for compiled in (False, True):
        layers = [nn.Linear(32, 32) for _ in range(3)] + [nn.Linear(32, 16)]
        model = prune(nn.Sequential(*layers), "2:4", "2:4", "2:4", "2:4").bfloat16()
        nmrun.deploy(model, torch.randn(6, 32).bfloat16(), compile=compiled)
        assert timed == [compiled] * 2
        timed.clear()


def test_layers_are_timed_on_the_gpu_that_they_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which need not be torch's current one; those of two GPUs do not share their times."""
    current, seen = played_gpu.current_gpus(monkeypatch.setattr), []
    second = torch.device("cuda", 1)

    def timed(*about: Any, **how: Any) -> float:
        seen.extend(current)
        return 1.0

    semi_structured = deploying.semi_structured
    monkeypatch.setitem(semi_structured.PATHS, "masked", played_gpu.MASKED)
    monkeypatch.setattr(semi_structured, "milliseconds", timed)
    monkeypatch.setattr(semi_structured, "fastest", lambda *about: ("masked", timed()))
    deploying.milliseconds({"dense": [lambda: None]}, second)
    layer = SemiStructuredLinear(torch.ones(8, 16), None, "masked")
    with FakeTensorMode():
        layer.choose(torch.empty(4, 16, device=second), torch.empty(8, 16, device=second))
        first, other = (Site("fc", torch.empty(8, 16, device=f"cuda:{i}"), None) for i in range(2))
    assert seen == [second] * 2
    assert first.timing_key != other.timing_key


@needs_compiler
@pytest.mark.usefixtures("faster")
def test_a_model_is_compiled_where_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where it may have buffers alone, as one that is all packed layers, into CUDA graphs; and
    it is left without kernels for a CPU."""
    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda model, **how: compiled.append(how))
    model = prune(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)), "1:4", "1:4")
    on_cpu = copy.deepcopy(model)
    nmrun.deploy(copy.deepcopy(model), torch.randn(6, 32))
    assert not compiled
    nmrun.deploy(on_cpu, torch.randn(6, 32), compile=True)
    assert compiled.pop() == {"mode": None}
    with FakeTensorMode():
        model.register_buffer("on_a_gpu", torch.empty(1, device="cuda:0"))
    choices = nmrun.deploy(model, torch.randn(6, 32), compile=True)
    assert not list(model.parameters())
    assert compiled == [{"mode": "reduce-overhead"}]
    assert len(choices) == 2
