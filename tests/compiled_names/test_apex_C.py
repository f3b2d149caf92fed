"""apex_C: tensors strung together and cut apart."""

import pytest
import torch

import apex_C
from tests.support.harness import assert_equal_bits

SHAPES = [(3, 4), (5,), (0, 2), (), (2, 1, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_there_and_back(dtype: torch.dtype) -> None:
    tensors = [torch.randn(shape).to(dtype) for shape in SHAPES]
    flat = apex_C.flatten(tensors)
    assert flat.shape == (12 + 5 + 0 + 1 + 4,)
    assert flat.dtype == dtype
    assert_equal_bits([flat], [torch.cat([tensor.reshape(-1) for tensor in tensors])])
    assert_equal_bits(apex_C.unflatten(flat, tensors), tensors)


def test_pieces_share_memory_with_the_whole() -> None:
    tensors = [torch.zeros(2, 3), torch.zeros(4)]
    flat = torch.arange(10.0)
    pieces = apex_C.unflatten(flat, tensors)
    pieces[1].fill_(-1)
    assert flat[6:].tolist() == [-1.0] * 4
    flat[0] = 7
    assert pieces[0][0, 0] == 7


def test_flattening_copies() -> None:
    tensors = [torch.zeros(4).t(), torch.zeros(3, 2).t()]
    flat = apex_C.flatten(tensors)
    flat.fill_(1)
    assert not any(tensor.any() for tensor in tensors)


def test_one_tensor_is_not_copied() -> None:
    """As upstream's, and PyTorch's own."""
    tensor = torch.zeros(2, 2)
    apex_C.flatten([tensor]).fill_(1)
    assert tensor.all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: apex_C.flatten([]), ValueError, "tensors is empty"),
        (lambda: apex_C.flatten([torch.ones(2).to_sparse()]), TypeError, r"tensors\[0\] is sparse"),
        (lambda: apex_C.unflatten(torch.ones(3), [torch.ones(2)]), ValueError, "a vector of 2 elements"),
        (lambda: apex_C.unflatten(torch.ones(1, 2), [torch.ones(2)]), ValueError, r"flat has shape \(1, 2\)"),
    ],
)
def test_refusals(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
