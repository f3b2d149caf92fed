"""`benchmarks/fp8.py` multiplies in float8 what its columns say."""

import importlib
from pathlib import Path

import pytest

from apex import amp
from apex.ops import float8

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("column", ["apex tensorwise", "apex tensorwise everything", "apex rowwise everything"])
def test_every_layer_of_a_block_is_multiplied_in_float8(column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that reads a layer's weight itself, to give its bias to the next norm, would bypass float8."""
    monkeypatch.syspath_prepend(str(FOLDER))
    fp8 = importlib.import_module("fp8")
    size = {"depth": 2, "width": 64, "vocabulary": 256, "length": 32, "batch": 2, "lr": 300}
    products, multiply = [], float8.product
    monkeypatch.setattr(float8, "product", lambda *a, **k: products.append(a) or multiply(*a, **k))
    monkeypatch.setattr(fp8.torch, "compile", lambda network, **how: network)
    step, _ = fp8.prepare(column, "cpu", size)
    try:
        step(fp8.text(size, 0, "cpu"))
    finally:
        amp.shutdown()
    assert len(products) == 3 * 4 * size["depth"]
