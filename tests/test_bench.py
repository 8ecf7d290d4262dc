"""The overhead benchmark: what it times is what it says, and its output is well-formed. No timing is asserted."""

import json

import pytest
import torch
from torch import nn

from nmrun import bench
from nmrun.patterns import Pattern
from nmrun.sparsity import nm_mask


@pytest.mark.parametrize("shape", [(8, 16), (8, 16, 3, 3)])
def test_argsort_contrast_is_sr_ste(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight, upstream = torch.randn(shape, requires_grad=True), torch.randn(shape)
    out = bench.ArgsortSRSTE.apply(weight, 2, 4, 0.5)
    out.backward(upstream)
    mask = nm_mask(weight, "2:4")
    torch.testing.assert_close(out.detach(), weight.detach() * mask)
    torch.testing.assert_close(weight.grad, upstream + 0.5 * ~mask * weight.detach())


@pytest.mark.parametrize("recipe", bench.ARMS)
def test_every_arm_trains_and_is_in_its_phase(recipe: str) -> None:
    torch.manual_seed(0)
    arm = bench.Arm(bench.tiny(), bench.ARMS[recipe], Pattern(2, 4), ())
    first = arm.model[0].weight.detach().clone()
    assert arm.seconds(torch.randn(8, 32), steps=3) > 0
    used = arm.model[0].weight.detach()
    assert not torch.equal(used, first)
    kept = int((used.reshape(-1, 4) != 0).sum(1).max())
    fading = recipe.startswith(("mdgf", "sdgf")) or recipe in ("decay_mask", "lbc", "maskllm")  # on the way to the pattern
    assert (kept > 2) == (fading or recipe in ("dense_again", "step_phase_one"))


def test_arms_do_not_share_weights() -> None:
    model = bench.tiny()
    before = [p.detach().clone() for p in model.parameters()]
    bench.Arm(model, bench.ARMS["sr_ste"], Pattern(2, 4), ()).seconds(torch.randn(8, 32), steps=1)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_workloads_leave_out_layers_that_exist() -> None:
    for name in ("small_conv", "tiny"):
        workload = bench.WORKLOADS[name]
        modules = dict(workload.build().named_modules())
        assert all(isinstance(modules[layer], nn.Module) for layer in workload.exclude)


def test_command_writes_table_and_json(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(bench, "SHORTEST", 1e-3)
    recipes = ["dense_again", "sr_ste"]
    options = ["--models", "tiny", "--patterns", "2:4", "1:16", "--rounds", "4", "--out", str(tmp_path / "new")]
    assert bench.main([*options, "--recipes", *recipes]) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == (tmp_path / "new" / "recipe_overhead.md").read_text().strip()
    table = [line for line in printed.splitlines() if line.startswith("|")]
    assert table[0] == "| recipe | tiny 2:4 | tiny 1:16 |"
    assert [line.split("|")[1].strip() for line in table[2:]] == ["dense", *recipes]
    record = json.loads((tmp_path / "new" / "recipe_overhead.json").read_text())
    assert record["hardware"]["threads"] == torch.get_num_threads()
    assert [(row["pattern"], row["recipe"]) for row in record["rows"]] == [(p, r) for p in ("2:4", "1:16") for r in recipes]
    for row in record["rows"]:
        assert 0 < row["q1"] <= row["ratio"] <= row["q3"]
        assert row["n"] == 4
        assert row["ms"] > 0
        assert row["dense_ms"] > 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--patterns", "5:4"], "5:4"),
        (["--rounds", "0"], "--rounds"),
        (["--models", "tinny"], "tiny"),
        (["--models", "tiny", "--patterns", "1:128", "--rounds", "1"], "1:128"),
    ],
)
def test_mistakes_get_one_line_and_status_two(argv: list[str], said: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(argv)
    assert stopped.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("nmrun bench: error:")
    assert said in error
