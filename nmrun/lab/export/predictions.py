"""``nmrun sample RUN`` and ``nmrun predict RUN FILE``: what a trained network says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmrun.errors import ConfigError, refused
from nmrun.lab import consent
from nmrun.lab.arguments import Parser, files_of_the_command, in_range
from nmrun.lab.runs.run_folder import RESULT, RunFolder
from nmrun.ranges import number, whole

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nmrun.lab.tasks.base import Task
    from nmrun.lab.tasks.text.classification import TextClassification

SHOWN = 3  # classes of an image


def sample(argv: list[str]) -> int:
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
    parser.add_argument("--seed", type=in_range(int, whole(0)), default=0)
    options = parser.parse_args(argv)
    model, task = _network(options)
    from nmrun.lab.tasks.text.language import LanguageModelling

    if not isinstance(task, LanguageModelling) or task.codec is None:
        raise ConfigError(
            f"{options.run}: nmrun sample takes a language model whose data are texts; nmrun predict "
            "takes classifiers"
        )
    codec = task.codec()
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


def predict(argv: list[str]) -> int:
    """Say the classes of images, or of the lines of a text file; returns 0."""
    parser = _parser("predict", "Say what a trained classifier sees in files.")
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE",
        help="images; or texts, one a line, pairs with a tab between them",
    )  # fmt: skip
    options = parser.parse_args(argv)
    model, task = _network(options)
    from nmrun.lab.tasks.text.classification import TextClassification

    names = task.signature.get("classes")
    for file in options.files:
        with files_of_the_command():
            content = file.read_bytes()
        if isinstance(task, TextClassification):
            lines = _texts(file, content, task)
            for text, outputs in zip(lines, text_outputs(model, task, lines), strict=True):
                print(f"{_said(outputs, names, 1)}\t{chr(9).join(text)}")
        elif "mean" in task.signature.get("input", {}):
            pixels = image_input(file, task.signature["input"])
            print(f"{file}: {_said(model(pixels[None])[0], names, SHOWN)}")
        else:
            raise ConfigError(
                f"{options.run}: nmrun predict takes classifiers of images and of texts; nmrun sample "
                "takes language models"
            )
    return 0


def _parser(verb: str, description: str) -> Parser:
    parser = Parser(prog=f"nmrun {verb}", description=description)
    parser.add_argument("run", type=Path, metavar="RUN", help="a finished run's folder")
    consent.consent_option(parser)
    return parser


def _network(options: Any) -> tuple[nn.Module, Task]:
    if not (options.run / RESULT).is_file():
        RunFolder(options.run).demand(options.run)
    from nmrun.lab.export import finished_run  # torch

    return finished_run.network(finished_run.read(options.run, options.yes))


def _said(outputs: Tensor, names: Sequence[str] | None, most: int) -> str:
    """The likeliest classes with their probabilities; of a single output, the score."""
    if len(outputs) == 1:
        return f"{float(outputs[0]):.4g}"
    shares = outputs.detach().double().softmax(0)
    best = shares.argsort(descending=True)[:most].tolist()
    return ", ".join(f"{names[i] if names else i} {float(shares[i]):.3f}" for i in best)


def _texts(file: Path, content: bytes, task: TextClassification) -> list[tuple[str, ...]]:
    with refused(f"{file}: not a text in UTF-8: ", UnicodeDecodeError):
        lines = content.decode().removesuffix("\n").split("\n")
    texts = [tuple(line.rstrip("\r").split("\t")) for line in lines]
    for place, text in enumerate(texts, 1):
        if len(text) != task.texts:
            takes = "a pair with one tab between" if task.texts == 2 else "one text without a tab"
            raise ConfigError(f"{file}, line {place}: it takes {takes}")
    return texts


def text_outputs(
    model: nn.Module, task: TextClassification, texts: Sequence[tuple[str, ...]]
) -> list[Tensor]:
    """The outputs for each text (classes,), as an evaluation computes them."""
    import torch

    with torch.no_grad():
        return [task.scores(model, task.batch_of(text))[0] for text in texts]


def image_input(file: Path, signature: dict[str, Any]) -> Tensor:
    """What the network takes of an image file (C, H, W), by the ``input`` of a task's signature."""
    import numpy as np
    import torch
    from PIL import Image, ImageOps
    from torchvision.transforms import functional as tv

    channels, height, width = signature["shape"]
    with (
        refused(f"{file} is no image: ", OSError, SyntaxError, Image.DecompressionBombError),
        Image.open(file) as opened,
    ):
        image: Any = opened.convert("L" if channels == 1 else "RGB")
    resize = signature.get("resize", {})
    if resize.get("shorter_side", width) != resize.get("crop", width):
        image = tv.center_crop(tv.resize(image, resize["shorter_side"]), [height, width])
    elif image.size != (width, height):
        image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
    pixels = (
        torch.from_numpy(np.array(image)).float().view(height, width, channels).permute(2, 0, 1)
    )
    mean, std = (torch.tensor(signature[key]).view(-1, 1, 1) for key in ("mean", "std"))
    return (pixels * (signature["range"][1] / 255) - mean) / std
