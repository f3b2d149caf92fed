"""Processes whose parameters differ, in four processes: divided optimizers say so before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from apex.contrib.optimizers import DistributedFusedAdam
from apex.contrib.optimizers.distributed_fused_lamb import DistributedFusedLAMB
from tests.parallel.processes import Check, assert_same_everywhere


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def swapped(model: nn.Sequential) -> list[nn.Parameter]:
    """Two layers of the same shapes."""
    return [*model[0].parameters(), *model[2].parameters(), *model[1].parameters()]


def differences(kind: Callable[..., Any]) -> Check:
    """In rank 2; all ranks raise the same, with its number and the parameter."""
    cases: list[tuple[Callable[[nn.Sequential], Any], str]] = [
        (lambda model: list(model.parameters())[::-1], r"parameter 0 of group 0 of shape \(4, 3\), .* \(4,\)"),
        (
            lambda model: [*model.parameters(), nn.Parameter(torch.ones(2))],
            r"no more, rank 2 has parameter 6 of",
        ),
        (lambda model: list(model.parameters())[:-1], r"parameter 5 of group 0 of shape \(4,\), .*rank 2 has no more"),
        (lambda model: model.half().parameters(), r"parameter 0 of group 0 of shape \(4, 3\), torch.float16"),
        (lambda model: model.requires_grad_(False).parameters(), "that requires no gradient"),
        (
            lambda model: [{"params": list(model[:2].parameters())}, {"params": model[2].parameters()}],
            r"parameter 4 of group 0 .*rank 2 has parameter 0 of group 1",
        ),
        (
            swapped,
            r"have the same parameters in another order: what is parameter 2 of group 0 in rank 2",
        ),
    ]

    def check(rank: int) -> None:
        for change, message in cases:
            model = net()
            params = change(model) if rank == 2 else model.parameters()
            with pytest.raises(RuntimeError, match=rf"optimizers of rank 0 and rank 2 .*{message}"):
                kind(params)
        # Names tell parameters apart where processes start with other values.
        model = net()
        torch.manual_seed(rank)
        for param in model.parameters():
            nn.init.normal_(param)
        names = {id(param): name for name, param in model.named_parameters()}
        params = swapped(model) if rank == 2 else list(model.parameters())
        with pytest.raises(RuntimeError, match=r"'1.weight' \(2 of group 0\) .* '2.weight' \(2 of group 0\)"):
            kind([(names[id(param)], param) for param in params])
        kind(model.parameters())
        assert_same_everywhere(list(model.parameters()))

    return check


def later_groups(kind: Callable[..., Any]) -> Check:
    """A group that is not the same everywhere is not added; one that is has the values of the first process."""

    def check(rank: int) -> None:
        model = net()
        optimizer = kind(model[:2].parameters())
        more = [nn.Parameter(torch.full((2 + (rank == 3),), float(rank)))]
        with pytest.raises(RuntimeError, match=r"parameter 0 of group 1 of shape \(2,\), .*rank 3 has .* \(3,\)"):
            optimizer.add_param_group({"params": more})
        assert len(optimizer.param_groups) == 1
        added = nn.Parameter(torch.full((2,), float(rank)))
        optimizer.add_param_group({"params": [added]})
        assert added.tolist() == [0.0, 0.0]
        (model[:2](torch.ones(2, 3)).sum() + added.sum()).backward()
        optimizer.step()
        assert_same_everywhere([*model.parameters(), added])

    return check


def other_buckets(rank: int) -> None:
    for kind, mine, other in (
        (DistributedFusedAdam, {}, {"bucket_cap_mb": 1.0}),
        (DistributedFusedLAMB, {}, {"dwu_num_blocks": 7}),
    ):
        with pytest.raises(RuntimeError, match=r"rank 0 and rank 1 differ: .*Rank 0 has the options \(.*, rank 1 \("):
            kind(net().parameters(), **(other if rank == 1 else mine))
    # The same, written differently.
    DistributedFusedAdam(net().parameters(), bucket_cap_mb=1 if rank else 1.0)


def other_settings(kind: Callable[..., Any]) -> Check:
    """A learning rate that a schedule has set in one rank only is found in the first step, which changes nothing."""

    def check(rank: int) -> None:
        for option, message in (
            ("lr", r"lr of parameter group 1 is 0.001 in rank 0 and 0.25 in rank 3"),
            ("weight_decay", r"weight_decay of parameter group 1 is 0.0 in rank 0 and 0.25 in rank 3"),
        ):
            model = net()
            groups = [{"params": model[:2].parameters()}, {"params": model[2].parameters()}]
            optimizer = kind(groups, lr=0.001, weight_decay=0.0)
            before = [param.detach().clone() for param in model.parameters()]
            if rank == 3:
                optimizer.param_groups[1][option] = 0.25
            model(torch.ones(2, 3)).sum().backward()
            with pytest.raises(RuntimeError, match=f"optimizers of rank 0 and rank 3 differ: {message}"):
                optimizer.step()
            assert all(map(torch.equal, before, model.parameters()))

    return check


CHECKS: dict[str, Check] = {
    "differences_adam": differences(DistributedFusedAdam),
    "differences_lamb": differences(DistributedFusedLAMB),
    "later_groups_adam": later_groups(DistributedFusedAdam),
    "later_groups_lamb": later_groups(DistributedFusedLAMB),
    "other_buckets": other_buckets,
    "other_settings_adam": other_settings(DistributedFusedAdam),
    "other_settings_lamb": other_settings(DistributedFusedLAMB),
}
