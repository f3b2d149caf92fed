"""Memory pools registered with NCCL, so that collectives need no copies."""

from .nccl_allocator import create_nccl_mem_pool, init, nccl_mem

__all__ = ["create_nccl_mem_pool", "init", "nccl_mem"]
