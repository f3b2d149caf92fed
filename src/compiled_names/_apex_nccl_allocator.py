"""Upstream's compiled module of this name: NCCL's allocator, as PyTorch's own NCCL backend has it."""

from apex.contrib.nccl_allocator.nccl_allocator import get_nccl_allocator

__all__ = ["get_nccl_allocator"]
