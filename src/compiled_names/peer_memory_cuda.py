"""Upstream's compiled module of this name: memory shared by processes through handles, and halo exchange through it."""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apex._distributed import peer_memory
from apex.contrib.peer_memory.peer_memory import laid_out, push_pull

_memories: dict[int, Tensor] = {}
_paths: dict[int, str] = {}
_handles = itertools.count(1)


def allocate_raw(size: int) -> int:
    """Allocate `size` bytes and return a handle; they are zero on the host and undefined on an accelerator."""
    if size < 1:
        raise ValueError(f"size={size}: at least one byte is needed")
    handle, device = next(_handles), peer_memory.default_device()
    if device == peer_memory.HOST:
        path = _paths[handle] = peer_memory.new_file(size)
        _memories[handle] = peer_memory.map_file(path, size)
        weakref.finalize(_memories[handle], Path(path).unlink, missing_ok=True)
    else:
        _memories[handle] = torch.empty(size, dtype=torch.uint8, device=device)
    return handle


def _memory(raw: int) -> Tensor:
    if raw not in _memories:
        raise ValueError(f"raw={raw} is not a handle of allocate_raw or get_raw_peers, or was freed")
    return _memories[raw]


def free_raw(raw: int) -> None:
    """Free the memory of a handle; views of it keep it alive."""
    _memory(raw)
    _paths.pop(raw, None)
    del _memories[raw]


def zero(raw: int, size: int) -> None:
    """Set the first `size` bytes to zero."""
    _memory(raw)[:size].zero_()


def get_raw_ipc_address(raw: int) -> Tensor:
    """Return the address that another process opens this memory with: bytes on the host, of one length for all."""
    return peer_memory.address_of(_memory(raw), _paths.get(raw))


def get_raw_peers(ipc_addresses: Tensor, peer_rank: int, raw: int) -> list[int]:
    """Return handles of all peers' memory from their addresses [peers, bytes]; the handle of `peer_rank` is `raw`."""
    handles = []
    for place, address in enumerate(ipc_addresses):
        handle = raw if place == peer_rank else next(_handles)
        if handle != raw:
            _memories[handle] = peer_memory.open_address(address)
        handles.append(handle)
    return handles


def _view(dtype: torch.dtype, raw: int, shape: Sequence[int], channels_last: bool) -> Tensor:
    """Return a view of the memory as a tensor."""
    memory, count = _memory(raw), math.prod(shape) * dtype.itemsize
    if count > memory.numel():
        raise ValueError(f"a tensor {list(shape)} of {dtype} needs {count} bytes, but raw has {memory.numel()}")
    return laid_out(memory[:count], shape, dtype, channels_last)


blob_view_half = functools.partial(_view, torch.float16)
blob_view_float = functools.partial(_view, torch.float32)
blob_view_int = functools.partial(_view, torch.int32)


def push_pull_halos_1d(diagnostics: bool, explicit_nhwc: bool, numSM: int, rank: int, *sides: Any) -> None:
    """Send the `in` halos to the neighbours and fill the `out` halos with theirs, or with zeros at an edge.

    `sides` are zero, in_halo, in_transfer, out_transfer and out_halo of the top, then of the bottom. The `in` transfer
    buffers are this rank's tensors of a PeerMemoryPool, the `out` buffers the neighbours'.
    """
    top, btm = sides[:5], sides[5:]
    if not all(hasattr(each, "peer") for each in (*top[2:4], btm[3])):
        raise ValueError("the transfer buffers are not of PeerMemoryPool.allocate_peer_tensors")
    memory, _ = top[2].peer
    push_pull(memory, *((*halos, -1 if zero else halos[2].peer[1]) for zero, *halos in (top, btm)))
