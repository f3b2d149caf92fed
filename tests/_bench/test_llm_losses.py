"""`benchmarks/llm_losses.py` runs, and its columns compute what their names say."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_a_run_with_tiny_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    benchmark = importlib.import_module("llm_losses")
    path = tmp_path / "record.json"
    words = ["--tiny", "--device", "cpu", "--rounds", "1", "--commit", "abc", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", ["llm_losses.py", *words])
    benchmark.main()
    record = json.loads(path.read_text())
    assert record["commit"] == "abc"
    assert {"device", "versions", "date"} <= record.keys()
    assert list(record["rows"]) == [
        "cross-entropy 64x16x100", "log-probabilities and entropies 64x16x100", "sequences 2x8x16x100",
    ]  # fmt: skip
    assert list(record["rows"]["sequences 2x8x16x100"]) == ["GRPO, apex", "GSPO, apex", "DPO, apex"]


def test_the_columns_compute_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    benchmark = importlib.import_module("llm_losses")
    torch.manual_seed(0)
    input, weight, target = benchmark.make_head((6, 4), 9, torch.device("cpu"))
    losses = benchmark.cross_entropy_losses(torch.device("cpu"))
    torch.testing.assert_close(losses["apex"](input, weight, target), benchmark.logits_loss(input, weight, target))
    log_p = functional.linear(input, weight).log_softmax(-1)
    own = log_p.gather(-1, target[:, None])[:, 0]
    expected = (own - 0.1 * (log_p.exp() * log_p).sum(-1)).mean()
    torch.testing.assert_close(benchmark.entropy_loss(input, weight, target), expected)
