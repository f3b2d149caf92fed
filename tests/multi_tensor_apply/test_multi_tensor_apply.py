"""multi_tensor_applier, through which clients call the functions of amp_C."""

import pytest
import torch

import amp_C
from apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier


def test_clients_find_it_available() -> None:
    """Clients raise where it is not; the check of upstream does nothing."""
    assert multi_tensor_applier.available is True
    assert MultiTensorApply.available is True
    assert multi_tensor_applier.check_avail() is None
    assert multi_tensor_applier.chunk_size == 2048 * 32


def test_old_import_paths() -> None:
    from apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply as same

    assert same is MultiTensorApply
    assert isinstance(multi_tensor_applier, MultiTensorApply)


def test_arguments_are_handed_on() -> None:
    def function(*arguments):
        return arguments

    flag, lists = torch.zeros(1), [[torch.ones(2)]]
    chunk, *others = MultiTensorApply(512)(function, flag, lists, 1.0, None)
    assert chunk == 512
    assert others[0] is flag
    assert others[1] is lists
    assert others[2:] == [1.0, None]


@pytest.mark.parametrize("chunk_size", [1, 7, 2048 * 32])
def test_the_chunk_size_changes_nothing(chunk_size: int) -> None:
    tensors = [torch.randn(50), torch.randn(3)]
    outputs = [torch.empty_like(tensor) for tensor in tensors]
    flag = torch.zeros(1, dtype=torch.int32)
    applier = MultiTensorApply(chunk_size)
    applier(amp_C.multi_tensor_scale, flag, [tensors, outputs], 3.0)
    assert all(torch.equal(output, tensor * 3) for output, tensor in zip(outputs, tensors, strict=True))
    norm, _ = applier(amp_C.multi_tensor_l2norm, flag, [tensors])
    torch.testing.assert_close(norm, torch.cat(tensors).norm().reshape(1))
