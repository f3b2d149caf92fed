"""Upstream's compiled module of this name: NCCL's allocator, from PyTorch's own NCCL backend."""

from apex.contrib.nccl_allocator.nccl_allocator import get_nccl_allocator

__all__ = ["get_nccl_allocator"]
