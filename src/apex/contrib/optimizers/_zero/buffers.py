"""Memory for buffers that are sent: where wanted and possible, registered with NCCL, which then copies nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

logger = logging.getLogger("apex.contrib.optimizers")

# A pool for each buffer, for as long as its process group lives.
_pools: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()


def allocator(group: Any, device: torch.device, registered: bool) -> Callable[..., Tensor]:
    """A function like `torch.zeros`, for buffers of this process group."""
    backend: Any = None if not registered or group is None or device.type != "cuda" else group._get_backend(device)
    try:
        allocate = backend.mem_allocator
        new_pool = torch.cuda.MemPool
    except (AttributeError, RuntimeError) as error:  # another backend; PyTorch or NCCL without it
        if registered:
            logger.info("nccl_ub: NCCL allocates no buffers on %s; they are allocated as usual: %s", device, error)
        return torch.zeros

    def zeros(size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        pool = new_pool(allocate)
        with torch.cuda.use_mem_pool(pool, device):
            buffer = torch.zeros(size, dtype=dtype, device=device)
        try:
            backend.register_mem_pool(pool)
        except (AttributeError, RuntimeError) as error:
            logger.warning("nccl_ub: a buffer could not be registered with NCCL, and is used without: %s", error)
        _pools.setdefault(group, []).append(pool)
        return buffer

    return zeros
