"""Estimates compared with a GPU's memory: within 5% for the fixed state and 15% for the peak."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from apex._memory.estimate import estimate, measure
from apex._memory.training import Settings

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["FusedAdam", "FusedSGD,momentum=0.9", "FusedLAMB"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("name", ["gpt", "gpt, fused", "resnet50", "perceptron"])
def test_estimates_are_close_to_a_gpus_memory(
    name: str, level: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    task, batch = importlib.import_module("memory").TASKS[name]
    settings = Settings(level, optimizer, batch)
    found = estimate(task, settings)
    real = measure(task, settings, torch.device("cuda", torch.cuda.current_device()))
    assert found.fixed + found.workspace == pytest.approx(real.fixed, rel=0.05)
    assert found.peak + found.workspace == pytest.approx(real.peak, rel=0.15)
