"""`benchmarks/plain_models.py` and its floor, on tiny models."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.grids import full_grids
from torch import nn

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
ROWS = ("vit_b16", "vit_l16", "bert_base", "qwen3", "llama_1b", "gpt2")
ROWS += ("convnext_t", "resnet_basic", "resnet50", "unet")
NEED_TRANSFORMERS = ("hf_qwen3", "hf_llama_1b", "hf_mixtral", "hf_t5", "hf_dinov2", "grpo")


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
        # The loss of "grpo" is a difference: its advantages sum to zero.
        assert found[column]["losses"] == pytest.approx(first, rel=0.05, abs=0.02 if name == "grpo" else 0.0)
        assert found[column]["first_step_s"] <= found[column]["first_s"]


@pytest.mark.parametrize("name", ["vit_l16", "qwen3", "grpo"] if full_grids() else ["qwen3"])
def test_step_by_hand_is_the_quickest_of_three(plain_models: Any, name: str) -> None:
    if name in NEED_TRANSFORMERS:
        pytest.importorskip("transformers")
    found = plain_models.measure(name, settings(columns=["torch.amp", "by hand"]), {"TFLOP/s": 1.0, "GB/s": 1.0})
    first, by_hand = found["torch.amp"]["losses"], found["by hand"]
    assert "error" not in by_hand, by_hand
    assert by_hand["losses"] == pytest.approx(first, rel=0.05, abs=0.02 if name == "grpo" else 0.0)
    match = re.fullmatch(r"chosen     (.+?) \((.+)\)", by_hand["report"])
    assert match, by_hand["report"]
    times = {words[0]: float(words[1]) for words in re.findall(r"(\w[a-z ]+) ([\d.]+) ms", match[2])}
    assert list(times) == ["eager", "captured", "compiled and captured"]
    assert times[match[1]] == min(times.values())


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


# The first words of the rows of docs/boost.md, and the rows of the record.
PAGE_ROWS = {
    "ViT-B/16": "vit_b16",
    "BERT-base": "bert_base",
    "GPT-2": "gpt2",
    "Qwen3": "hf_qwen3",
    "Llama 1.2B": "hf_llama_1b",
    "T5-base": "hf_t5",
    "Mixtral": "hf_mixtral",
    "DINOv2-base": "hf_dinov2",
    "ConvNeXt-T": "convnext_t",
    "ResNet-50": "resnet50",
    "U-Net": "unet",
    "residual net": "resnet_basic",
    "GRPO": "grpo",
    "ViT-L/16": "vit_l16",
}


@pytest.mark.parametrize("start", PAGE_ROWS)
def test_page_has_the_figures_of_the_record(start: str) -> None:
    """Rows with † have PyTorch's steps from the record's medians, and their first steps from the run before, if any."""
    record = json.loads((FOLDER / "results/nvidia_h200-plain-models.json").read_text())
    name, medians = PAGE_ROWS[start], record["medians"]["rows"]
    boosted = record["boost"]["rows"].get(name, {})
    row = {**(medians.get(name) or record["rows"][name]), **boosted}
    first_row = {**record["rows"].get(name, row), **boosted}
    lines = [
        line for line in (FOLDER.parent / "docs/boost.md").read_text().splitlines() if line.startswith(f"| {start}")
    ]
    steps, first = ([cell.strip() for cell in line.split("|")[2:-1]] for line in lines)
    assert ("†" in lines[0]) == (name in medians)

    def figure(column: str, key: str = "ms") -> str:
        result = (row if key == "ms" else first_row).get(column, {})
        found = "" if result.get(key) is None else f"{result[key]:.1f}"
        return f"{found} ({result['MiB']})" if key == "ms" and result.get("MiB") is not None else found

    columns = ("compile", "reduce-overhead", "apex.boost")
    peers, ours = [row[name] for name in columns[:2] if "ms" in row.get(name, {})], row.get("apex.boost")
    ratio = "" if ours is None else f"{ours['ms'] / min(peer['ms'] for peer in peers):.2f}"
    if ours is not None:
        ratio += f" ({ours['MiB'] / min(peer['MiB'] for peer in peers if peer['MiB'] is not None):.2f})"
    failed = ["fails" if "error" in row.get(name, {}) else figure(name) for name in columns]
    assert steps == [*failed, ratio, f"{row['floor']['ms']:.1f}"]
    seconds = [figure(name, "first_step_s") for name in columns]
    assert first == [*seconds, figure("apex.boost", "first_s")]
