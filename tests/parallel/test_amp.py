"""amp in two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from apex import amp
from tests.parallel.amp_checks import CHECKS, sharded
from tests.parallel.processes import needs_fsdp_on_a_cpu, run_checks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks("tests.parallel.amp_checks", Path(tmp_path_factory.mktemp("processes")))


@pytest.mark.parametrize("name", CHECKS)
def test_two_processes(name: str, results: dict[str, str]) -> None:
    assert not results[name], results[name]


@needs_fsdp_on_a_cpu
def test_a_model_sharded_over_one_process(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded(0)
    finally:
        amp.shutdown()
        torch.distributed.destroy_process_group()


def test_combine_ddp_alone_and_unconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="ddp_replica_count must be an integer of at least 1, not 0"):
        amp.initialize(model, optimizer, combine_ddp=True, ddp_replica_count=0, verbosity=0)
    model, optimizer = amp.initialize(model, optimizer, combine_ddp=True, verbosity=0)
    try:
        with amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
            scaled.backward()
        monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
        with (
            pytest.raises(RuntimeError, match=r"not connected: call torch.distributed.init_process_group"),
            amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled,
        ):
            scaled.backward()
    finally:
        amp.shutdown()
