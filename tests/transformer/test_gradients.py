"""The model-parallel loss scaler and the gradient reductions before a step, in four processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from apex.transformer.amp import GradScaler
from tests.parallel.processes import run_checks
from tests.transformer import gradient_checks


@pytest.fixture(scope="module")
def in_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(gradient_checks.__name__, Path(tmp_path_factory.mktemp("four")), processes=4)


@pytest.mark.parametrize("name", gradient_checks.CHECKS)
def test_four_processes(name: str, in_four: dict[str, str]) -> None:
    assert not in_four[name], in_four[name]


def test_scaler_without_groups_is_torchs() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler(init_scale=8.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert parameter.tolist() == [0.0, 0.0]
    other = GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == 8.0
