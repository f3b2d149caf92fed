"""Runs in one process that are resumed from the newest checkpoint of a series."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from apex.checkpoint import Series
from apex.optimizers import FusedAdam
from apex.parallel import ElasticLoader
from apex.transformer import checkpoint


def training() -> tuple[nn.Module, FusedAdam, ElasticLoader]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    data = list(torch.randn(20, 4))
    return model, FusedAdam(model.parameters(), lr=0.1), ElasticLoader(data, 3, shuffle=True)


def train(model: nn.Module, optimizer: Any, loader: ElasticLoader, steps: int) -> list[float]:
    """Return the losses of some steps, each of which draws random numbers of all kinds."""
    losses: list[float] = []
    while True:
        for inputs in loader:
            optimizer.zero_grad()
            loss = (model(inputs) * random.random() + numpy.random.rand()).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == steps:
                return losses


def test_losses_continue_to_the_bit(tmp_path: Path) -> None:
    series = Series(tmp_path, sharded=True)
    model, optimizer, loader = training()
    assert checkpoint.resume_latest(series, model, optimizer, loader=loader) == (0, {})
    train(model, optimizer, loader, 8)
    series.save(checkpoint.state_of(model, optimizer, loader=loader, note="kept"), 8)
    expected = train(model, optimizer, loader, 8)
    random.seed(1)
    numpy.random.seed(1)
    model, optimizer, loader = training()
    assert checkpoint.resume_latest(series, model, optimizer, loader=loader) == (8, {"note": "kept"})
    assert train(model, optimizer, loader, 8) == expected


def test_checkpoints_without_states_of_python_and_numpy_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of earlier versions have PyTorch's alone."""
    from apex.transformer._resharding import random as states

    monkeypatch.setattr(states, "host_states", dict)
    model, optimizer, _ = training()
    checkpoint.save(tmp_path / "old", model, optimizer)
    expected = torch.rand(3)
    python = random.getstate()
    checkpoint.load(tmp_path / "old", model, optimizer)
    assert torch.equal(torch.rand(3), expected)
    assert random.getstate() == python


def test_series_of_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"resume_latest needs a sharded series: Series\(folder, sharded=True\)"):
        checkpoint.resume_latest(Series(tmp_path), nn.Linear(2, 2))


def test_steps_of_paths(tmp_path: Path) -> None:
    series = Series(tmp_path, sharded=True)
    assert series.step_of(series.path_of(12)) == 12
    assert series.step_of(tmp_path / ".step-00000012.replaced") == 12  # a process was killed while it replaced it
    assert Series(tmp_path).step_of("step-123456789.pt") == 123456789
    with pytest.raises(ValueError, match="model is not the path of a checkpoint of a series"):
        series.step_of(tmp_path / "model")
