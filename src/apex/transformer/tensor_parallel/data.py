"""Broadcast of a batch from the first tensor-parallel rank to the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..._arguments import checked
from ..._distributed import collectives, exchange
from .._groups.device import parameter_device
from ..parallel_state import (
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_src_rank,
)

_MAX_DIMENSIONS = 15


@checked
def broadcast_data(keys: Sequence[str], data: Mapping[str, Tensor] | None, datatype: torch.dtype) -> dict[str, Tensor]:
    """Return the first rank's tensors under `keys`, all of type `datatype`, on every rank's device.

    The other ranks may pass None. Other keys are ignored. Results have no gradients.
    """
    if not keys:
        return {}
    sizes, numel, total = _build_key_size_numel_dictionaries(keys, data, datatype)
    flat = torch.empty(total, dtype=datatype, device=parameter_device())
    if get_tensor_model_parallel_rank() == 0:
        assert data is not None
        torch.cat([data[key].detach().contiguous().view(-1).to(flat.device) for key in keys], out=flat)
    _broadcast(flat)
    parts = flat.split([numel[key] for key in keys])
    return {key: part.view(sizes[key]) for key, part in zip(keys, parts, strict=True)}


def _check_data_types(keys: Sequence[str], data: Mapping[str, Tensor], target_dtype: torch.dtype) -> None:
    """Raise an AssertionError that names the tensor whose dtype is not `target_dtype`."""
    for key in keys:
        dtype = data[key].dtype
        assert dtype == target_dtype, f"{key} has data type {dtype} which is different than {target_dtype}"


def _build_key_size_numel_dictionaries(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, datatype: torch.dtype | None = None
) -> tuple[dict[str, torch.Size], dict[str, int], int]:
    """Return the first rank's sizes by key, the numbers of elements by key, and their sum, on every rank.

    If the first rank's tensors cannot be sent, for example because of their dtype, all ranks raise.
    """
    header = torch.zeros(len(keys), 1 + _MAX_DIMENSIONS, dtype=torch.int64, device=parameter_device())
    if get_tensor_model_parallel_rank() == 0:
        try:
            rows = _header_rows(keys, data, datatype)
        except BaseException:
            _broadcast(header.fill_(-1))
            raise
        header.copy_(torch.tensor(rows, dtype=torch.int64, device=header.device).view_as(header))
    _broadcast(header)
    rows = header.tolist()
    assert all(row[0] >= 0 for row in rows), "the first tensor-parallel rank has no batch to send: its error says why"
    sizes = {key: torch.Size(row[1 : 1 + row[0]]) for key, row in zip(keys, rows, strict=True)}
    numel = {key: size.numel() for key, size in sizes.items()}
    return sizes, numel, sum(numel.values())


def _header_rows(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, datatype: torch.dtype | None
) -> list[list[int]]:
    """Return the number of dimensions and the sizes of each tensor, as rows of equal length."""
    assert data is not None, "the first tensor-parallel rank has no data to send"
    for key in keys:
        if not isinstance(data.get(key), Tensor):
            raise ValueError(f"data must have a tensor for each of keys; under {key!r} it has {data.get(key)!r:.80}")
    if datatype is not None:
        _check_data_types(keys, data, datatype)
    rows = []
    for key in keys:
        shape = list(data[key].shape)
        assert len(shape) <= _MAX_DIMENSIONS, f"{key} has {len(shape)} dimensions, at most {_MAX_DIMENSIONS} fit"
        rows.append([len(shape), *shape, *[0] * (_MAX_DIMENSIONS - len(shape))])
    return rows


def _broadcast(tensor: Tensor) -> None:
    group, description = get_tensor_model_parallel_group(), "the broadcast of a batch"
    exchange.check_alike(tensor, group, description)
    collectives.broadcast(tensor, get_tensor_model_parallel_src_rank(), group, description)
