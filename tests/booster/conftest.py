"""The three ways in which `apex.boost` computes with bfloat16."""

from collections.abc import Callable
from typing import Any

import pytest

import apex

WAYS = ("as on a CPU", "with copies", "as on a GPU")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return how `boost` computes: with float32 weights, with copies of them, or fused and with bfloat16 gradients."""
    monkeypatch.setattr("apex.booster._shorthand._runs_on_accelerator", lambda device: request.param != WAYS[0])
    return request.param


@pytest.fixture
def boost(way: str) -> Callable[..., Any]:
    """Return `apex.boost` on a CPU in each of these ways."""

    def boosted(model: Any, optimizer: Any, precision: str = "bf16") -> Any:
        if way == "as on a GPU":
            apex.fuse(model, verbose=False)
            apex.fuse(optimizer, verbose=False)
        return apex.boost(model, optimizer, precision, device="cpu")

    return boosted
