"""Whether tensors lie where they did."""

import pytest
import torch
from torch import Tensor

from apex.ops.multi_tensor.tables import lie_at


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_addresses(device: str) -> None:
    memory = torch.ones(64, device=device)
    param = torch.nn.Parameter(torch.ones(3, device=device))
    tensors: list[Tensor] = [memory[:4], param, memory[8:9].view(1, 1), torch.empty(0, device=device)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert lie_at(tensors, addresses)
    assert lie_at([], [])
    param.data = torch.ones(3, device=device)
    assert not lie_at(tensors, addresses)
    addresses[1] = param.data_ptr()
    assert lie_at(tensors, addresses)
    assert not lie_at([*tensors[:3], memory[1:2]], addresses)
    for nothing in (None, torch.ones(2, device=device).to_sparse()):
        with pytest.raises((TypeError, RuntimeError)):
            lie_at([*tensors[:3], nothing], addresses)  # type: ignore[list-item]
