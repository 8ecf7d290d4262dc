"""Dense training by nmrun's loop against other loops: same model, same data, same optimizer, one
process, paired.

    python benchmarks/reference_loops.py [--rounds 10] [--threads 1] [--only translation] [--out
    benchmarks/results/reference_loops.md]

Each round times a stretch of steps of nmrun's loop and of two copies of the other, in random order;
the ratio is nmrun's time over the other's. Making batches, the learning rate, checks for non-finite
losses and counting are part of nmrun's time, logging, evaluation and saving of neither. ``--only
stream`` is about reading images alone: it takes ImageNet, or a folder like it, in
NMRUN_DATA/imagenet.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional
from torchvision import transforms
from torchvision.datasets import ImageFolder

from nmrun.lab import models
from nmrun.lab.bench.harness import hardware
from nmrun.lab.config import composition, schema
from nmrun.lab.tasks.storage import data_folder
from nmrun.lab.train.build import build
from nmrun.lab.train.console import Console
from nmrun.lab.train.loop import Loop
from nmrun.papers.translation.fairseq import fairseq

SHORTEST = 2.0  # seconds of a stretch
COMMON = (
    "recipe=dense", "track=local", "trainer.device=cpu", "trainer.epochs=1000", "trainer.precision=fp32",
)  # fmt: skip
Case = tuple[tuple[str, ...], Callable[[Loop], Iterator[None]]]


def images(fused: bool | None = None) -> Case:
    """ResNet-18 on CIFAR-10 (in NMRUN_DATA), as in a torchvision training script: a DataLoader over
    tensors, crop and flip left out in both.
    """

    def plain(loop: Loop) -> Iterator[None]:
        task: Any = loop.task  # the case's own
        model = models.build(
            {"name": "resnet18", "form": "cifar", "include": None, "exclude": []}, task.inputs
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        data = torch.utils.data.TensorDataset(task.images, task.labels)
        while True:
            for pixels, labels in torch.utils.data.DataLoader(
                data, 32, shuffle=True, drop_last=True
            ):
                loss = functional.cross_entropy(model(task.normalise(pixels)), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss.item()
                yield

    return (
        "dataset=cifar10",
        "dataset.train_size=2000",
        "dataset.crop_padding=0",
        "dataset.flip=false",
        "model=resnet18",
        "optimizer=adamw",
        "trainer.batch_size=32",
    ), plain


def language(fused: bool | None = None) -> Case:
    """A GPT of 4 layers of width 256, as in nanoGPT's loop: random windows of one long tensor,
    clipping, AdamW.
    """

    def plain(loop: Loop) -> Iterator[None]:
        options = {"name": "gpt_tiny", "layers": 4, "heads": 4, "width": 256, "dropout": 0.0}
        model = models.build({**options, "include": None, "exclude": []}, loop.task.inputs)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        text, context = (
            torch.as_tensor(loop.task.micro_batches(0, 0, 1)[0][0]).flatten(),
            loop.task.inputs["context"],
        )
        text = text.repeat(8)
        while True:
            starts = torch.randint(len(text) - context - 1, (16,)).tolist()
            tokens = torch.stack([text[start : start + context] for start in starts])
            targets = torch.stack([text[start + 1 : start + context + 1] for start in starts])
            logits = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            yield

    model = ("model=gpt_tiny", "model.layers=4", "model.width=256", "optimizer=adamw")
    return (
        "dataset=stdlib_text",
        "dataset.context=256",
        "trainer.batch_size=16",
        "trainer.clip=1",
        *model,
    ), plain


def translation(size: str) -> Case:
    """fairseq's Transformer on Multi30k (in NMRUN_DATA): ``Trainer.train_step`` of fairseq, with
    its own model, criterion, Adam, schedule and collation, on the batches of nmrun's task in the
    same order. ``size``: ``small`` (2 + 2 layers of width 128) or ``iwslt``."""
    width, ffn, layers, heads = {"small": (128, 256, 2, 4), "iwslt": (512, 1024, 6, 4)}[size]

    def plain(loop: Loop) -> Iterator[None]:
        configs, schedules, adam = (
            fairseq(name)
            for name in (
                "dataclass.configs",
                "optim.lr_scheduler.inverse_square_root_schedule",
                "optim.adam",
            )
        )
        config = OmegaConf.structured(configs.FairseqConfig)
        config.common.cpu, config.optimization.lr = True, [2e-3]
        config.optimizer = adam.FairseqAdamConfig("adam", adam_betas="(0.9, 0.98)")
        config.lr_scheduler = schedules.InverseSquareRootLRScheduleConfig(
            "inverse_sqrt", warmup_updates=400, warmup_init_lr=1e-7
        )
        given: Any = loop.task  # the case's own
        tasks, pairs = fairseq("tasks.translation"), fairseq("data").LanguagePairDataset
        task = tasks.TranslationTask(tasks.TranslationConfig(), given.source, given.target)
        sizes = {
            "embed_dim": width,
            "ffn_embed_dim": ffn,
            "layers": layers,
            "attention_heads": heads,
        }
        both = {
            f"{side}_{key}": value
            for side in ("encoder", "decoder")
            for key, value in sizes.items()
        }
        widths = {"decoder_input_dim": width, "decoder_output_dim": width}
        transformer = fairseq("models.transformer")
        options = argparse.Namespace(**both, **widths, dropout=0.1, share_all_embeddings=True)
        model = transformer.TransformerModelBase.build_model(
            transformer.TransformerConfig.from_namespace(options), task
        )
        smoothed = fairseq(
            "criterions.label_smoothed_cross_entropy"
        ).LabelSmoothedCrossEntropyCriterion
        trainer = fairseq("trainer").Trainer(config, task, model, smoothed(task, False, 0.1))
        sides = [
            [
                torch.from_numpy(side.tokens[begin:end].astype("int64"))
                for begin, end in zip(side.starts, side.starts[1:], strict=False)
            ]
            for side in given.splits["train"]
        ]
        lengths = [[len(sentence) for sentence in side] for side in sides]
        data = pairs(
            sides[0],
            lengths[0],
            task.source_dictionary,
            sides[1],
            lengths[1],
            task.target_dictionary,
            shuffle=False,
        )
        # which draws the first epoch's batches; a measurement is shorter than that
        given.micro_batches(0, 0, 1)
        _, rows, order = given._order
        for index in itertools.cycle(order):
            chosen = rows[given._cuts[index] : given._cuts[index + 1]]
            trainer.train_step([data.collater([data[row] for row in chosen])])
            yield

    data = (
        "dataset=multi30k",
        "dataset.vocabulary=4000",
        "dataset.max_tokens=1024",
        "trainer.label_smoothing=0.1",
    )
    model = (
        "model=fairseq_transformer",
        f"model.width={width}",
        f"model.ffn={ffn}",
        f"model.heads={heads}",
        f"model.layers={layers}",
    )
    adam = ("optimizer=adam", "optimizer.lr=2e-3", "optimizer.betas=[0.9,0.98]")
    return (*data, *model, *adam, "schedule=inverse_sqrt", "schedule.warmup_steps=400"), plain


def stream() -> Case:
    """Batches of 50 training images of 224 x 224 pixels read from JPEG files, without workers,
    without a model: torchvision's pipeline.
    """

    def plain(loop: Loop) -> Iterator[None]:
        steps = [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
        ]
        steps.append(transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        data = ImageFolder(str(data_folder() / "imagenet" / "train"), transforms.Compose(steps))
        while True:
            for _ in torch.utils.data.DataLoader(data, 50, shuffle=True, drop_last=True):
                yield

    dataset = (
        "dataset=imagenet",
        "dataset.val_size=null",
        "dataset.workers=0",
        "trainer.batch_size=50",
    )
    return (*dataset, "model=resnet18", "optimizer=sgd"), plain


def batches(loop: Loop) -> Iterator[None]:
    """nmrun's training batches."""
    for number in itertools.count():
        loop.task.micro_batches(*divmod(number, loop.task.batches_per_epoch), 1)
        yield


CASES: dict[str, tuple[str, Callable[[], Case]]] = {
    "images": ("ResNet-18, CIFAR-10, batches of 32; torch's default AdamW", images),
    "images_fused": (
        "the same, fused AdamW in the plain loop too",
        functools.partial(images, True),
    ),
    "language": ("GPT, 4 layers of width 256, 16 windows of 256; torch's default AdamW", language),
    "language_fused": (
        "the same, fused AdamW in the plain loop too",
        functools.partial(language, True),
    ),
    "translation": (
        "Transformer, 2 + 2 layers of width 128, Multi30k; fairseq's Trainer",
        functools.partial(translation, "small"),
    ),
    "translation_iwslt": (
        "Transformer, 6 + 6 layers of width 512, Multi30k; fairseq's Trainer",
        functools.partial(translation, "iwslt"),
    ),
    "stream": ("reading 50 images of 224 x 224, no training; torchvision's pipeline", stream),
}


def ours(loop: Loop) -> Iterator[None]:
    """nmrun's training steps."""
    loop.model.train()
    while True:
        epoch, index = divmod(loop.steps.step, loop.task.batches_per_epoch)
        loop.steps.train_step(epoch, index, measure_flips=False)
        loop.steps.losses = loop.steps.losses[-10:]  # as if a row was logged
        yield


def loop_of(overrides: Iterable[str]) -> Loop:
    """nmrun's loop of a dense run."""
    composition.register()
    with (
        tempfile.TemporaryDirectory() as folder,
        initialize_config_module("nmrun.conf", version_base="1.3"),
    ):
        config = schema.check(compose("nmrun", [*COMMON, *overrides, f"output_dir={folder}"]))
        return Loop(config, build(config), Console(None), "benchmark")


def measure(case: Callable[[], Case], rounds: int) -> str:
    """Median ratios with quartiles, of wall time and of CPU time, that of CPU time between two
    copies of the other loop, which shows how far equal loops stray from 1 here, and the
    milliseconds of a step of it."""
    overrides, plain = case()
    loop = loop_of(overrides)
    arms = [(batches if case is stream else ours)(loop), plain(loop), plain(loop)]
    for steps in arms:
        next(steps), next(steps)
    began = time.perf_counter()
    for steps in arms:
        next(steps)
    count = math.ceil(SHORTEST / (time.perf_counter() - began) * len(arms))
    wall, worked = ([[0.0] * rounds for _ in arms] for _ in range(2))
    for number in range(rounds):
        for which in random.sample(range(len(arms)), len(arms)):
            clocks = time.perf_counter(), time.process_time()
            for _ in range(count):
                next(arms[which])
            wall[which][number], worked[which][number] = (
                time.perf_counter() - clocks[0],
                time.process_time() - clocks[1],
            )
    cells = [ratio(wall[0], wall[1]), ratio(worked[0], worked[1]), ratio(worked[2], worked[1])]
    return " | ".join([*cells, f"{1e3 * statistics.median(worked[1]) / count:.0f} ms"])


def ratio(times: list[float], others: list[float]) -> str:
    """Median and quartiles of the ratios of rounds."""
    q1, middle, q3 = statistics.quantiles(
        [one / other for one, other in zip(times, others, strict=True)], n=4, method="inclusive"
    )
    return f"{middle:.3f} [{q1:.3f}, {q3:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--only", nargs="+", choices=CASES, default=[name for name in CASES if name != "stream"]
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # fairseq's, of what torch is about to drop
    machine = hardware()
    lines = [
        "Time of a dense training step in nmrun's loop over that in another loop: median [quartiles] of paired stretches.",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, torch {machine['torch']}, n = {options.rounds}, float32.",
        "",
        "| | wall time | CPU time | CPU time, the other loop over itself | CPU time of a step of the other loop |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for name in options.only:
        title, case = CASES[name]
        lines.append(f"| {title} | {measure(case, options.rounds)} |")
        print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
