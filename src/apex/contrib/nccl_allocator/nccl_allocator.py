"""NCCL memory by PyTorch's own allocator and memory pools; without NCCL the functions have no effect."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ... import _env
from ..._distributed.peer_memory import default_device

logger = logging.getLogger("apex.nccl_allocator")


def get_func_args(func: Callable) -> list[str]:
    """Return the names of a function's arguments."""
    return list(inspect.signature(func).parameters)


def init() -> None:
    """Set the environment variables read when a process group is made.

    They turn NVLink SHARP on and the registration of all memory off.
    """
    _env.set_nccl_allocator_variables()


def _backend(group: Any, device: torch.device) -> Any:
    """Return the NCCL backend of a process group; without one, log a line and return None."""
    if dist.is_initialized():
        group = dist.group.WORLD if group is None else group
        if dist.get_backend(group) == dist.Backend.NCCL:
            return group._get_backend(device)
    logger.info("no process group with NCCL: memory is allocated as usual")
    return None


def get_nccl_allocator() -> Any:
    """Return the NCCL allocator of the default process group, or None if the group or its NCCL has none."""
    backend = _backend(None, default_device())
    try:
        return None if backend is None else backend.mem_allocator
    except RuntimeError as error:
        logger.info("memory is allocated as usual: %s", error)
        return None


def create_nccl_mem_pool(symmetric: bool | None = None) -> Any:
    """Return a torch.cuda.MemPool of NCCL memory; without NCCL return None, with which `nccl_mem` does nothing."""
    allocator = get_nccl_allocator()
    if allocator is None or symmetric is None:
        return None if allocator is None else torch.cuda.MemPool(allocator)
    # NVIDIA's PyTorch and the official one use different names, and other versions have neither.
    for name in ("symmetric", "symm_mem"):
        if name in get_func_args(torch.cuda.MemPool):
            return torch.cuda.MemPool(allocator, **{name: symmetric})
    raise ValueError(f"symmetric={symmetric}: torch.cuda.MemPool of PyTorch {torch.__version__} has no such option")


class nccl_mem:
    """A context that allocates memory from `pool` and on exit registers the pool with the group's NCCL.

    It does nothing unless `enabled`, or if `pool` is None.
    """

    def __init__(self, pool: Any, enabled: bool = True, device: Any = None, group: Any = None) -> None:
        self.pool, self.group, self.device = pool, group, None
        self.mem_context: Any = contextlib.nullcontext()
        self._nccl: Any = None
        if not enabled or pool is None:
            return
        current = default_device()
        self.device = torch.device(current.type, device) if isinstance(device, int) else torch.device(device or current)
        if self.device.type != current.type:
            raise ValueError(f"device={device}: NCCL's memory is on {current.type} devices")
        self._nccl = _backend(group, self.device)
        self.mem_context = torch.cuda.use_mem_pool(pool, self.device)

    def __enter__(self) -> None:
        self.mem_context.__enter__()
        if self._nccl is not None:
            with contextlib.suppress(RuntimeError):  # raised if the pool was never registered
                self._nccl.deregister_mem_pool(self.pool)

    def __exit__(self, *exception: Any) -> None:
        if self._nccl is not None:
            try:
                self._nccl.register_mem_pool(self.pool)
            except RuntimeError as error:
                logger.info("NCCL did not register the pool: %s", error)
        self.mem_context.__exit__(*exception)
