"""Triton's kernels against the torch reference: test_triton.py runs this file in a process of its
own, in Triton's interpreter or on a GPU.

The interpreter truncates float32 to bfloat16 and misreads subnormals; what devices do, rounding to
nearest even, is put in its place.
"""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
import triton
from adam_steps import KINDS, edited, faded, projection, update_of
from torch import Tensor, nn
from triton.runtime import interpreter

from nmrun import optim, sparsify
from nmrun.kernels import projection as kernels
from nmrun.kernels import triton_blocks, triton_groups, triton_mvue, triton_projection
from nmrun.kernels.layout import Update
from nmrun.patterns import Pattern
from nmrun.sparsity.masks import inclusion_probabilities
from nmrun.sparsity.reference import hard_threshold, nm_mask, soft_threshold

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy on NaNs


def _convert(data: np.ndarray, source: object, target: object, mode: object) -> np.ndarray:
    read = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
    whole = {2: torch.int16, 1: torch.uint8}
    numbers = torch.from_numpy(np.array(data.view(np.int16) if data.dtype == np.uint16 else data))
    if str(source) in read:
        return numbers.view(read[str(source)]).float().numpy()
    result = numbers.to(read[str(target)])
    bits = result.view(whole[result.itemsize]).numpy()
    return bits.view(np.uint16) if result.itemsize == 2 else bits


interpreter._convert_float = _convert

FLOAT, HALF, BFLOAT = torch.float32, torch.float16, torch.bfloat16
# (pattern, shape, dim, dtype): contiguous groups of four, of a power of two, of neither, strided
# ones, short ones, single ones
CASES = [
    ("2:4", (40, 64), 1, FLOAT),
    ("2:4", (33, 36), 1, BFLOAT),
    ("1:4", (16, 64), 1, HALF),
    ("3:4", (16, 64), -1, FLOAT),
    ("4:4", (5, 12), 1, FLOAT),
    ("1:2", (16, 64), 1, FLOAT),
    ("1:1", (3, 5), 1, FLOAT),
    ("2:8", (16, 128), 1, FLOAT),
    ("4:8", (16, 128), 1, BFLOAT),
    ("7:8", (16, 64), 1, FLOAT),
    ("3:7", (9, 21), 1, FLOAT),
    ("3:16", (16, 128), 1, HALF),
    ("1:16", (16, 256), 1, FLOAT),
    ("8:32", (6, 256), 1, FLOAT),
    ("30:32", (6, 128), 1, FLOAT),
    ("1:64", (5, 256), 1, FLOAT),
    ("33:64", (5, 128), 1, FLOAT),
    ("2:4", (64, 33), 0, FLOAT),
    ("2:8", (128, 16), 0, BFLOAT),
    ("1:64", (128, 3), 0, FLOAT),
    ("2:4", (8, 16, 3, 3), 1, FLOAT),
    ("3:16", (4, 32, 3, 3), 1, HALF),
    ("2:4", (3, 4, 2, 2, 3), 1, FLOAT),
    ("1:16", (6, 40), 1, FLOAT),  # the last group has 8 of 16
    ("2:4", (17, 27), 1, BFLOAT),
    ("3:4", (9, 5), 1, FLOAT),
    ("2:4", (6, 7, 3, 3), 1, FLOAT),
    ("2:8", (13, 10), 0, FLOAT),
    ("2:4", (8, 528), 0, FLOAT),  # wide enough for tiles of one line
    ("1:16", (32, 144), 0, BFLOAT),
    ("2:4", (2, 8, 16, 35), 1, HALF),
    ("2:4", (6, 1024), 0, FLOAT),
]


def nasty(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random weights with ties, zeros of both signs, NaNs, infinities and subnormals strewn in; the
    last row is plain.
    """
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    flat, info = weight.view(-1), torch.finfo(dtype)
    flat[::3] = flat[::3].mul(2).round() / 2
    flat[: len(flat) // 8] = -1.0
    flat[1::7], flat[2::11] = 0.0, -0.0
    flat[3::13], flat[4::17] = info.smallest_normal / 8, -info.smallest_normal / 4
    flat[5::29], flat[6::31], flat[7::37] = torch.nan, torch.inf, -torch.inf
    flat[-shape[-1] :] = torch.linspace(-1, 2, shape[-1]).to(DEVICE, dtype)
    return weight


def bits(x: Tensor) -> Tensor:
    """One NaN is like another."""
    whole = torch.int32 if x.dtype == FLOAT else torch.int16
    return torch.where(x.isnan(), torch.nan, x).view(whole)


def reference(weight: Tensor, pattern: Pattern, dim: int, mode: str, amount: float) -> Tensor:
    if mode == "decayed":
        return torch.where(nm_mask(weight, pattern, dim), weight, weight * amount) + 0.0
    if mode == "hard":
        return hard_threshold(weight, pattern, dim)
    return soft_threshold(weight, pattern, dim) * amount


@pytest.mark.parametrize(("ratio", "shape", "dim", "dtype"), CASES)
def test_bits_equal_the_reference(ratio, shape, dim, dtype):
    weight, pattern = nasty(shape, dtype), Pattern.parse(ratio).over(shape[dim])
    before = weight.clone()
    for mode, amount in (("hard", 1.0), ("soft", 1.4832), ("decayed", 0.37)):
        out = nasty(shape, dtype, seed=1)
        assert triton_projection.project(weight, out, pattern, dim, mode, amount)
        assert torch.equal(bits(out), bits(reference(weight, pattern, dim, mode, amount))), mode
    assert triton_projection.project(weight, out, pattern, dim, "mask")
    assert torch.equal(out, nm_mask(weight, pattern, dim).to(dtype))
    assert torch.equal(bits(weight), bits(before))


@pytest.mark.parametrize("ratio", ["2:4", "3:16"])
@pytest.mark.parametrize("dim", [0, 1])
def test_channels_last(ratio, dim):
    weight = nasty((32, 16, 3, 3), FLOAT).to(memory_format=torch.channels_last)
    out, plain = torch.empty_like(weight), torch.empty(weight.shape, device=DEVICE)
    pattern = Pattern.parse(ratio)
    assert triton_projection.project(weight, out, pattern, dim)
    expected = hard_threshold(weight.contiguous(), pattern, dim)
    assert torch.equal(bits(out.contiguous()), bits(expected))
    assert not triton_projection.project(weight, plain, pattern, dim)
    assert not triton_projection.project(plain, out, pattern, dim)


@pytest.mark.parametrize(
    ("ratio", "shape", "dtype"),
    [
        ("64:4:16", (128, 64), FLOAT),
        ("16:2:8", (32, 24), BFLOAT),
        ("8:1:7", (16, 21), HALF),
        ("4:3:5", (12, 2570), FLOAT),  # more than one program a block
    ],
)
def test_blocks_have_the_bits_of_the_reference(ratio, shape, dtype):
    weight, pattern = nasty(shape, dtype), Pattern.parse(ratio)
    for mode, amount in (("hard", 1.0), ("decayed", 0.37)):
        out = nasty(shape, dtype, seed=1)
        assert triton_blocks.project(weight, out, pattern, 1, mode, amount)
        assert torch.equal(bits(out), bits(reference(weight, pattern, 1, mode, amount))), mode
    assert triton_blocks.project(weight, out, pattern, 1, "mask")
    assert torch.equal(out, nm_mask(weight, pattern, 1).to(dtype))
    short = weight[:, :-1].contiguous()
    assert not triton_blocks.project(short, torch.empty_like(short), pattern, 1)
    assert not triton_blocks.project(weight.t().contiguous(), weight.t().contiguous(), pattern, 0)


def test_more_than_one_program():
    for shape, dim, pattern in (
        ((300, 28), 1, Pattern(2, 4)),
        ((64, 300), 0, Pattern(2, 8)),
        ((300, 27), 1, Pattern(2, 4, length=27)),
    ):
        weight, out = nasty(shape, FLOAT), torch.empty(shape, device=DEVICE)
        assert triton_projection.project(weight, out, pattern, dim)
        assert torch.equal(bits(out), bits(hard_threshold(weight, pattern, dim)))


def test_weights_of_many_kinds_in_one_batch():
    kinds = [
        ((300, 16), 1, "2:4", FLOAT), ((8, 64), 1, "2:4", FLOAT), ((8, 8, 3, 3), 1, "2:4", FLOAT), ((64, 20), 0, "2:4", FLOAT),
        ((8, 64), 1, "1:16", FLOAT), ((9, 24), 1, "1:16", FLOAT), ((8, 64), 1, "2:4", BFLOAT),
        ((8, 528), 0, "2:4", FLOAT), ((4, 1040), 0, "2:4", FLOAT),
    ]  # fmt: skip
    weights = [nasty(shape, dtype, i) for i, (shape, _, _, dtype) in enumerate(kinds)]
    outs = [torch.zeros_like(w) for w in weights]
    dims = [dim for _, dim, _, _ in kinds]
    patterns = [
        Pattern.parse(ratio).over(w.shape[dim])
        for w, (_, dim, ratio, _) in zip(weights, kinds, strict=True)
    ]
    members = list(zip(weights, outs, patterns, dims, strict=True))
    batch = triton_projection.Batch()
    launches = batch.launches.of(members)
    assert sorted(len(launch.members) for launch in launches) == [1, 1, 1, 2, 2, 2]

    def check():
        for weight, out, pattern, dim in zip(weights, outs, patterns, dims, strict=True):
            assert torch.equal(bits(out), bits(reference(weight, pattern, dim, "hard", 1.0)))

    batch.project(members)
    check()

    tables = [launch._rows for launch in launches]
    before = [rows.clone() for rows in tables]
    weights[1].mul_(-1)
    outs[1].set_(torch.zeros_like(outs[1]).untyped_storage(), 0, outs[1].shape)  # other memory
    batch.project(members)
    check()
    # a captured graph reads them
    assert all(a is launch._rows for a, launch in zip(tables, launches, strict=True))
    assert batch.launches.of(members) is launches
    assert sum(not torch.equal(a, b) for a, b in zip(tables, before, strict=True)) == 1


def test_what_it_leaves_to_the_reference():
    weight, pattern = torch.randn(16, 64, device=DEVICE), Pattern(2, 4)
    out = torch.full_like(weight, 7.0)
    for w, into, p in (
        (weight.T, out.T, pattern),
        (weight, out.T, pattern),
        (weight.double(), out, pattern),
        (weight, out.double(), pattern),
        (weight[:, :63].contiguous(), out[:, :63].contiguous(), pattern),
        (weight.view(8, 128), out.view(8, 128), Pattern(2, 128)),
    ):
        assert not triton_projection.project(w, into, p, 1)
    scale = torch.tensor(1.0, device="meta")
    assert not triton_projection.project(weight, out, pattern, 1, "soft", scale=scale)
    assert (out == 7.0).all()
    with pytest.raises(ValueError, match=r"weight 1 of the batch, \[16, 64\] torch.float64"):
        triton_projection.Batch().project([(w, out, pattern, 1) for w in (weight, weight.double())])
    shifted = weight.flatten()[1:65].view(1, 64)
    with pytest.raises(ValueError, match="16 bytes"):
        triton_projection.Batch().project([(shifted, out[:1], pattern, 1)])


def test_a_device_is_checked_before_it_is_used(monkeypatch, caplog):
    device = torch.device(DEVICE)
    right_one = triton_projection.project
    assert kernels.on_cuda(device, 2, 4)
    assert not kernels.on_cuda(device, 2, triton_groups.LARGEST_M + 1)
    assert kernels.on_cuda(device, 2, 8, 16)
    assert not caplog.records
    zeros = lambda weight, out, *_: bool(out.fill_(0).any()) or True  # noqa: E731
    monkeypatch.setattr(triton_blocks, "project", zeros)
    assert not kernels.on_cuda(device, 2, 9, 16)
    assert "wrong numbers" in caplog.text
    dense = lambda weight, out, *_: bool(out.copy_(weight).any())  # noqa: E731
    monkeypatch.setattr(triton_projection, "project", dense)
    assert not kernels.on_cuda(device, 3, 5)
    assert "wrong numbers" in caplog.text

    def fails_along_outputs(weight, out, pattern, dim):
        return right_one(weight, out, pattern, dim) and (dim == 1 or bool(out.fill_(9.0).any()))

    monkeypatch.setattr(triton_projection, "project", fails_along_outputs)
    assert not kernels.on_cuda(device, 2, 6)

    def fail(*args):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(triton_projection, "project", fail)
    assert not kernels.on_cuda(device, 1, 5)
    assert "no compiler here" in caplog.text


# --- Adam -----------------------------------------------------------------------------------------

SHAPES = [
    ((40, 16), 1, "2:4"),
    ((24, 24), 1, "2:4"),
    ((4, 8, 3, 3), 1, "2:4"),
    ((6, 40), 1, "1:16"),
    ((16, 6), 0, "2:8"),
    ((8, 272), 0, "2:4"),
]
OPTIONS = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "by_triton", lambda weight, pattern: True)


def start(kind: str = "decayed") -> tuple[list[nn.Parameter], list[Update]]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape, _, _ in SHAPES]
    params[2].data = params[2].to(memory_format=torch.channels_last)
    return params, [
        update_of(kind, p.detach(), Pattern.parse(ratio).over(shape[dim]), dim)
        for p, (shape, dim, ratio) in zip(params, SHAPES, strict=True)
    ]


def assert_close(a: Tensor, b: Tensor, size: Tensor) -> None:
    """Equal up to some units in the last place of ``size``, the largest number that went into them."""
    ulps = 2 if DEVICE == "cpu" else 4  # there torch fuses multiplications with additions
    assert ((a - b).abs() <= ulps * torch.finfo(FLOAT).eps * size).all()


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize(
    ("kind", "decoupled", "beta1"),
    [
        *((kind, True, 0.8) for kind in KINDS),
        ("decayed", False, 0.9),
        ("masked, held", False, 0.8),
        ("decayed", True, 0.3),
    ],
)
def test_a_step_is_torchs_with_the_recipe_s_part_before_and_after(kind, decoupled, beta1):
    params, copies = start(kind)
    options = {**OPTIONS, "betas": (beta1, 0.95)}
    adam = (optim.AdamW if decoupled else optim.Adam)(params, **options)
    for step in range(4):
        theirs = [p.detach().clone().requires_grad_() for p in params]
        stock = getattr(torch.optim, type(adam).__name__)(theirs, **options, foreach=True)
        if step:
            stock.load_state_dict(copy.deepcopy(adam.state_dict()))  # the layout is torch's
        versions = [p._version for p in params]
        for p, q, update in zip(params, theirs, copies, strict=True):
            p.grad = torch.randn_like(p) * 10.0 ** torch.randint(-4, 2, p.shape, device=DEVICE)
            q.grad = edited(p.grad, q.detach(), update)
        if kind == "fading":
            copies = [faded(c, 0.2 - 0.05 * step) for c in copies]
        grads, old = [p.grad.clone() for p in params], [p.detach().clone() for p in params]
        assert adam.plan(dict(zip(params, copies, strict=True))) == params
        adam.step()
        stock.step()
        for i, (p, q, update) in enumerate(zip(params, theirs, copies, strict=True)):
            assert torch.equal(p.grad, grads[i])
            assert p._version > versions[i]
            mine, other = adam.state[p], stock.state[q]
            assert mine.keys() == other.keys()
            assert mine["step"] == other["step"] == step + 1
            assert mine["step"].device == other["step"].device
            size = q.grad.abs() + OPTIONS["weight_decay"] * old[i].abs() + other["exp_avg"].abs()
            assert_close(mine["exp_avg"], other["exp_avg"], size)
            squares = size.square() + other["exp_avg_sq"]
            assert_close(mine["exp_avg_sq"], other["exp_avg_sq"], squares)
            assert_close(p, q, torch.maximum(old[i].abs(), q.abs()) + 10 * OPTIONS["lr"])
            assert not torch.equal(p, old[i])
            assert torch.equal(bits(update.projected), bits(projection(p.detach(), update)))


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize("decoupled", [True, False])
def test_a_step_with_a_frozen_second_moment(decoupled):
    """Against the step of nmrun.optim that is not in one pass, whose tests have the closed form."""
    params, copies = start()
    theirs = [p.detach().clone().requires_grad_() for p in params]
    kind = optim.AdamW if decoupled else optim.Adam
    optimizers = [kind(group, **OPTIONS) for group in (params, theirs)]
    for step in range(3):
        for p, q, update in zip(params, theirs, copies, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = edited(p.grad, q.detach(), update)
        before = [p.detach().clone() for p in params]
        assert optimizers[0].plan(dict(zip(params, copies, strict=True))) == params
        for optimizer, group in zip(optimizers, (params, theirs), strict=True):
            optimizer.step()
            if step == 0:
                optimizer.freeze_second_moment(group)
        for p, q, old, update in zip(params, theirs, before, copies, strict=True):
            mine, other = optimizers[0].state[p], optimizers[1].state[q]
            assert mine.keys() == other.keys() == {"step", "exp_avg", "frozen_denominator"}
            assert mine["step"] == other["step"] == step + 1
            # where little was frozen, a weight moves by tens, and roundings are of that size
            assert ((p - q).abs() <= 1e-6 + 1e-5 * torch.maximum(q.abs(), (q - old).abs())).all()
            torch.testing.assert_close(
                mine["frozen_denominator"], other["frozen_denominator"], rtol=1e-5, atol=1e-7
            )
            expected = hard_threshold(p, update.pattern, update.dim)
            assert torch.equal(bits(update.projected), bits(expected))


@pytest.mark.usefixtures("by_triton")
@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16], ids=str)
def test_a_step_is_in_float32_whatever_new_tensors_are_by_default(other):
    """The kernel reads learning rate and the like as it reads float32 numbers."""
    results = []
    for default in (FLOAT, other):
        params, copies = start()
        for p in params:
            p.grad = torch.ones_like(p)
        adam = optim.AdamW(params, **OPTIONS)
        torch.set_default_dtype(default)
        try:
            assert adam.plan(dict(zip(params, copies, strict=True))) == params
            adam.step()
        finally:
            torch.set_default_dtype(FLOAT)
        results.append([p.detach().clone() for p in params])
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("by_triton")
def test_what_cannot_be_fused_is_stepped_as_ever():
    params, copies = start()
    dense = nn.Parameter(torch.randn(3, 4, device=DEVICE))
    groups = [
        {"params": params[:3]},
        {"params": [params[3], dense], "maximize": True},
        {"params": params[4:], "lr": torch.tensor(0.1)},
    ]
    adam = optim.AdamW(groups, capturable=False, foreach=False)
    params[0].grad = torch.randn(16, 40, device=DEVICE).T  # not contiguous
    params[1].grad = torch.randn_like(params[1])
    for p in (params[3], params[4], dense):
        p.grad = torch.randn_like(p)
    assert adam.plan(dict(zip(params, copies, strict=True))) == [params[1]]
    before = [
        (p.detach().clone(), c.projected.clone()) for p, c in zip(params, copies, strict=True)
    ]
    adam.step()
    assert not torch.equal(params[1], before[1][0])
    assert not torch.equal(copies[1].projected, before[1][1])
    for i in (0, 3, 4):
        assert not torch.equal(params[i], before[i][0])
        assert torch.equal(copies[i].projected, before[i][1])
    assert torch.equal(params[2], before[2][0])  # it has no gradient
    after = copies[1].projected.clone()
    adam.step()  # it was for one step
    assert torch.equal(copies[1].projected, after)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("sr_ste", {"decay": 0.05}), ("ste", {}), ("ste_periodic", {"interval": 2}), ("asp", {"prune_at": 0.3}),
        ("step", {"switch": 0.3, "decay": 0.05}), ("s_ste", {}), ("t_sr_ste", {"interval": 2, "decay": 0.05}), ("mdgf_linear", {}),
        ("sdgf_stepwise", {}), ("lbc", {}),
    ],
)  # fmt: skip
def test_a_run_with_fused_steps_is_one_with_hooks(recipe, options, monkeypatch):
    def trained(fused):
        monkeypatch.setattr(kernels, "by_triton", lambda weight, pattern: fused)
        torch.manual_seed(0)
        layers = nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 16)
        model = nn.Sequential(*layers).to(DEVICE)
        optimizer = optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        handle = sparsify(model, optimizer, recipe, "2:4", 6, exclude=None, **options)
        rates, working = [], []
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(5, 4, 5, 5, generator=torch.Generator().manual_seed(step)).to(DEVICE)
            model(x).square().sum().backward()
            if step == 3:
                with torch.no_grad(), handle.dense_weights():
                    model[0].weight.mul_(1.01)  # the projection has to follow
            handle.measure_flips = step % 3 != 1
            optimizer.step()
            if handle.measure_flips:
                rates.append(handle.metrics()["sparsity/flip_rate"])
            working += [w.weight.clone() for w in handle.sparse]
        assert bool(optimizer._one_pass and optimizer._one_pass._kernels) is fused
        return model, working, rates

    (mine, copies, rates), (other, others, their_rates) = trained(True), trained(False)
    assert rates == their_rates
    assert any(rates)
    for p, q in zip([*mine.parameters(), *copies], [*other.parameters(), *others], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("recipe", ["step", "sr_ste", "ste"])
def test_all_weights_are_projected_in_one_launch(recipe, monkeypatch):
    """With any optimizer, once the forward pass uses the projections; a weight that begins at no
    multiple of 16 bytes goes by itself.
    """
    monkeypatch.setattr(kernels, "by_triton", lambda weight, pattern: True)
    project, batch, alone, together = kernels.project, triton_projection.Batch.project, [], []

    def one(*args):
        alone.append(args[0])
        return project(*args)

    def many(self, members):
        together.append(len(members))
        return batch(self, members)

    monkeypatch.setattr(kernels, "project", one)
    monkeypatch.setattr(triton_projection.Batch, "project", many)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4))).to(DEVICE)
    model[3].weight = nn.Parameter(torch.randn(257, device=DEVICE)[1:].view(16, 16))
    optimizer = optim.Adam(model.parameters(), amsgrad=True)  # whose step is not fused
    options = {"switch": 0.5} if recipe == "step" else {}
    handle = sparsify(model, optimizer, recipe, "2:4", 8, exclude=None, **options)
    for step in range(8):
        if step == 4:  # the first ones also compare, and STEP has switched
            alone.clear(), together.clear()
        model(torch.randn(5, 16, device=DEVICE)).square().sum().backward()
        optimizer.step()
    assert together == [3] * 4
    assert len(alone) == 4
    for w in handle.sparse:
        assert torch.equal(w.parameter, hard_threshold(w.dense, w.pattern, w.dim))


def test_the_dense_weights_are_gone_when_training_is_over(monkeypatch):
    """Though the handle is there, and what projected them with it."""
    monkeypatch.setattr(kernels, "by_triton", lambda weight, pattern: True)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3))).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = sparsify(model, optimizer, "ste", "2:4", exclude=None)
    model(torch.randn(5, 16, device=DEVICE)).square().sum().backward()
    optimizer.step()
    dense = [weakref.ref(weight.dense) for weight in handle.sparse]
    handle.finalize()
    gc.collect()
    assert [tensor() for tensor in dense] == [None] * 3


# --- the unbiased estimate ------------------------------------------------------------------------


def estimated(x: Tensor, ratio: str, dim: int, seed: int = 7) -> Tensor:
    pattern, out = Pattern.parse(ratio), torch.full_like(x, torch.nan)
    assert triton_mvue.applies(x, pattern, dim)
    drawn_by = torch.tensor([seed], dtype=torch.int32, device=DEVICE)
    triton_mvue.estimate(x, out, pattern, dim, drawn_by)
    return out


@pytest.mark.parametrize("ratio", ["2:4", "1:4", "3:4"])
def test_the_estimate_is_unbiased_with_the_smallest_variance(ratio):
    """Equal columns are independent draws; probabilities are those of the float64 reference, whose
    tests have the closed form.
    """
    pattern, draws = Pattern.parse(ratio), 4096
    generator = torch.Generator().manual_seed(pattern.m)
    column = torch.randn(2 * pattern.m, generator=generator, dtype=torch.float64).float() ** 3
    columns = column[:, None].expand(-1, draws).contiguous()
    estimates = estimated(columns.to(DEVICE), ratio, 0).double().cpu()
    p = inclusion_probabilities(column[:, None], pattern, 0)[:, 0]
    mask, column = estimates != 0, column.double()
    assert (mask.unflatten(0, (2, pattern.m)).sum(1) == pattern.n).all()
    picked = (column / p)[:, None].expand(-1, draws)
    torch.testing.assert_close(estimates[mask], picked[mask], rtol=1e-5, atol=0)
    variance = column**2 * (1 / p - 1)
    off = (estimates.mean(1) - column).abs()
    assert (off <= 5 * (variance / draws).sqrt() + 1e-5).all()
    assert variance.max() > 0
    assert float(estimates.var(1).sum()) == pytest.approx(float(variance.sum()), rel=0.15)


@pytest.mark.parametrize(
    ("shape", "dim", "dtype"), [((12, 40), 0, FLOAT), ((3, 8, 5), 1, BFLOAT), ((16, 130), 0, HALF)]
)
def test_estimates_of_other_shapes_and_dtypes(shape, dim, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    estimate = estimated(x, "2:4", dim)
    p = inclusion_probabilities(x.float(), "2:4", dim)
    assert ((estimate != 0).unflatten(dim, (-1, 4)).sum(dim + 1) == 2).all()
    expected = torch.where(estimate != 0, x.double() / p, 0.0).to(dtype)
    torch.testing.assert_close(estimate, expected, rtol=2**-6, atol=1e-5)
    assert torch.equal(estimated(x, "2:4", dim), estimate)
    assert not torch.equal(estimated(x, "2:4", dim, seed=8), estimate)
    assert not (estimate.float().signbit() & (estimate == 0)).any()


def test_estimates_at_the_edges():
    columns = [0, 0, 0, 0], [3, 0, 0, -4], [1] * 4, [torch.inf, 1, 1, 1], [1, 2, 1e-30, torch.nan]
    x = torch.tensor([[float(value) for value in column] for column in columns]).t().contiguous()
    estimate = estimated(x.to(DEVICE), "2:4", 0).cpu()
    assert estimate[:, 0].tolist() == [0.0] * 4
    assert estimate[:, 1].tolist() == [3.0, 0.0, 0.0, -4.0]  # no more than N: all are certain
    assert sorted(estimate[:, 2].tolist()) == [0.0, 0.0, 2.0, 2.0]
    assert estimate[:, 3:].isnan().all()
    others = (x, "2:4", 1), (x.double(), "2:4", 0), (x.t(), "1:4", 0), (x, "1:2", 0), (x, "4:4", 0)
    for tensor, pattern, dim in others:
        assert not triton_mvue.applies(tensor, Pattern.parse(pattern), dim)
