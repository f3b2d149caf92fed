"""Memory for buffers that are sent: where wanted and possible, registered with NCCL, which then copies nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

logger = logging.getLogger("apex.contrib.optimizers")

# By process group and device.
_pools: WeakKeyDictionary[Any, dict[torch.device, Any]] = WeakKeyDictionary()


def allocator(group: Any, device: torch.device, registered: bool) -> Callable[..., Tensor]:
    """A function like `torch.zeros`, for buffers of this process group."""
    if not registered:
        return torch.zeros
    pool = _pool(group, device)
    if pool is None:
        return torch.zeros

    def zeros(size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.cuda.use_mem_pool(pool, device):
            buffer = torch.zeros(size, dtype=dtype, device=device)
        _register(group, device, pool)
        return buffer

    return zeros


def _backend(group: Any, device: torch.device) -> Any:
    return None if group is None or device.type != "cuda" else group._get_backend(device)


def _pool(group: Any, device: torch.device) -> Any:
    """PyTorch's pool of memory that NCCL has allocated; None, with a word about it, where there is none."""
    backend = _backend(group, device)
    if not hasattr(torch.cuda, "MemPool") or not hasattr(backend, "mem_allocator"):
        logger.info("nccl_ub: no NCCL allocator for buffers on %s; they are allocated as usual", device)
        return None
    pools = _pools.setdefault(group, {})
    if device not in pools:
        pools[device] = torch.cuda.MemPool(backend.mem_allocator)
    return pools[device]


def _register(group: Any, device: torch.device, pool: Any) -> None:
    backend = _backend(group, device)
    if hasattr(backend, "register_mem_pool"):
        backend.register_mem_pool(pool)
