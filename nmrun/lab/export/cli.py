"""The verbs of a finished run's network: ``nmrun export RUN --out DIR [--format ...]`` writes it for
other programs, ``nmrun sample RUN`` and ``nmrun predict RUN FILE`` print what it says."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmrun import atomic
from nmrun.errors import ConfigError, RunError, refused
from nmrun.lab.arguments import Parser, consent_option, files_of_the_command, in_range
from nmrun.lab.runs import locks
from nmrun.lab.runs.run_folder import RESULT, RunFolder, activations_of
from nmrun.ranges import SEED, number, whole
from nmrun.registry import find

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nmrun.lab.export.finished_run import FinishedRun
    from nmrun.lab.tasks.text.classification import TextClassification

FORMATS = {
    "safetensors": "nmrun.lab.export.finished_run.write_plain",
    "packed": "nmrun.lab.export.packed.write",
    "onnx": "nmrun.lab.export.onnx_graph.write",
    "hf": "nmrun.lab.export.hf.write",
}
OTHERS = ("onnx", "hf")  # formats of other programs' networks, which prune no activations
SHOWN = 3  # classes of an image


def _parser(verb: str, description: str) -> Parser:
    parser = Parser(prog=f"nmrun {verb}", description=description)
    parser.add_argument("run", type=Path, metavar="RUN", help="a finished run's folder")
    consent_option(parser)
    return parser


def _read(options: Any) -> FinishedRun:
    if not (options.run / RESULT).is_file():
        RunFolder(options.run).demand(options.run)
    from nmrun.lab.export import finished_run  # torch

    return finished_run.read(options.run, options.yes)


# --- export ---------------------------------------------------------------------------------------


def export(argv: Sequence[str]) -> int:
    """Check that every sparse layer holds its pattern, then write; returns 0.

    A format is a function of run and folder. It returns the lines to print, the first of which
    begins with a file's name, and raises ConfigError for a run or machine that it is not for,
    RunError for weights that it cannot write. All files are written beside DIR first.
    """
    parser = _parser("export", "Copy a finished run's model, checked, to a folder.")
    text = "where to put the files and sparsity.json"
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=text)
    text = "default: safetensors, zeros and all"
    parser.add_argument("--format", choices=FORMATS, default="safetensors", help=text)
    text = "with --format packed: linear layers in int8 where that changes their outputs little"
    parser.add_argument("--precision", choices=["int8"], help=text)
    options = parser.parse_args(argv)
    if options.precision and options.format != "packed":
        raise ConfigError(f"--precision {options.precision} is for --format packed alone")
    if options.out.resolve() == options.run.resolve():
        raise ConfigError(f"--out {options.out} is the run's own folder; name another")
    try:
        run = _read(options)
        pruned = activations_of(run.result["config"])
        if not run.layers:
            raise ConfigError(f"{options.run} is a dense run, whose model.safetensors is plain")
        if pruned and options.format in OTHERS:
            raise ConfigError(
                f"trainer.activations={pruned}: its activations are pruned, which this format cannot "
                "say (trainer.activations_dense_end trains a network with dense ones)"
            )
        write = find("--format", options.format, FORMATS)
        if options.precision:
            write = partial(write, precision=options.precision)
        lines = _whole(run, options.out, write)
    except OSError as error:
        raise RunError(f"{error.filename or options.out}: {error.strerror or error}") from None
    print("\n".join(lines))
    return 0


def _whole(
    run: FinishedRun, to: Path, write: Callable[[FinishedRun, Path], list[str]]
) -> list[str]:
    """Write to a folder next to ``to``, whose files are then moved there. Other files in ``to`` stay. A
    kill may leave some files missing, but never files of two exports."""
    place = to.absolute()
    # a failure leaves no empty folders
    root = next(parent for parent in place.parents if parent.is_dir())
    with locks.folder_beside(root / place.name) as part, atomic.disk_errors(root / place.name):
        (new := part / "new").mkdir()
        first, *others = write(run, new)
        atomic.sync(new)
        to.mkdir(parents=True, exist_ok=True)
        names = [file.name for file in new.iterdir()]
        for name in names:
            (to / name).unlink(missing_ok=True)
        for name in names:
            os.rename(new / name, to / name)
    return [f"{to}{os.sep}{first}", *others]


# --- sample ---------------------------------------------------------------------------------------


def sample(argv: Sequence[str]) -> int:
    """Continue a text by a language model, token by token; returns 0."""
    parser = _parser("sample", "Continue a text by a trained language model.")
    parser.add_argument("--prompt", default="\n", help="what the text begins with; default: a line")
    parser.add_argument(
        "--tokens", type=in_range(int, whole(1)), default=200, help="how many follow; default 200"
    )
    parser.add_argument(
        "--temperature", type=in_range(float, number(0)), default=1.0,
        help="of the softmax that tokens are drawn by; 0 takes the likeliest; default 1",
    )  # fmt: skip
    parser.add_argument("--seed", type=in_range(int, SEED), default=0)
    options = parser.parse_args(argv)
    run = _read(options)
    from nmrun.lab.export.finished_run import network
    from nmrun.lab.tasks.text.language import LanguageModelling

    model, task = network(run)
    if not isinstance(task, LanguageModelling) or task.codec is None:
        raise ConfigError(
            f"{options.run}: nmrun sample takes a language model whose data are texts; nmrun predict "
            "takes classifiers"
        )
    codec = task.codec()
    with refused("--prompt: it is not UTF-8: ", UnicodeEncodeError):
        begun = [*codec.encode(options.prompt)]
    if not begun:
        raise ConfigError("--prompt: it takes one token or more")
    tokens = continued(
        model, begun, options.tokens, task.context, task.vocabulary, options.temperature, options.seed
    )  # fmt: skip
    print(codec.decode(tokens))
    return 0


def continued(
    model: Callable[[Tensor], Tensor],
    begun: Sequence[int],
    count: int,
    context: int,
    vocabulary: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[int]:
    """``begun`` and ``count`` more tokens, each drawn from the softmax of the model's logits at the
    last place over ``temperature``; 0 takes the largest. The model sees the last ``context`` tokens."""
    import torch

    generator, tokens = torch.Generator().manual_seed(seed), list(begun)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([tokens[-context:]]))[0, -1, :vocabulary].double()
            if temperature == 0:
                tokens.append(int(logits.argmax()))
                continue
            shares = torch.softmax(logits / temperature, 0)
            tokens.append(int(torch.multinomial(shares, 1, generator=generator)))
    return tokens


# --- predict --------------------------------------------------------------------------------------


def predict(argv: Sequence[str]) -> int:
    """Say the classes of images, or of the lines of a text file; returns 0."""
    parser = _parser("predict", "Say what a trained classifier sees in files.")
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE",
        help="images; or texts, one a line, pairs with a tab between them",
    )  # fmt: skip
    options = parser.parse_args(argv)
    run = _read(options)
    from nmrun.lab.export.finished_run import network
    from nmrun.lab.tasks.text.classification import TextClassification

    model, task = network(run)
    said = run.result.get("signature") or task.signature  # the data may have changed since
    names, image = said.get("classes"), said.get("input", {})
    for file in options.files:
        if isinstance(task, TextClassification):
            for line, outputs in _of_texts(file, model, task):
                print(f"{_said(outputs, names, 1)}\t{line}")
        elif "mean" in image:
            outputs = model(image_input(file, image)[None])[0]
            print(f"{file}: {_said(outputs, names, SHOWN)}")
        else:
            raise ConfigError(
                f"{options.run}: nmrun predict takes classifiers of images and of texts; nmrun sample "
                "takes language models"
            )
    return 0


def _said(outputs: Tensor, names: Sequence[str] | None, most: int) -> str:
    """The likeliest classes with their probabilities; of a single output, the score."""
    if len(outputs) == 1:
        return f"{float(outputs[0]):.4g}"
    shares = outputs.detach().double().softmax(0)
    best = shares.argsort(descending=True)[:most].tolist()
    return ", ".join(f"{names[i] if names else i} {float(shares[i]):.3f}" for i in best)


def _of_texts(
    file: Path, model: nn.Module, task: TextClassification
) -> Iterator[tuple[str, Tensor]]:
    """The lines of a file, each with its outputs (classes,) as an evaluation computes them."""
    import torch

    with files_of_the_command(), refused(f"{file}: not a text in UTF-8: ", UnicodeDecodeError):
        content = file.read_text(encoding="utf-8-sig")
    if not content:
        raise ConfigError(f"{file}: it is empty; it takes texts, one a line")
    lines = content.removesuffix("\n").split("\n")
    texts = [tuple(line.split("\t")) for line in lines]
    for place, text in enumerate(texts, 1):
        if len(text) != task.texts:
            takes = "a pair with one tab between" if task.texts == 2 else "one text without a tab"
            raise ConfigError(f"{file}, line {place}: it takes {takes}")
    for line, text in zip(lines, texts, strict=True):
        with torch.no_grad():
            yield line, task.scores(model, task.batch_of(text))[0]


def image_input(file: Path, signature: dict[str, Any]) -> Tensor:
    """What the network takes of an image file (C, H, W), by the ``input`` of a task's signature."""
    import torch
    from PIL import Image, ImageOps
    from torchvision.transforms import functional as tv

    from nmrun.lab.tasks.vision.classification import in_8_bits

    channels, height, width = signature["shape"]
    with (
        refused(f"{file} is no image: ", OSError, SyntaxError, Image.DecompressionBombError),
        Image.open(file) as opened,
    ):
        image: Any = in_8_bits(opened, file, "L" if channels == 1 else "RGB")
    resize = signature.get("resize", {})
    if resize.get("shorter_side", width) != resize.get("crop", width):
        image = tv.center_crop(tv.resize(image, resize["shorter_side"]), [height, width])
    elif image.size != (width, height):
        image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
    pixels = tv.pil_to_tensor(image).float()
    mean, std = (torch.tensor(signature[key]).view(-1, 1, 1) for key in ("mean", "std"))
    return (pixels * (signature["range"][1] / 255) - mean) / std
