"""Checkpoints of DistributedFusedAdam in one process: those of other optimizers, and those that do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from apex.contrib.optimizers.distributed_fused_adam import DistributedFusedAdam
from apex.optimizers import FusedAdam


@pytest.mark.parametrize("kind", [FusedAdam, torch.optim.AdamW])
def test_state_of_other_optimizers(kind: type) -> None:
    torch.manual_seed(0)
    net, twin = nn.Linear(5, 3), nn.Linear(5, 3)
    before = kind(net.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(3):
        before.zero_grad()
        net(torch.ones(2, 5)).square().mean().backward()
        before.step()
    twin.load_state_dict(net.state_dict())
    after = DistributedFusedAdam(twin.parameters(), lr=1.0)
    after.load_state_dict(before.state_dict())
    assert after.param_groups[0]["lr"] == 0.01
    for model, optimizer in ((net, before), (twin, after)):
        optimizer.zero_grad()
        model(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
    for param, other in zip(twin.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(param, other)


def test_state_that_does_not_fit() -> None:
    optimizer = DistributedFusedAdam(nn.Linear(5, 3).parameters())
    other = DistributedFusedAdam(nn.Linear(5, 4).parameters())
    state = other.state_dict()
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"shape \(3, 5\) has shape \(4, 5\)"):
        optimizer.load_state_dict(state)
    more = DistributedFusedAdam(nn.Sequential(nn.Linear(5, 3), nn.Linear(2, 2)).parameters())
    with pytest.raises(ValueError, match=r"groups of \[4\] parameters, the optimizer of \[2\]"):
        optimizer.load_state_dict(more.state_dict())
    state = optimizer.state_dict()
    del state["state"][1]
    with pytest.raises(ValueError, match="it lacks parameters"):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="state_dict_format=3"):
        optimizer.state_dict(state_dict_format=3)
    assert torch.equal(optimizer.state_dict()["state"][0]["param"], before["state"][0]["param"])


def test_weights_are_there_for_all_parameters_or_for_none() -> None:
    """A state dict of another optimizer has no weights. One that has some of them would fill the others with zeros."""
    net = nn.Linear(5, 3)
    optimizer = DistributedFusedAdam(net.parameters())
    weights = [param.detach().clone() for param in net.parameters()]
    state = optimizer.state_dict()
    del state["state"][0]["param"]
    with pytest.raises(ValueError, match=r"3 of the 18 elements of param .*it lacks parameters"):
        optimizer.load_state_dict(state)
    assert all(map(torch.equal, net.parameters(), weights))
    del state["state"][1]["param"]
    optimizer.load_state_dict(state)
    assert all(map(torch.equal, net.parameters(), weights))


def test_the_largest_count_of_steps_is_that_of_all() -> None:
    """A parameter without gradients counts fewer steps than others; bias correction has one count for all."""
    net = nn.Linear(5, 3)
    before = torch.optim.Adam(net.parameters())
    for used in (list(net.parameters()), [net.weight], [net.weight]):
        for param in net.parameters():
            param.grad = torch.ones_like(param) if any(param is each for each in used) else None
        before.step()
    assert [float(state["step"]) for state in before.state.values()] == [3, 1]
    after = DistributedFusedAdam(net.parameters())
    after.load_state_dict(before.state_dict())
    assert after.state_dict()["state"]["step"] == 3
    groups = [{"params": [param], "step": steps} for param, steps in zip(net.parameters(), (2, 7), strict=True)]
    saved = FusedAdam(groups).state_dict()
    for index, param in enumerate(net.parameters()):
        saved["state"][index] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
    after = DistributedFusedAdam([{"params": [param]} for param in net.parameters()])
    after.load_state_dict(saved)
    assert after.state_dict()["state"]["step"] == 7
