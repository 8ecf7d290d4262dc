"""The keys of the data set and the model, and what the package says of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nmrun.lab.keys.datasets import Glue
from nmrun.lab.keys.installed import Entry
from nmrun.lab.keys.models import Causal

ANSWERED = "texts with answers"


@dataclass(frozen=True)
class GlueText(Glue):
    """A task of GLUE as text to text."""

    data: ClassVar[str] = ANSWERED


@dataclass(frozen=True)
class T5(Causal):
    """A T5 of Hugging Face."""

    data: ClassVar[str] = ANSWERED


CONF = "nmrun.papers.conf"
GLUE_TEXT = Entry(GlueText, "nmrun.papers.text_to_text.glue_text.build", CONF)
HF_T5 = Entry(T5, "nmrun.papers.text_to_text.hf_t5.build", CONF)
