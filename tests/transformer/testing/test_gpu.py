"""GPT on a GPU: alone, in half precision, compiled and as a graph; split over two processes that share the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from apex import amp, graphs
from apex.optimizers import FusedAdam
from apex.transformer import parallel_state
from apex.transformer.testing.standalone_gpt import GPTModel
from tests.parallel.processes import run_checks

from . import gpu_checks
from .gpt import LENGTH, WORDS, config_of

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(gpu_checks.__name__, Path(tmp_path_factory.mktemp("gpu")), on_gpu=True)


@pytest.mark.parametrize("name", gpu_checks.CHECKS)
def test_two_processes_on_one_gpu(name: str, in_two: dict[str, str]) -> None:
    assert not in_two[name], in_two[name]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    amp.shutdown()


def losses_of(how: str, **options: Any) -> list[float]:
    """Return the losses of six steps with O5 and FusedAdam."""
    model = GPTModel(config=config_of(2, hidden_size=128, attention="sdpa", **options)).cuda()
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    network = torch.compile(model, fullgraph=True) if how == "compiled" else model

    def step(words: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = network(words[:, :-1], labels=words[:, 1:], reduction="mean")
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        return loss.detach()

    words = torch.randint(0, WORDS, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1)).cuda()
    run = graphs.capture(step) if how == "graph" else step
    found = [float(run(words)) for _ in range(6)]
    assert getattr(run, "reason", None) is None
    amp.shutdown()
    return found


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("options", [{}, {"position_embedding": "rope", "activation": "swiglu"}], ids=["gelu", "rope"])
def test_steps_alone(options: dict[str, Any]) -> None:
    eager = losses_of("eager", **options)
    assert eager[-1] < eager[0] - 0.3
    assert losses_of("graph", **options) == eager
    assert losses_of("compiled", **options) == pytest.approx(eager, abs=0.02)
