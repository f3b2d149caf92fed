"""Statistics of the last batch, which some batch norms keep for who asks, beside captured steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from apex.contrib.cudnn_gbn import GroupBatchNorm2d
from apex.contrib.groupbn.batch_norm import BatchNorm2d_NHWC
from apex.graphs import CapturedStep
from apex.optimizers import FusedAdam
from tests.graphs.common import assert_equal_bits
from tests.graphs.recorder import CpuGraphs


def test_statistics_of_the_last_batch_are_left_by_replays_and_not_copied() -> None:
    def train(capture: Callable[..., Any]) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        norm = BatchNorm2d_NHWC(4, fuse_relu=True)
        optimizer = FusedAdam(norm.parameters(), lr=0.01)

        def step(inputs: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = norm(inputs).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        call = capture(step)
        found = []
        for _ in range(6):
            loss = call(torch.randn(2, 3, 3, 4))
            found += [loss.detach().clone(), norm.minibatch_mean.clone(), norm.minibatch_riv.clone()]
        return call, [*found, norm.running_mean.clone()]

    _, eager = train(lambda step: step)
    call, replayed = train(lambda step: CapturedStep(step, backend=CpuGraphs()))
    assert_equal_bits(replayed, eager)
    ((graph,),) = (kind.graphs for kind in call._kinds.values())
    away = [
        place.name for place, need, _ in graph.state._needs if isinstance(need, Tensor) and place.read() is not need
    ]
    assert not away, "every replay would copy them"


@pytest.mark.parametrize(
    ("make", "spread"),
    [(BatchNorm2d_NHWC, "minibatch_riv"), (lambda size: GroupBatchNorm2d(size, 1), "minibatch_inv_var")],
)
def test_a_step_may_compute_with_the_statistics_of_the_batch_before(make: Callable[[int], Any], spread: str) -> None:
    def train(capture: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        norm = make(4)

        def step(inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            before = norm.minibatch_mean * 2, getattr(norm, spread) * 2
            return *before, norm(inputs).detach().square().mean()

        call = capture(step)
        return [each.clone() for _ in range(7) for each in call(torch.randn(2, 4, 4, 4))]

    assert_equal_bits(train(lambda step: CapturedStep(step, backend=CpuGraphs())), train(lambda step: step))


def test_statistics_are_those_of_each_shape_in_turn() -> None:
    """Compare the module's statistics after replays of two graphs in turns with those of eager calls."""

    def train(capture: Callable[..., Any]) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        norm = BatchNorm2d_NHWC(4)
        call = capture(lambda inputs: norm(inputs).detach())
        found = []
        for index in range(16):
            call(torch.randn(2, 3, 3, 4) if index % 2 else torch.randn(1, 1, 2, 4))
            found += [norm.minibatch_mean.clone(), norm.minibatch_riv.clone()]
        return call, found

    _, eager = train(lambda step: step)
    call, replayed = train(lambda step: CapturedStep(step, backend=CpuGraphs()))
    assert call._replays >= 6
    assert_equal_bits(replayed, eager)
