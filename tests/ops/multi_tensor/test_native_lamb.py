"""LAMB's two passes on a CPU, a few tensors at a time: the numbers of its rules in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from apex.ops import implementation
from apex.ops.multi_tensor import make_lists, native_lamb, rules
from apex.ops.multi_tensor.torch_lists import TorchLists
from tests.harness import assert_close

SHAPES = ((5,), (20, 15), (0,), (2, 3, 4, 5), (64,), (1,))
HYPER = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1, "step": 2}


def make(gradient: torch.dtype = torch.float32) -> list[list[Tensor]]:
    slots = [[torch.rand(shape) for shape in SHAPES] for _ in range(4)]
    slots[0][4].zero_()  # a parameter without a length takes Adam's step
    slots[1] = [tensor.to(gradient) for tensor in slots[1]]
    return slots


def expected(slots: list[list[Tensor]], hyper: dict, decoupled: bool, factor: float) -> list[list[Tensor]]:
    """After the rules, in float64."""
    exact = [[tensor.double() for tensor in tensors] for tensors in slots]
    for gradient in exact[1]:
        gradient.mul_(factor)
    lists = TorchLists([*exact, None])
    found = lists.apply(rules.LAMB_MOMENTS, hyper, (decoupled,))
    lists.apply(rules.LAMB_STEP, hyper, (decoupled,), whole=found)
    return exact


@pytest.mark.parametrize("together", [1, 100, 1 << 18])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("changes", [{}, {"weight_decay": 0.0}, {"bias_correction": False, "grad_averaging": False}])
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [None, 0.25])
def test_against_the_rules(
    factor: float | None,
    gradient: torch.dtype,
    changes: dict,
    decoupled: bool,
    together: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_lamb, "_TOGETHER", together)
    slots = make(gradient)
    hyper = HYPER | changes
    exact = expected(slots, hyper, decoupled, factor or 1.0)
    copies = [torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in slots[0]]
    gradients = [tensor.clone() for tensor in slots[1]]
    with implementation("torch"):
        lists = make_lists([*slots, None], copies)
        scale = None if factor is None else torch.full((1,), factor)
        assert native_lamb.apply(lists, hyper, (decoupled,), scale, None)
    for slot in (0, 2, 3):
        for tensor, value in zip(slots[slot], exact[slot], strict=True):
            assert_close(tensor, value)
    assert all(map(torch.equal, slots[1], gradients))
    assert all(torch.equal(copy, tensor.bfloat16()) for copy, tensor in zip(copies, slots[0], strict=True))


def test_what_is_left_to_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = make()
    lists = TorchLists([*slots, None])
    assert not native_lamb.apply(lists, HYPER, (True,), None, 7)  # stochastic rounding
    halves = [[tensor.bfloat16() for tensor in tensors] for tensors in slots]
    assert not native_lamb.apply(TorchLists([*halves, None]), HYPER, (True,), None, None)
    turned = [[tensor.t() if tensor.ndim == 2 else tensor for tensor in slots[0]], *slots[1:]]
    assert not native_lamb.apply(TorchLists([*turned, None]), HYPER, (True,), None, None)
    monkeypatch.setattr(native_lamb, "_LARGEST", 100)
    assert not native_lamb.apply(lists, HYPER, (True,), None, None)
    exact = expected(slots, HYPER, True, 1.0)
    lists.lamb(HYPER, (True,))
    for tensor, value in zip(slots[0], exact[0], strict=True):
        assert_close(tensor, value)


def test_a_flag_turns_it_off() -> None:
    slots = make()
    before = [tensor.clone() for tensors in slots for tensor in tensors]
    TorchLists([*slots, None]).lamb(HYPER, (True,), noop=torch.ones(1))
    assert all(map(torch.equal, [tensor for tensors in slots for tensor in tensors], before))
