"""Lightning, by the callback: the plain loop's bits in every kind of optimization, averages."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from errors import one_line
from lazily import Lazily, needs
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset
from training import bits

import nmrun
from nmrun.errors import ConfigError

# few workers, no validation loop, SWA's loop
pytestmark = [needs("lightning", "lightning"), pytest.mark.filterwarnings("ignore")]
pl, fabrics, lit = Lazily("lightning.pytorch"), Lazily("lightning.fabric"), Lazily("lit")
callbacks, strategies, integration = (
    Lazily("lightning.pytorch.callbacks"),
    Lazily("lightning.pytorch.strategies"),
    Lazily("nmrun.integrations.lightning"),
)


def ours(recipe: str = "sr_ste", **options: Any) -> Any:
    return integration.NMCallback(recipe, "2:4", **{"exclude": None, **options})


def callback(recipe: str) -> Any:
    return ours(recipe, **lit.OPTIONS[recipe])


def weights(module: nn.Module) -> Any:
    return bits(dict(module.state_dict()))


def saves(folder: Path) -> Any:
    """A checkpoint after each epoch."""
    return callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)


def sparse(model: nn.Module, optimizer: Any, recipe: str, steps: int | None = None) -> nmrun.Handle:
    steps = steps or lit.STEPS
    return nmrun.sparsify(
        model, optimizer, recipe, "2:4", steps, **{"exclude": None, **lit.OPTIONS[recipe]}
    )


def plain_loop(recipe: str, accumulate: int = 2, clip: bool = True) -> nn.Module:
    module = lit.Module()
    optimizer: Any = module.configure_optimizers()
    handle = sparse(module, optimizer, recipe, lit.BATCHES * lit.EPOCHS // accumulate)
    for _ in range(lit.EPOCHS):
        for index, batch in enumerate(lit.loader()):
            (module.loss(batch) / accumulate).backward()
            if index % accumulate == accumulate - 1:
                if clip:
                    nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    handle.finalize()
    return module


@pytest.mark.parametrize("recipe", ["sr_ste", "s_ste", "asp", "step", "lbc"])
def test_the_weights_of_a_plain_loop(recipe, tmp_path):
    module, watch = lit.Module(), callback(recipe)
    trainer = lit.trainer(tmp_path, [watch])
    trainer.fit(module, lit.loader())
    assert watch.handle.recipe.step == trainer.global_step == lit.STEPS
    nmrun.sparsity.check_nm(module, "2:4", exclude=None)
    assert weights(module) == weights(plain_loop(recipe))


@pytest.mark.parametrize("closure", [False, True])
def test_manual_optimization(closure, tmp_path):
    module = lit.Manual(closure)
    steps = lit.STEPS * (2 if closure else 1)
    options = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "max_epochs": lit.EPOCHS}
    trainer = lit.trainer(tmp_path, [callback("step")], max_steps=steps, **options)
    trainer.fit(module, lit.loader())
    assert trainer.global_step == steps
    nmrun.sparsity.check_nm(module, "2:4", exclude=None)
    same = plain_loop("step", 1, clip=False) if closure else plain_loop("step")
    assert weights(module) == weights(same)


@pytest.mark.parametrize("recipe", ["s_ste", "step", "lbc", "maskllm", "sqft"])
def test_a_checkpoint_is_plain_and_a_resumed_training_the_same(recipe, tmp_path):
    """Taken after each epoch: in the dense phase of STEP, and after it. The rate falls by a LambdaLR."""
    module = lit.Module(falls=True)
    trainer = lit.trainer(tmp_path, [callback(recipe), saves(tmp_path)], enable_checkpointing=True)
    trainer.fit(module, lit.loader())
    for epoch in (0, 2):
        saved = tmp_path / f"epoch={epoch}.ckpt"
        model = lit.Module.load_from_checkpoint(saved, weights_only=True)
        if recipe in ("s_ste", "sqft") or (epoch == 2 and recipe != "maskllm"):
            nmrun.sparsity.check_nm(model, "2:4", exclude=None)
        again, watch = lit.Module(lr=0.5, falls=True), callback(recipe)
        lit.trainer(tmp_path, [watch]).fit(again, lit.loader(), ckpt_path=saved)
        assert watch.handle.recipe.step == lit.STEPS
        assert weights(again) == weights(module), epoch


@pytest.fixture
def one_process() -> Iterator[None]:
    """Lightning leaves its process group, and how to find it."""
    with mock.patch.dict(os.environ):
        yield
        dist.destroy_process_group()


def in_shards(
    folder: Path,
    added: list[Any],
    start: Path | None = None,
    one_file: bool = False,
    **changes: Any,
) -> dict[str, torch.Tensor]:
    """The weights that a training by FSDP2 ends with."""

    class Sharded(lit.Module):
        def configure_model(self) -> None:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    module, sizes = Sharded(), {"data_parallel_size": 1, "tensor_parallel_size": 1}
    strategy = strategies.ModelParallelStrategy(**sizes, save_distributed_checkpoint=not one_file)
    options = {"gradient_clip_val": None, "enable_checkpointing": True, "devices": 1, **changes}
    trainer = lit.trainer(folder, [*added, saves(folder)], strategy=strategy, **options)
    trainer.fit(module, lit.loader(), ckpt_path=start)
    return {name: p.full_tensor() for name, p in module.named_parameters()}


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("one_file", [False, True])
@pytest.mark.parametrize("recipe", ["asp", "step"])
def test_shards_resume_from_both_phases(recipe, one_file, tmp_path):
    """FSDP2 saves a folder, and loads what the training that begins has names for; or one file."""

    def trained(start: Path | None) -> Any:
        watch = callback(recipe)
        ended = in_shards(tmp_path / str(start is None), [watch], start, one_file)
        assert watch.handle.recipe.total_steps == watch.handle.recipe.step == lit.STEPS
        assert all(weight.is_sharded for weight in watch.handle.finished)
        return bits(ended)

    whole = trained(None)
    for epoch in (0, 2):
        assert trained(tmp_path / "True" / f"epoch={epoch}.ckpt") == whole, epoch


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("one_file", [False, True])
@pytest.mark.parametrize("recipe", ["sr_ste", "step"])
def test_a_recipe_begins_with_the_shards_of_a_dense_training(recipe, one_file, tmp_path):
    """With their weights, and with the steps that follow."""
    dense = in_shards(tmp_path, [], one_file=one_file, max_epochs=1)
    began: dict[str, torch.Tensor] = {}

    class Looks(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            began.update({w.name: w.dense.clone() for w in watch.handle.sparse})

    watch = callback(recipe)
    in_shards(tmp_path / "sparse", [watch, Looks()], tmp_path / "epoch=0.ckpt", one_file)
    assert watch.handle.recipe.total_steps == watch.handle.recipe.step == 9
    assert len(began) == 3
    assert bits(began) == bits({name: dense[name] for name in began})


def cut_off() -> Any:
    """Ends a training once, in its third epoch."""

    class CutOff(pl.Callback):
        cut = False

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == 2 and not self.cut:
                self.cut = True
                raise ZeroDivisionError

    return CutOff()


@pytest.mark.parametrize(("epoch", "other"), [(None, False), (None, True), (0, False), (1, False)])
@pytest.mark.parametrize("recipe", ["sr_ste", "asp"])
def test_a_training_that_was_cut_off_goes_on_in_the_same_process(recipe, epoch, other, tmp_path):
    """From a checkpoint with the bits of a run without a stop; without one it begins anew, with the
    dense weights that it has, by the same callback or another one."""
    module, watch = lit.Module(), callback(recipe)
    files = [cut_off(), saves(tmp_path)]
    trainer = lit.trainer(tmp_path, [watch, *files], enable_checkpointing=True)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, lit.loader())
    again, plain = lit.trainer(tmp_path, [callback(recipe) if other else watch]), lit.Module()
    if epoch is None:
        plain.load_state_dict(module.state_dict())
        for weight in watch.handle.sparse:
            plain.get_parameter(weight.name).data.copy_(weight.dense)
    lit.trainer(tmp_path, [callback(recipe)]).fit(plain, lit.loader())
    saved = None if epoch is None else tmp_path / f"epoch={epoch}.ckpt"
    with pytest.warns(match="this one is left") if other else contextlib.nullcontext():
        again.fit(module, lit.loader(), ckpt_path=saved)
    assert weights(module) == weights(plain)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: [ours(include=r"net\.0"), ours(include=r"net\.3")], r"net\.0\.weight is sparse already: call finalize"),
        (lambda: [ours(), callbacks.WeightAveraging()], "use StochasticWeightAveraging"),
        (lambda: [ours(optimizer=1)], "are 1: say which one"),
        (lambda: [ours(optimizer="0")], "are 1: say which one"),
        (lambda: [ours("asp", total_steps=0)], "total_steps=0: it takes"),
    ],
    ids=["two", "averages", "optimizer", "its type", "steps"],
)  # fmt: skip
def test_mistakes_get_a_line(given, message, tmp_path):
    with one_line(ConfigError, message):
        lit.trainer(tmp_path, given()).fit(lit.Module(), lit.loader())


class Unknown(IterableDataset[torch.Tensor]):
    """Data without a length."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return itertools.islice(lit.loader(), self.count)


@pytest.mark.parametrize("recipe", ["sr_ste", "asp"])
@pytest.mark.parametrize(
    ("limit", "data"),
    [
        ("max_epochs", lambda: lit.loader()),
        ("max_steps", lambda: lit.loader()),
        ("limit_train_batches", lambda: lit.loader()),
        ("", lambda: DataLoader([])),
        ("", lambda: DataLoader(Unknown(0), None)),
    ],
    ids=["epochs", "steps", "batches", "no data", "no data and no length"],
)
def test_a_training_without_steps_leaves_the_module_as_it_is(recipe, limit, data, tmp_path):
    module = lit.Module()
    before = copy.deepcopy(weights(module))
    watch = ours(recipe, total_steps=None if limit else lit.STEPS, **lit.OPTIONS[recipe])
    lit.trainer(tmp_path, [watch], **({limit: 0} if limit else {})).fit(module, data())
    assert weights(module) == before


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("recipe", ["sr_ste", "asp", "step", "maskllm"])
def test_a_second_fit_plans_the_steps_that_follow(recipe, same, tmp_path):
    """By a callback of its own or by the first one's; a third fit has none left."""
    module, watch = lit.Module(), callback(recipe)
    trainer = lit.trainer(tmp_path, [watch if same else callback("sr_ste")], max_epochs=1)
    trainer.fit(module, lit.loader())
    trainer.callbacks, trainer.fit_loop.max_epochs = [watch], lit.EPOCHS
    trainer.fit(module, lit.loader())
    follow = lit.STEPS * (lit.EPOCHS - 1) // lit.EPOCHS
    assert watch.handle.recipe.total_steps == watch.handle.recipe.step == follow
    nmrun.sparsity.check_nm(module, "2:4", exclude=None)
    after = weights(module)
    trainer.fit(module, lit.loader())
    assert weights(module) == after


def test_a_trainer_that_goes_back_to_a_checkpoint_plans_the_whole_run(tmp_path):
    """The Trainer's own steps are those of the fit before."""
    module, watch = lit.Module(), callback("step")
    trainer = lit.trainer(tmp_path, [watch, saves(tmp_path)], enable_checkpointing=True)
    trainer.fit(module, lit.loader())
    again = lit.Module()
    trainer.fit(again, lit.loader(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert watch.handle.recipe.total_steps == watch.handle.recipe.step == lit.STEPS
    assert weights(again) == weights(module)


def test_a_checkpoint_of_a_dense_training_is_warned_of(tmp_path):
    trainer = lit.trainer(tmp_path, [], max_epochs=1)
    trainer.fit(lit.Module(), lit.loader())
    trainer.save_checkpoint(tmp_path / "dense.ckpt")
    watch = callback("step")
    module, trainer = lit.Module(), lit.trainer(tmp_path, [watch])
    with pytest.warns(match="at its step 3, and the recipe begins here, with the first of 9 steps"):
        trainer.fit(module, lit.loader(), ckpt_path=tmp_path / "dense.ckpt")
    assert watch.handle.recipe.total_steps == watch.handle.recipe.step == 9


def test_a_dense_recipe_resumes_without_a_warning(tmp_path):
    whole, again = lit.Module(), lit.Module()
    trainer = lit.trainer(tmp_path, [ours("dense"), saves(tmp_path)], enable_checkpointing=True)
    trainer.fit(whole, lit.loader())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="nmrun")
        trainer = lit.trainer(tmp_path, [ours("dense")])
        trainer.fit(again, lit.loader(), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert weights(again) == weights(whole)


def test_only_sparse_models_compete_for_the_best(tmp_path):
    """The metric is best in the first epoch, when ASP's weights are dense still."""
    best = callbacks.ModelCheckpoint(tmp_path, monitor="epoch", save_top_k=1)
    stop = callbacks.EarlyStopping("epoch", patience=3)
    options = {"enable_checkpointing": True, "num_sanity_val_steps": 0, "max_epochs": 8}
    trainer = lit.trainer(tmp_path, [callback("asp"), best, stop], **options)
    trainer.fit(lit.Module(), lit.loader(), lit.loader(count=1))
    # sparse from the end of epoch 3 on; without a new beginning it would stop there
    assert best.best_model_score == 3.0
    assert trainer.current_epoch == 7
    model = lit.Module.load_from_checkpoint(best.best_model_path)
    nmrun.sparsity.check_nm(model, "2:4", exclude=None)


@pytest.mark.parametrize("recipe", ["proxsparse", "maskllm", "cast"])
def test_it_validates_what_the_run_would_leave(recipe, tmp_path):
    """Also between the batches of a step; the training does not change."""
    phases: list[str] = []

    class Looks(pl.Callback):
        def on_validation_batch_end(self, trainer, pl_module, *_):
            phases.append(watch.handle.phase)
            if watch.handle.phase != "dense":
                nmrun.sparsity.check_nm(pl_module, "2:4", exclude=None)

    ends = []
    for batches in (0, 1):
        module, watch = lit.Module(), ours(recipe)
        options = {"val_check_interval": 3, "limit_val_batches": batches}
        trainer = lit.trainer(tmp_path, [Looks(), watch], **options)
        trainer.fit(module, lit.loader(), lit.loader(count=1))
        ends.append(weights(module))
    assert phases.count("transition") >= 4
    assert ends[0] == ends[1]


def test_without_a_metric_the_last_checkpoint_alone_is_kept(tmp_path):
    """Lightning deletes the one before, also where the weights became sparse between the two."""
    last = callbacks.ModelCheckpoint(tmp_path / "saved", save_on_train_epoch_end=True)
    trainer = lit.trainer(tmp_path, [callback("asp"), last], enable_checkpointing=True)
    trainer.fit(lit.Module(), lit.loader())
    assert [str(path) for path in (tmp_path / "saved").iterdir()] == [last.best_model_path]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("recipe", ["sr_ste", "asp", "s_ste"])
def test_swa_averages_dense_weights(recipe, norm, first, tmp_path):
    """Against averages kept by hand; batch norm gets statistics of the projected network."""
    module = lit.Module(norm)
    swa = callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=1)
    watch = callback(recipe)
    seen: list[dict[str, torch.Tensor]] = []

    class Watch(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if 1 <= trainer.current_epoch < lit.EPOCHS:
                seen.append({w.name: w.dense.clone() for w in watch.handle.sparse})
                sparse.extend(w for w in watch.handle.sparse if len(seen) == 1)

    sparse: list[Any] = []
    order = [watch, swa] if first else [swa, watch]
    trainer = lit.trainer(tmp_path, [Watch(), *order])
    trainer.fit(module, lit.loader())
    assert watch.handle.recipe.total_steps == watch.handle.recipe.step == lit.STEPS
    assert len(seen) == lit.EPOCHS - 1
    nmrun.sparsity.check_nm(module, "2:4", exclude=None)
    for weight in sparse:
        mean = torch.stack([each[weight.name] for each in seen]).mean(0)
        expected = torch.empty_like(mean)
        watch.handle.recipe.project_final(weight.with_dense(mean), expected)
        average = module.get_parameter(weight.name)
        torch.testing.assert_close(average.detach(), expected)
    if norm:
        with torch.no_grad():
            inputs = [module.net[0](batch) for batch in lit.loader()]
        means = torch.stack([x.mean(0) for x in inputs]).mean(0)
        torch.testing.assert_close(module.net[1].running_mean, means, rtol=1e-4, atol=1e-6)


def test_of_several_optimizers_one_has_the_sparse_weights(tmp_path):
    """One for a part of the weights, one for the rest."""

    class Two(lit.Manual):
        def configure_optimizers(self):
            parts = self.net[0], self.net[3:]
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]

        def training_step(self, batch, index):
            self.manual_backward(self.loss(batch))
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    options = {"accumulate_grad_batches": 1, "gradient_clip_val": None, "max_epochs": 1}
    with pytest.raises(ConfigError, match=r"are 2: say which .* NMCallback\(optimizer=0\)"):
        lit.trainer(tmp_path, [callback("sr_ste")], **options).fit(Two(False), lit.loader())
    module, watch = Two(False), ours(optimizer=1)
    lit.trainer(tmp_path, [watch], **options).fit(module, lit.loader())
    assert watch.handle.recipe.step == lit.BATCHES
    assert (module.net[0].weight != 0).all()
    nmrun.sparsity.check_nm(module, "2:4", exclude="net.0")
    # max_steps counts the steps of both
    trainer = lit.trainer(tmp_path, [ours("asp", optimizer=1)], **options, max_steps=6)
    with pytest.raises(ConfigError, match="asp needs total_steps"):
        trainer.fit(Two(False), lit.loader())


def test_the_trainer_of_the_other_package_is_refused():
    class Trainer:
        __module__ = "pytorch_lightning.trainer.trainer"

    with one_line(ConfigError, "is of pytorch_lightning.trainer.trainer: use that of lightning"):
        callback("sr_ste").on_fit_start(Trainer(), lit.Module())


@pytest.mark.parametrize("through_data", [False, True])
def test_an_average_that_a_callback_writes_at_the_end_stays(through_data, tmp_path):
    """As callbacks for an EMA do."""
    averages: list[Any] = []

    class Average(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            with watch.handle.dense_weights():
                average = copy.deepcopy(pl_module.net)
            for parameter in average.parameters():
                parameter.data.mul_(0.5)
            watch.handle.finalize(nn.ModuleDict({"net": average}))
            with torch.no_grad():
                for p, value in zip(pl_module.net.parameters(), average.parameters(), strict=True):
                    (p.data if through_data else p).copy_(value)
            averages.append(average)

    module, watch = lit.Module(), callback("sr_ste")
    lit.trainer(tmp_path, [Average(), watch], max_epochs=1).fit(module, lit.loader())
    assert weights(module.net) == weights(averages[0])
    nmrun.sparsity.check_nm(module, "2:4", exclude=None)


def test_without_a_length_the_option_is_named(tmp_path):
    changes = callbacks.GradientAccumulationScheduler({0: 4, 2: 2})
    for more, data, options in (
        ([], lit.loader(), {"max_epochs": -1}),
        ([], DataLoader(Unknown(), None), {}),
        ([changes], lit.loader(), {"accumulate_grad_batches": 1}),
    ):
        trainer = lit.trainer(tmp_path, [callback("asp"), *more], **options)
        with pytest.raises(ConfigError, match="asp needs total_steps"):
            trainer.fit(lit.Module(), data)


def test_a_recipe_without_phases_needs_no_length(tmp_path):
    module, watch = lit.Module(), callback("sr_ste")
    lit.trainer(tmp_path, [watch]).fit(module, DataLoader(Unknown(), None))
    assert watch.handle.recipe.total_steps is None
    assert weights(module) == weights(plain_loop("sr_ste"))


@pytest.fixture
def doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.usefixtures("doubles")
def test_two_processes(tmp_path):
    """They train what one process trains with twice the batch: in float64, since LBC's first scores
    are equal but for rounding.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = Path(__file__).with_name("lit_ranks.py")
    process = subprocess.run([*command, str(script), str(tmp_path)], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    for recipe in sorted(lit.OPTIONS.keys() - set(lit.DRAWING)):
        results = [torch.load(tmp_path / f"{recipe}{rank}.pt") for rank in (0, 1)]
        assert bits(results[0]) == bits(results[1]), recipe
        alone = plain_loop(recipe).state_dict()
        torch.testing.assert_close(results[0], alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("recipe", ["sr_ste", "step"])
def test_fabric_before_and_after_setup(recipe, first):
    fabric = fabrics.Fabric(accelerator="cpu", devices=1)
    module: Any = lit.Module()
    optimizer: Any = module.configure_optimizers()
    net = module.net
    if first:
        handle = sparse(module, optimizer, recipe)
    net, optimizer = fabric.setup(net, optimizer)
    if not first:
        handle = sparse(module, optimizer, recipe)
    for _ in range(lit.EPOCHS):
        for index, batch in enumerate(fabric.setup_dataloaders(lit.loader())):
            loss = (net(batch) - batch[:, :4].square()).square().mean()
            fabric.backward(loss / lit.ACCUMULATE)
            if index % lit.ACCUMULATE == lit.ACCUMULATE - 1:
                fabric.clip_gradients(net, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
    handle.finalize()
    assert weights(module) == weights(plain_loop(recipe))


def test_what_fabric_saved_goes_on_without_it(tmp_path):
    fabric = fabrics.Fabric(accelerator="cpu", devices=1)
    module: Any = lit.Module()
    optimizer: Any = module.configure_optimizers()
    net, wrapped = fabric.setup(module.net, optimizer)
    sparse(net, wrapped, "sr_ste")
    net(torch.ones(1, 16)).sum().backward()
    wrapped.step()
    fabric.save(tmp_path / "saved.ckpt", {"model": net, "optimizer": wrapped})
    saved, again = torch.load(tmp_path / "saved.ckpt"), lit.Module()
    plain: Any = again.configure_optimizers()
    handle = sparse(again.net, plain, "sr_ste")
    again.net.load_state_dict(saved["model"])
    plain.load_state_dict(saved["optimizer"])
    assert handle.recipe.step == 1
    assert bits(plain.state_dict()) == bits(optimizer.state_dict())
