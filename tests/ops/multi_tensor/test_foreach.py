"""The elementary passes on a CPU, by PyTorch's loops over lists: as exact as the rules that they stand in for."""

import pytest
import torch
from torch import Tensor

from apex.ops import _library
from apex.ops.multi_tensor import foreach, l2norm, max_norm, rules, scale
from apex.ops.multi_tensor.torch_lists import TorchLists
from tests.harness import assert_close, assert_equal_bits

HALF = (torch.float16, torch.bfloat16)


def lists(outputs: list[Tensor], inputs: list[Tensor]) -> TorchLists:
    return TorchLists([outputs, inputs, None, None, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
def test_norms_of_large_tensors(dtype: torch.dtype) -> None:
    """PyTorch's own float32 norm of as many elements is off by 8e-5."""
    tensors = [torch.randn(1 << 21).to(dtype), torch.zeros(0, dtype=dtype), torch.randn(3, 5).to(dtype).t()]
    with _library.implementation("torch"):
        norm, each = l2norm(tensors, per_tensor=True)
        largest, largest_each = max_norm(tensors, per_tensor=True)
    exact = [tensor.double() for tensor in tensors]
    assert_close(norm, torch.cat([tensor.reshape(-1) for tensor in exact]).norm().reshape(1))
    assert_close(each, torch.stack([tensor.norm() for tensor in exact]))
    assert largest.item() == largest_each[0].item() == exact[0].abs().max().item()
    assert largest_each[1].item() == 0


@pytest.mark.parametrize("factor", [0.5, 0.1, torch.tensor(0.3)])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_scaling_rounds_once(dtype: torch.dtype, factor: float | Tensor) -> None:
    inputs = [torch.randn(3000).to(dtype), torch.randn(7).to(dtype)]
    outputs = [torch.empty_like(tensor) for tensor in inputs]
    with _library.implementation("torch"):
        scale(inputs, outputs, factor)
    assert_equal_bits(outputs, [(tensor.float() * factor).to(dtype) for tensor in inputs])


def test_what_is_left_to_the_rules() -> None:
    single, half = [torch.ones(3)], [torch.ones(3, dtype=torch.float16)]
    overflow = torch.zeros(1)
    assert foreach.scale(rules.SCALE, lists(single, half), {"factor": 0.1}, None, overflow)
    assert not foreach.scale(rules.SCALE, lists(half, single), {"factor": 0.5}, None, None)
    assert not foreach.scale(rules.SCALE, lists(half, half), {"factor": 0.1}, None, None)
    infinite, culprits = [torch.full((3,), torch.inf)], torch.zeros(1, 2, dtype=torch.int32)
    assert not foreach.scale(rules.SCALE, lists(single, infinite), {"factor": 2.0}, None, overflow, culprits)
    assert foreach.scale(rules.SCALE, lists(single, infinite), {"factor": 0.5}, None, overflow, culprits)
    assert culprits.tolist() == [[3, 0]]
    assert not foreach.scale(rules.AXPBY, lists(single, single), {"a": 1.0, "b": 1.0}, None, None)
    assert foreach.measure(rules.SCALE_SQUARE_SUM, lists(single, single), {}, None) is None


@pytest.mark.parametrize("size", [3, 1 << 14])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_scaling_finds_overflows(dtype: torch.dtype, value: float, size: int) -> None:
    """In small tensors, which are looked at element by element, and in large ones."""
    inputs = [torch.ones(size), torch.ones(size)]
    inputs[1][-1] = value
    outputs = [torch.empty(size) for _ in inputs]
    flag = torch.zeros(1, dtype=dtype)
    with _library.implementation("torch"):
        scale(inputs[:1], outputs[:1], 0.5, overflow=flag)
        assert not flag.item()
        scale(inputs, outputs, 0.5, overflow=flag)
    assert flag.item() == 1
    assert outputs[0].eq(0.5).all()
    assert outputs[1][:-1].eq(0.5).all()


def test_large_but_finite_values_are_no_overflow() -> None:
    inputs = [torch.full((5,), 3e38)]
    flag = torch.zeros(1)
    with _library.implementation("torch"):
        scale(inputs, inputs, 0.5, overflow=flag)
    assert not flag.item()
    assert_close(inputs[0], torch.full((5,), 1.5e38, dtype=torch.float64))
