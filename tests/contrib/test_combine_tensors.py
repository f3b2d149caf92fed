"""Combining tensors into one buffer that shares memory with them."""

import pytest
import torch

import apex
from apex.contrib.combine_tensors import (
    check_combined_tensor,
    combine_npu,
    get_aligned_storage_size,
    get_part_combined_tensor,
    is_combined_tensor_valid,
)
from tests.support.drawn import given, settings, st

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_shapes_and_memory(dtype: torch.dtype, device: str) -> None:
    tensors = [torch.arange(24, device=device).to(dtype).reshape(shape)[1:] for shape in ((2, 3, 4), (24,), (8, 3))]
    values = [tensor.clone() for tensor in tensors]
    combined = combine_npu(tensors)
    assert combined.shape == (sum(map(get_aligned_storage_size, tensors)),)
    assert combined.dtype == dtype
    assert combined.device == tensors[0].device
    start = 0
    for tensor, value in zip(tensors, values, strict=True):
        assert torch.equal(tensor, value)
        assert tensor.data_ptr() == combined.data_ptr() + start * combined.element_size()
        assert tensor.data_ptr() % 16 == 0
        assert torch.equal(get_part_combined_tensor(combined, start, tensor.numel()), value.flatten())
        gap = combined[start + tensor.numel() : start + get_aligned_storage_size(tensor)]
        assert not gap.any()
        start += get_aligned_storage_size(tensor)
    assert is_combined_tensor_valid(combined, tensors)


@pytest.mark.parametrize("device", DEVICES)
def test_one_operator_changes_all(device: str) -> None:
    tensors = [torch.zeros(2, 2, device=device), torch.zeros(5, device=device)]
    combined = combine_npu(tensors)
    combined += 2
    assert [tensor.sum().item() for tensor in tensors] == [8, 10]
    tensors[1].mul_(3)
    assert combined[4:9].tolist() == [6.0] * 5


@given(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_any_shapes(shapes: list[list[int]]) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    values = [tensor.clone() for tensor in tensors]
    combined = combine_npu(tensors)
    assert is_combined_tensor_valid(combined, tensors)
    assert all(map(torch.equal, tensors, values))
    torch.testing.assert_close(combined.sum(), sum(value.sum() for value in values))


def test_strides_without_gaps_are_kept() -> None:
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    matrix, holes = torch.randn(3, 4).t(), torch.randn(6, 6)[::2, ::3]
    tensors = [image, matrix, holes]
    values, strides = [t.clone() for t in tensors], [t.stride() for t in tensors]
    combine_npu(tensors)
    assert all(map(torch.equal, tensors, values))
    assert [t.stride() for t in tensors[:2]] == strides[:2]
    assert holes.is_contiguous()


def test_parameters_and_gradients() -> None:
    layer = torch.nn.Linear(3, 2)
    x = torch.randn(4, 3)
    before = layer(x)
    params = list(layer.parameters())
    combined = combine_npu(params)
    assert torch.equal(layer(x), before)
    layer(x).sum().backward()
    grads = combine_npu([p.grad for p in params])
    assert is_combined_tensor_valid(grads, [p.grad for p in params])
    combined.sub_(grads)  # a step of gradient descent
    torch.testing.assert_close(layer(x), before - (x @ layer.weight.grad.t() + layer.bias.grad))
    assert all(p.requires_grad and p.is_leaf for p in params)


def test_without_copying_values() -> None:
    tensors = [torch.ones(3), torch.ones(2)]
    combined = combine_npu(tensors, require_copy_value=False)
    assert not combined.any()
    assert not tensors[0].any()
    assert is_combined_tensor_valid(combined, tensors)


def test_nothing_to_combine() -> None:
    assert combine_npu([]) is None
    assert is_combined_tensor_valid(None, [])
    check_combined_tensor(None, [])
    assert get_part_combined_tensor(None, 0, 3) is None
    assert get_part_combined_tensor(torch.zeros(4), 2, 0) is None


def test_broken_sharing_is_detected_and_named() -> None:
    tensors = [torch.zeros(3), torch.zeros(2, 2), torch.zeros(0)]
    combined = combine_npu(tensors)
    check_combined_tensor(combined, tensors)
    tensors[1].data = torch.zeros(2, 2)
    assert not is_combined_tensor_valid(combined, tensors)
    with pytest.raises(RuntimeError, match=r"list_of_tensor\[1\] \(shape \(2, 2\)\) has other memory"):
        check_combined_tensor(combined, tensors)
    for broken, message in (
        ([None], "is None"),
        ([torch.zeros(3).half()], "is torch.float16"),
        ([torch.zeros(3, device="meta")], "is on meta"),
        ([combined.new_zeros(3)], "has other memory"),
    ):
        assert not is_combined_tensor_valid(combined, broken)
        with pytest.raises(RuntimeError, match=message):
            check_combined_tensor(combined, broken)
    assert not is_combined_tensor_valid(None, tensors)
    # A view that starts inside and reaches out of a part of the buffer.
    assert not is_combined_tensor_valid(combined[:2], tensors[:1])


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ([torch.zeros(2), None], TypeError, r"list_of_tensor\[1\] is NoneType"),
        ([torch.zeros(2), torch.zeros(2).half()], TypeError, "one buffer holds one dtype"),
        ([torch.zeros(2), torch.zeros(2, device="meta")], ValueError, "one device"),
        ([torch.zeros(2), torch.zeros(2).to_sparse()], TypeError, "sparse"),
    ],
)
def test_invalid_lists_are_refused(tensors: list, error: type[Exception], message: str) -> None:
    address = tensors[0].data_ptr()
    with pytest.raises(error, match=message):
        combine_npu(tensors)
    assert tensors[0].data_ptr() == address


def test_tensors_that_share_memory_are_refused() -> None:
    base = torch.arange(6.0)
    for tensors in ([base, base], [base[:4], torch.zeros(1), base[3:]], [base, base[2:3], base[4:5]]):
        with pytest.raises(ValueError, match="share memory"):
            combine_npu(tensors)
    combine_npu([base[:3], base[3:]])


def test_parts_out_of_bounds_are_refused() -> None:
    combined = combine_npu([torch.zeros(4), torch.zeros(4)])
    for index, size in ((5, 4), (-1, 2), (0, 9), (0, -1)):
        with pytest.raises(ValueError, match="reach out of a combined tensor of 8 elements"):
            get_part_combined_tensor(combined, index, size)
    part = get_part_combined_tensor(combined, 4, 4)
    part.fill_(1)
    assert combined.sum() == 4


def test_reachable_after_a_bare_import() -> None:
    assert apex.contrib.combine_tensors.combine_npu is combine_npu
