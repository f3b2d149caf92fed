"""`benchmarks/plain_models.py` and its floor, on tiny models."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
ROWS = ("vit_b16", "bert_base", "qwen3", "llama_1b", "convnext_t", "resnet_basic", "gpt2", "resnet50", "unet")
NEED_TRANSFORMERS = ("hf_qwen3", "hf_llama_1b", "hf_mixtral", "hf_t5", "hf_dinov2")


@pytest.fixture
def plain_models(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    import plain_models

    return plain_models


def settings(**others: Any) -> argparse.Namespace:
    columns = ["torch.amp", "apex.boost", "apex.boost fp8"]
    plain = {"columns": columns, "device": "cpu", "tiny": True, "alone": False, "profile": False}
    return argparse.Namespace(**{**plain, "steps": 1, "rounds": 1, **others})


@pytest.mark.filterwarnings("ignore:.*FP8")
@pytest.mark.parametrize("name", ROWS + NEED_TRANSFORMERS)
def test_row_trains_alike_in_all_columns(plain_models: Any, name: str) -> None:
    if name in NEED_TRANSFORMERS:
        pytest.importorskip("transformers")
    found = plain_models.measure(name, settings(), {"TFLOP/s": 1.0, "GB/s": 1.0})
    assert found["floor"]["ms"] > 0
    first = found["torch.amp"]["losses"]
    for column in ("apex.boost", "apex.boost fp8"):
        assert "error" not in found[column], found[column]
        # bfloat16 weights against float32 ones: four steps of AdamW apart.
        assert found[column]["losses"] == pytest.approx(first, rel=0.05)
        assert found[column]["first_step_s"] <= found[column]["first_s"]


def test_every_row_is_tried(plain_models: Any) -> None:
    assert set(ROWS + NEED_TRANSFORMERS) == set(plain_models.ROWS)


def test_columns_that_do_not_fit_take_another_turn(plain_models: Any) -> None:
    """Memory for two columns: the third is made after the first two were timed and freed; one error is recorded."""
    turns = plain_models.Turns(settings(rounds=2))
    timed = []

    class Fake:
        def __init__(self, name: str) -> None:
            if name == "broken":
                raise LookupError("no such patch")
            if len(turns.columns) == 2:
                raise torch.OutOfMemoryError("full")
            self.name = name

        def time(self, steps: int) -> None:
            timed.append(self.name)

        def result(self) -> dict[str, Any]:
            return {"ms": 1.0}

    for name in ("a", "b", "c", "broken"):
        turns.add(name, lambda name=name: Fake(name))
    turns.finish()
    assert timed == ["a", "b", "a", "b", "c", "c"]
    assert [turns.results[name].get("turn") for name in ("a", "b", "c", "broken")] == [0, 0, 1, None]
    assert turns.results["broken"]["error"] == "LookupError: no such patch"


def test_floor_counts_products_and_bytes(plain_models: Any) -> None:
    """Two linear layers without biases: three products each but for the gradient of the input, which needs none."""
    from plain_floor import floor

    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).float().sum()

    found = floor(model, loss, (torch.ones(32, 8),), {"TFLOP/s": 1e-9, "GB/s": 1e-6})
    first, second = 2 * 32 * 8 * 16, 2 * 32 * 16 * 4
    assert found["products_ms"] == pytest.approx(2 * first + 3 * second)
    # Inputs, outputs and their gradients in bfloat16, the gradients of both weights, and the optimizer.
    activations = 2 * 32 * (8 + 16 + 16 + 4 + 4 + 16 + 16)
    parameters = 8 * 16 + 16 * 4
    assert found["rest_ms"] == pytest.approx(activations + 2 * parameters + 26 * parameters)
