"""The Trainer of transformers, by the callback: the plain loop's bits, checkpoints, refusals."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from errors import one_line
from lazily import Lazily, needs
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from training import bits

import nmrun
from nmrun.errors import ConfigError, RunError

pytestmark = needs("huggingface", "transformers", "accelerate")
transformers, hf = Lazily("transformers"), Lazily("hf")
huggingface = Lazily("nmrun.integrations.huggingface")


def weights(model: torch.nn.Module) -> Any:
    return bits(dict(model.state_dict()))


def callback(recipe: str, **options: Any) -> Any:
    return huggingface.NMTrainerCallback(
        recipe, "2:4", **hf.OPTIONS[recipe], **{"exclude": None, **options}
    )


def trained(folder: Path, recipe: str, resume: str | None = None, **changes: Any) -> Any:
    """The trainer and the callback after training; STEP with an optimizer that it can freeze."""
    model = changes.pop("model", None) or hf.gpt2()
    sparse = callback(recipe)
    if recipe == "step":
        changes["optimizers"] = hf.adamw(model), None
    trainer = hf.trainer(folder, [sparse], model=model, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, sparse


def plain_loop(recipe: str, batches: list[dict[str, Tensor]]) -> torch.nn.Module:
    """What the Trainer does, written out; torch's AdamW has two groups there."""
    model = hf.gpt2()
    if recipe == "step":
        optimizer = hf.adamw(model)
    else:
        decayed = [p for n, p in model.named_parameters() if p.ndim > 1]
        others = [p for n, p in model.named_parameters() if p.ndim == 1]
        groups = [{"params": decayed}, {"params": others}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)
    torch.manual_seed(42)  # the Trainer's, by which adapters are drawn
    handle = nmrun.sparsify(
        model, optimizer, recipe, "2:4", hf.STEPS, **{"exclude": None, **hf.OPTIONS[recipe]}
    )
    schedule = transformers.get_scheduler("linear", optimizer, 0, hf.STEPS)
    for i in range(hf.STEPS):
        pair = batches[2 * i : 2 * i + 2]
        tokens = sum(batch["labels"].numel() for batch in pair)
        for batch in pair:
            model(**batch, num_items_in_batch=torch.tensor(tokens)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    handle.finalize()
    return model


@pytest.mark.parametrize("recipe", ["sr_ste", "s_ste", "asp", "step", "lbc", "sqft"])
def test_the_weights_of_a_plain_loop(recipe, tmp_path, monkeypatch):
    batches: list[dict[str, Tensor]] = []
    collate = hf.collate

    def recorded(rows):
        batches.append(collate(rows))
        return batches[-1]

    monkeypatch.setattr("hf.collate", recorded)
    trainer, sparse = trained(tmp_path, recipe)
    assert sparse.handle.recipe.step == trainer.state.global_step == hf.STEPS
    nmrun.sparsity.check_nm(trainer.model, "2:4", exclude=None)
    assert weights(trainer.model) == weights(plain_loop(recipe, batches))


@pytest.mark.parametrize("recipe", ["s_ste", "step", "lbc", "maskllm", "sqft"])
def test_a_checkpoint_is_plain_and_a_resumed_training_the_same(recipe, tmp_path):
    """Taken in the dense phase of STEP, and after it."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole, _ = trained(tmp_path / "whole", recipe, **saving)
    for step in (3, 6):
        saved = tmp_path / "whole" / f"checkpoint-{step}"
        model, info = transformers.GPT2LMHeadModel.from_pretrained(saved, output_loading_info=True)
        assert not any(info.values())
        if recipe in ("s_ste", "sqft") or (step == 6 and recipe != "maskllm"):
            nmrun.sparsity.check_nm(model, "2:4", exclude=None)
        again, sparse = trained(tmp_path / "again", recipe, str(saved), **saving)
        assert sparse.handle.recipe.step == hf.STEPS
        assert weights(again.model) == weights(whole.model), step


@pytest.mark.parametrize("recipe", [pytest.param("proxsparse", marks=pytest.mark.slow), "maskllm"])
def test_it_evaluates_what_the_run_would_leave(recipe, tmp_path):
    """On two data sets, at the start, in steps and at the end of epochs; the training does not change."""
    seen: list[tuple[int, str]] = []

    class Looks(transformers.TrainerCallback):
        def on_prediction_step(self, args, state, control, model, **_):
            seen.append((state.global_step, sparse.handle.phase))
            if sparse.handle.phase != "dense":
                nmrun.sparsity.check_nm(model, "2:4", exclude=None)

    ends = []
    for evaluates in ({}, {"eval_strategy": "epoch"}, {"eval_strategy": "steps", "eval_steps": 3}):
        sparse = huggingface.NMTrainerCallback(recipe, "2:4", dense=0.25, exclude=None)
        evaluates["eval_on_start"] = bool(evaluates)
        trainer = hf.trainer(tmp_path, [Looks(), sparse], **evaluates)
        trainer.eval_dataset = {"one": trainer.eval_dataset, "two": trainer.eval_dataset}
        trainer.train()
        ends.append(weights(trainer.model))
    assert {(0, "dense"), (3, "transition"), (6, "transition"), (8, "sparse")} <= set(seen)
    assert ends[0] == ends[1] == ends[2]


def test_only_sparse_models_compete_for_the_best(tmp_path):
    """The metric is best at first, when ASP's weights are still dense."""
    count = itertools.count()
    trainer, _sparse = trained(
        tmp_path, "asp", save_strategy="steps", eval_strategy="steps", save_steps=1, eval_steps=1,
        load_best_model_at_end=True, metric_for_best_model="badness", greater_is_better=False,
        compute_metrics=lambda _: {"badness": float(next(count))},
    )  # fmt: skip
    assert re.fullmatch(r".*checkpoint-4", trainer.state.best_model_checkpoint)
    best = transformers.GPT2LMHeadModel.from_pretrained(trainer.state.best_model_checkpoint)
    nmrun.sparsity.check_nm(trainer.model, "2:4", exclude=None)
    assert weights(trainer.model) == weights(best)
    last = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-8")
    assert weights(best) != weights(last)


def test_a_dense_model_that_is_loaded_at_the_end_is_an_error(tmp_path):
    dense = hf.gpt2().state_dict()

    class Loads(transformers.TrainerCallback):
        def on_train_end(self, args, state, control, model, **_):
            model.load_state_dict(dense)

    trainer = hf.trainer(tmp_path, [Loads(), callback("sr_ste")])
    with one_line(RunError, r"c_attn\.weight was loaded at the end .* not 2:4"):
        trainer.train()


def test_another_optimizer_is_refused_at_its_first_step(tmp_path):
    class Replaces(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 2:
                trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)

    sparse = callback("asp")
    trainer = hf.trainer(tmp_path, [sparse, Replaces()])
    with one_line(RunError, "another optimizer than the Trainer's"):
        trainer.train()
    assert trainer.state.global_step == 3


COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"gradient_checkpointing": True}, id="gradient_checkpointing"),
        pytest.param(COMPILED, id="compile", marks=pytest.mark.slow),
        pytest.param({"bf16": True}, id="bf16"),
    ],
)
def test_with_the_trainer_s_options(changes, tmp_path):
    trainer, sparse = trained(tmp_path, "step", **changes)
    plain, _ = trained(tmp_path, "step")
    assert sparse.handle.recipe.step == hf.STEPS
    nmrun.sparsity.check_nm(trainer.model, "2:4", exclude=None)
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    same = weights(trainer.model) == weights(plain.model)
    assert same != ("bf16" in changes)


@pytest.mark.minutes
def test_compiled_for_this_machine(tmp_path):
    trainer, sparse = trained(tmp_path, "step", torch_compile=True)
    assert trainer.args.torch_compile_backend == "inductor"
    plain, _ = trained(tmp_path, "step")
    assert sparse.handle.recipe.step == hf.STEPS
    nmrun.sparsity.check_nm(trainer.model, "2:4", exclude=None)
    for name, tensor in plain.model.state_dict().items():
        actual = trainer.model.state_dict()[name]
        torch.testing.assert_close(actual, tensor, rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.minutes
def test_two_processes(tmp_path):
    """They train what one process trains with twice the batch. What FSDP2's shards are saved as in
    the middle is read by ``from_pretrained``.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = Path(__file__).with_name("hf_ranks.py")
    process = subprocess.run([*command, str(script), str(tmp_path)], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    alone = trained(tmp_path / "alone", "sr_ste")[0].model.state_dict()
    for rank in (0, 1):
        result = torch.load(tmp_path / f"{rank}.pt")
        assert result["step"] == hf.STEPS
        assert bits(result["weights"]) == bits(torch.load(tmp_path / "0.pt")["weights"])
        for name, tensor in alone.items():
            torch.testing.assert_close(result["weights"][name], tensor, rtol=1e-3, atol=1e-4)
    sharded = tmp_path / "sharded"
    model, read = transformers.GPT2LMHeadModel.from_pretrained(sharded, output_loading_info=True)
    assert not any(read.values())
    nmrun.sparsity.check_nm(model, "2:4", exclude=None)
    assert weights(model) == weights(torch.load(tmp_path / "replica.pt", weights_only=False))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"recipe": "spet"}, ConfigError, "recipe=spet: no such recipe; did you mean step?"),
        ({"pattern": "5:4"}, ValueError, "5:4 is not an N:M pattern"),
        ({"decya": 0.1}, TypeError, "sr_ste: decya: no such hyperparameter; did you mean decay?"),
        ({"exclud": "fc"}, TypeError, "exclud: no such hyperparameter; did you mean exclude?"),
        ({"decay": -1.0}, ConfigError, "decay=-1.0: it takes"),
    ],
)
def test_mistakes_are_told_before_the_training(arguments, error, message):
    with one_line(error, re.escape(message)):
        huggingface.NMTrainerCallback(**{"exclude": None, **arguments})


def test_step_names_the_optimizer_it_needs(tmp_path):
    trainer = hf.trainer(tmp_path, [callback("step")])
    with one_line(ConfigError, r"use nmrun\.optim\.AdamW, a drop-in"):
        trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 6])
def test_by_class_and_options_step_keeps_the_trainer_s_groups(stop, tmp_path):
    """As the page recommends. By the Trainer's own AdamW another recipe trains the same groups."""
    options = {
        "optimizer_cls_and_kwargs": (nmrun.optim.AdamW, {"lr": 0.01}),
        "weight_decay": 0.1, "save_strategy": "steps", "save_steps": 3,
    }  # fmt: skip
    whole = hf.trainer(tmp_path / "whole", [callback("step")], **options)
    whole.train()
    stock = hf.trainer(tmp_path / "stock", [callback("sr_ste")], weight_decay=0.1)
    stock.train()
    groups = [
        [(len(group["params"]), group["weight_decay"]) for group in each.optimizer.param_groups]
        for each in (whole, stock)
    ]
    assert groups[0] == groups[1]
    assert [decay for _, decay in groups[0]] == [0.1, 0.0]
    again = hf.trainer(tmp_path / "again", [callback("step")], **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{stop}"))
    assert weights(again.model) == weights(whole.model)


@pytest.mark.parametrize(("recipe", "optim"), [("sr_ste", "adamw_torch"), ("asp", "sgd")])
def test_a_checkpoint_without_the_optimizer_is_refused(recipe, optim, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3, "save_only_model": True, "optim": optim}
    trained(tmp_path, recipe, **saving)
    with one_line(ConfigError, r"the checkpoint of step 3 has no state of"):
        trained(tmp_path, recipe, str(tmp_path / "checkpoint-3"), **saving)


def test_a_checkpoint_of_shards_is_refused():
    """The Trainer loads an optimizer's shards, into the names that it has, before any callback."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(16, 8)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        before = model.weight.full_tensor()
        state = transformers.TrainerState(global_step=3, max_steps=hf.STEPS)
        with one_line(ConfigError, r"the checkpoint of step 3 is in shards \(FSDP\)"):
            callback("sr_ste").on_train_begin(None, state, None, model=model, optimizer=optimizer)
        assert torch.equal(model.weight.full_tensor(), before)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_a_checkpoint_of_a_dense_training_is_warned_of(optim, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3, "optim": optim}
    hf.trainer(tmp_path, [], **saving).train()
    message = "at its step 3, and the recipe begins here, with the first of 5 steps"
    with pytest.warns(UserWarning, match=message):
        trainer, sparse = trained(tmp_path, "sr_ste", str(tmp_path / "checkpoint-3"), **saving)
    assert sparse.handle.recipe.total_steps == sparse.handle.recipe.step == 5
    nmrun.sparsity.check_nm(trainer.model, "2:4", exclude=None)


def cut_off(after: int | None) -> Any:
    """Ends a training once as Ctrl-C does."""

    class CutOff(transformers.TrainerCallback):
        left = after

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == self.left:
                self.left = None
                raise KeyboardInterrupt

    return CutOff()


def test_a_pruned_trial_ends_without_an_error(tmp_path, monkeypatch):
    """As with Optuna: the Trainer ends a training in ASP's dense phase."""

    class PrunedError(Exception):
        pass

    def report(*_: Any) -> None:
        trainer.state.is_hyper_param_search = True
        trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        raise PrunedError

    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    trainer = hf.trainer(tmp_path, [callback("asp", total_steps=8)], **evaluated)
    monkeypatch.setattr(trainer, "_report_to_hp_search", report)
    with pytest.raises(PrunedError):
        trainer.train()
    assert not any("nmrun" in group for group in trainer.optimizer.param_groups)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sr_ste", "asp"])
@pytest.mark.parametrize("from_checkpoint", [3, 6])
def test_after_ctrl_c_a_training_goes_on_in_the_same_process(recipe, from_checkpoint, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole, _ = trained(tmp_path / "whole", recipe, **saving)
    stopping = [callback(recipe), cut_off(7)]
    trainer = hf.trainer(tmp_path / "again", stopping, **saving)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "again" / f"checkpoint-{from_checkpoint}"))
    assert weights(trainer.model) == weights(whole.model)


class Overflows(torch.amp.GradScaler):
    """Finds an infinite gradient in the first step, which it skips."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=2.0)
        self.steps = 0

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        if self.steps == 1:
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad.fill_(torch.inf)
        return super().step(optimizer, *args, **kwargs)


@pytest.mark.slow
def test_after_a_skipped_step_a_training_goes_on_in_the_same_process(tmp_path):
    """The Trainer counts the step, the recipe does not: so their clocks differ at the checkpoint."""
    ends = []
    # without clipping, which would see the infinite gradients first
    options = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.0}
    for stop in (None, 3):
        sparse = callback("asp")
        trainer = hf.trainer(tmp_path, [sparse, cut_off(stop)], **options)
        trainer.accelerator.scaler = Overflows()
        if stop is None:
            trainer.train()
        else:
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert sparse.handle.recipe.step == 4
        ends.append(weights(trainer.model))
    assert ends[0] == ends[1]


def test_events_are_in_the_trainer_s_log(tmp_path):
    trainer, sparse = trained(tmp_path, "asp")
    logged = [row for row in trainer.state.log_history if "nmrun" in row]
    assert [(row["step"], "ASP pruned once" in row["nmrun"]) for row in logged] == [(4, True)]
    assert sparse.handle.pop_events() == []
