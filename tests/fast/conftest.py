"""Fast products in tests: of bfloat16 on any processor with AVX-512, and times that are made up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bf16_emulated import HAS_INSTRUCTION, emulation

from nmrun.fast import deploy


@pytest.fixture
def emulated_bf16() -> Iterator[None]:
    """Products of bfloat16 by the definition of the instruction."""
    with emulation():
        yield


@pytest.fixture(params=["definition", *(["instruction"] if HAS_INSTRUCTION else [])])
def every_bf16(request: pytest.FixtureRequest) -> None:
    """Products of bfloat16 by definition, and by the instruction where the processor has it."""
    if request.param == "definition":
        request.getfixturevalue("emulated_bf16")


@pytest.fixture
def deploy_times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The milliseconds that ``nmrun.deploy`` finds for products by their name; all others take 1."""
    times: dict[str, float] = {}
    monkeypatch.setattr(
        deploy, "milliseconds", lambda arms, *how: {name: times.get(name, 1.0) for name in arms}
    )
    return times
