"""PyTorch's fused optimizers in place of rules, on a CPU: with gradients of another dtype, scales and copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from apex.ops.multi_tensor import native, rules
from apex.ops.multi_tensor.rule import SCALARS, SLOTS, Rule
from apex.ops.multi_tensor.torch_lists import TorchLists
from tests.harness import assert_close

ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1, "step": 2}
CASES: dict[str, tuple[Rule, dict[str, Any], tuple[bool, ...]]] = {
    "adamw": (rules.ADAM, ADAM, (True, False)),
    "adam": (rules.ADAM, ADAM | {"decoupled": False}, (False, False)),
    "amsgrad": (rules.ADAM_AMSGRAD, ADAM, (True, True)),
    "sgd": (rules.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, (False, False)),
    "plain_sgd": (rules.PLAIN_SGD, {"lr": 0.1, "weight_decay": 0.1}, (False, False)),
    "adagrad": (rules.ADAGRAD, {"lr": 0.1, "eps": 1e-6, "weight_decay": 0.1}, (False,)),
}
SHAPES = ((5,), (20, 15), (0,), (2, 3, 4, 5), (64,))


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """One of them with its memory in another order."""
    made = [(torch.rand(shape) + 0.1).to(dtype) for shape in SHAPES]
    made[3] = made[3].to(memory_format=torch.channels_last)
    return made


def expected(rule: Rule, slots: list[list[Tensor]], scale: float, scalars: Any, flags: Any) -> list[tuple[Tensor, ...]]:
    numbers = (*scalars, *[0.0] * (SCALARS - len(scalars)))
    results = []
    for values in zip(*slots, strict=True):
        exact = [value.double() for value in values]
        exact[1] = exact[1] * scale
        padding = [0.0] * (SLOTS - len(exact))
        results.append(rule.function((*exact, *padding), (0.0, 0.0), numbers, (*flags, False, False)[:3]))
    return results


@pytest.mark.parametrize("batch", [64, 1 << 22])
@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize("has_copy", [False, True])
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_scales_and_copies(
    case: tuple[Rule, dict[str, Any], tuple[bool, ...]],
    gradient: torch.dtype,
    has_copy: bool,
    scale: float | None,
    batch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "BATCH", batch)
    rule, hyper, flags = case
    slots = [tensors(gradient if slot == 1 else torch.float32) for slot in rule.slots]
    gradients = [tensor.clone() for tensor in slots[1]]
    wanted = expected(rule, slots, scale or 1.0, rule.scalars(**hyper), flags)
    copies = tensors(torch.bfloat16) if has_copy else None
    lists = TorchLists([*slots, *[None] * (SLOTS - len(slots))], copies)
    grad_scale = None if scale is None else torch.tensor([scale])
    assert native.apply(rule, lists, hyper, flags, grad_scale, None)
    for index, values in enumerate(wanted):
        for slot in rule.writes:
            assert_close(slots[slot][index], values[slot])
        assert torch.equal(slots[1][index], gradients[index])
        if copies is not None:
            assert torch.equal(copies[index], slots[0][index].bfloat16())


def test_what_is_left_to_the_rules() -> None:
    half, single, double = (tensors(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64))
    strided = [torch.rand(2 * tensor.numel())[::2].view(tensor.shape) for tensor in single]
    hyper, flags = CASES["plain_sgd"][1:]
    for params, gradients, seed in ((half, half, None), (single, double, None), (single, single, 3)):
        lists = TorchLists([params, gradients, None, None, None])
        assert not native.apply(rules.PLAIN_SGD, lists, hyper, flags, None, seed)
    lists = TorchLists([strided, single, None, None, None])
    assert not native.apply(rules.PLAIN_SGD, lists, hyper, flags, None, None)
    lists = TorchLists([single, tensors(torch.float32), tensors(torch.float32), None, None])
    assert not native.apply(rules.SGD, lists, CASES["sgd"][1], (False, True), None, None)
    assert not native.apply(rules.RMSPROP, lists, {}, (), None, None)
