"""State that a user replaces between two steps, in all ways that a dict allows, is what the next step goes on from."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from apex.optimizers import FusedAdam, FusedNovoGrad, FusedSGD
from tests.optimizers.helpers import parameters, set_gradients
from tests.optimizers.test_every_step import OPTIONS, maker
from tests.support.harness import assert_equal_bits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIONS)
def test_dicts_replaced_by_others(name: str, device: str) -> None:
    params, twins = parameters(device), parameters(device)
    optimizer, other = maker(name)(params), maker(name)(twins)
    for step in range(4):
        set_gradients(params, step)
        set_gradients(twins, step)
        optimizer.step()
        other.step()
        for param, state in list(other.state.items()):
            clones = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(7)  # what is no longer anyone's state
            other.state[param] = clones
    assert_equal_bits(params, twins)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIONS)
def test_state_thrown_away(name: str, device: str) -> None:
    """All of it, the entries of one parameter, a parameter's: it is there again after the next step."""
    params = parameters(device)
    optimizer = maker(name)(params)
    set_gradients(params, 0)
    optimizer.step()
    kinds = [set(optimizer.state[param]) for param in params]
    optimizer.state = defaultdict(dict)
    optimizer.step()
    assert [set(optimizer.state[param]) for param in params] == kinds
    optimizer.state[params[0]].clear()
    optimizer.step()
    assert [set(optimizer.state[param]) for param in params] == kinds
    del optimizer.state[params[-1]]
    optimizer.step()
    assert [set(optimizer.state[param]) for param in params] == kinds


@pytest.mark.parametrize("device", DEVICES)
def test_the_norm_of_a_parameter_replaced(device: str) -> None:
    params, twins = parameters(device), parameters(device)
    optimizers = [FusedNovoGrad(params), FusedNovoGrad(twins)]
    for step in range(4):
        for optimizer, tensors in zip(optimizers, (params, twins), strict=True):
            set_gradients(tensors, step)
            optimizer.step()
        optimizers[0].state[params[1]]["exp_avg_sq"].mul_(4.0)
        state = optimizers[1].state[twins[1]]
        state["exp_avg_sq"] = state["exp_avg_sq"] * 4.0
    assert_equal_bits(params, twins)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
def test_masters_of_a_half_precision_model_loaded_for_a_float32_one(kind: Any, rounded: bool) -> None:
    """A master would overwrite changes of the weight: a float32 weight is its own, with the master's digits."""
    halves = [torch.nn.Parameter(param.detach().bfloat16()) for param in parameters("cpu")]
    optimizer = kind(halves, lr=0.01, master_weights=True)
    set_gradients(halves, 0)
    optimizer.step()
    exact = [optimizer.state[param]["master_param"].clone() for param in halves]
    weights = [
        torch.nn.Parameter((half if rounded else master).detach().float())
        for half, master in zip(halves, exact, strict=True)
    ]
    later = kind(weights, lr=0.01)
    later.load_state_dict(optimizer.state_dict())
    assert_equal_bits(weights, exact)
    assert all("master_param" not in state for state in later.state.values())
    for param in weights:
        param.data.fill_(0.3)
    later.param_groups[0]["lr"] = 0.0
    set_gradients(weights, 1)
    later.step()
    assert all(bool((param == torch.tensor(0.3)).all()) for param in weights)
    with torch.no_grad():
        weights[0].add_(1.0)
    changed = weights[0].detach().clone()
    later.load_state_dict(optimizer.state_dict())
    assert torch.equal(weights[0], changed), "weights that are not the masters' rounding are other weights"
