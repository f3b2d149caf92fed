"""Checks of DistributedDataParallel that need four processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from apex import amp
from apex.parallel import DistributedDataParallel
from tests.amp.common import quiet
from tests.parallel.distributed_checks import Parts, gradients_without
from tests.parallel.processes import Check, assert_same_everywhere

USES = [[[0, 1], [1, 0], [2], [0]], [[1], [1], [1, 2], [2, 1]], [[2, 1, 0], [0], [0, 1], [2]]]


def means(**options: Any) -> Check:
    """Each process uses different layers in a different order."""

    def check(rank: int) -> None:
        model = DistributedDataParallel(Parts(), message_size=16, **options)
        inputs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(other)) for other in range(4)]
        for uses in USES:
            model.zero_grad()
            alone = [gradients_without(model.module, x, use) for x, use in zip(inputs, uses, strict=True)]
            model(inputs[rank], uses[rank]).square().mean().backward()
            for found, *each in zip((param.grad for param in model.parameters()), *alone, strict=True):
                there = [gradient for gradient in each if gradient is not None]
                assert (found is None) == (not there)
                if there:
                    torch.testing.assert_close(found, sum(there) / 4)
                    assert_same_everywhere([found])

    return check


def trained(rank: int, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net, optimizer = quiet(net, optimizer, opt_level="O2", dynamic_init_scale=2.0**10, **options)
    model = net if options else DistributedDataParallel(net)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x).float().square().mean() * (torch.inf if (step, rank) == (2, 3) else 1.0)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**9, "unskipped": 1}
    found = [param.detach().clone() for param in net.parameters()]
    assert_same_everywhere(found)
    amp.shutdown()
    return found


def amp_in_four(rank: int) -> None:
    wrapped, combined = trained(rank), trained(rank, combine_ddp=True)
    # Gloo adds four numbers in an order that depends on where they are in a message.
    for found, expected in zip(combined, wrapped, strict=True):
        torch.testing.assert_close(found, expected)


CHECKS: dict[str, Check] = {
    "means": means(),
    "means_two_groups": means(num_allreduce_streams=2),
    "means_delayed_and_predivided": means(delay_allreduce=True, gradient_predivide_factor=4.0),
    "amp": amp_in_four,
}
