"""GLUE as text to text, and T5: a table of the gradient-flow recipes (MdGf, SdGf)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from nmrun.lab.keys.datasets import Glue
from nmrun.lab.keys.models import HFCausal

ANSWERED = "texts with answers"


@dataclass(frozen=True)
class GlueText(Glue):
    """One of GLUE's tasks as text to text, in the words of T5; its files are those of dataset=glue."""

    data: ClassVar[str] = ANSWERED
    builder: ClassVar[str] = "nmrun.papers.text_to_text.task.glue_text"


@dataclass(frozen=True)
class T5(HFCausal):
    """A pretrained T5 of Hugging Face, for fine-tuning on text to text (needs
    nmrun[transformers]).
    """

    data: ClassVar[str] = ANSWERED
    builder: ClassVar[str] = "nmrun.papers.text_to_text.task.t5"

    pretrained: str = "t5-base"
    include: Annotated[
        Sequence[str] | None,
        "feed-forward layers only (regular expressions for whole module names); null = all; "
        r"attention: '.*Attention\.[qkvo]'",
    ] = (r".*\.DenseReluDense\.w(i|i_0|i_1|o)",)
