"""Parameters that wait for their values when they are first used."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from apex.contrib.optimizers._zero.wait_on_use import is_pending, postpone, release, wait_for_values

USES: dict[str, Callable[[nn.Linear], Any]] = {
    "forward": lambda net: net(torch.ones(1, 3)).sum(),
    "state_dict": lambda net: net.state_dict()["weight"],
    "save": lambda net: torch.save(net.state_dict(), io.BytesIO()),
    "deepcopy": lambda net: copy.deepcopy(net).weight,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)).weight,
    "list": lambda net: torch.cat([torch.zeros(9), net.weight.view(-1)])[9:],
    "foreach": lambda net: torch._foreach_norm([net.weight])[0],
    "operator": lambda net: net.weight + 0,
    "address": lambda net: net.weight.data_ptr(),
    "data": lambda net: net.weight.data,
    "to": lambda net: net.to(torch.float64).weight,
    "item": lambda net: net.weight[0, 0].item(),
}


@pytest.mark.parametrize("name", USES)
def test_the_first_use_waits(name: str) -> None:
    net = nn.Linear(3, 3, bias=False)
    nn.init.zeros_(net.weight)
    calls = []

    def wait() -> None:
        calls.append(1)
        nn.init.ones_(net.weight)

    postpone(net.weight, wait)
    assert is_pending(net.weight)
    assert isinstance(net.weight, nn.Parameter)
    found = USES[name](net)
    assert calls == [1]
    assert type(net.weight) is nn.Parameter
    assert not vars(net.weight)
    if isinstance(found, torch.Tensor):
        assert found.max() >= 1
        assert type(found) in (torch.Tensor, nn.Parameter)
    USES[name](net)
    assert calls == [1]


def test_what_looks_at_no_values_does_not_wait() -> None:
    param = nn.Parameter(torch.zeros(2, 3))
    postpone(param, lambda: pytest.fail("waited"))
    assert param.shape == (2, 3)
    assert (param.dtype, param.device.type, param.requires_grad) == (torch.float32, "cpu", True)
    assert (param.numel(), param.dim(), param.stride()) == (6, 2, (3, 1))
    param.grad = torch.ones(2, 3)
    assert torch.equal(param.grad, torch.ones(2, 3))
    param.grad = None
    assert {param: 1}[param] == 1
    release(param)
    assert type(param) is nn.Parameter
    release(param)
    wait_for_values(param)
