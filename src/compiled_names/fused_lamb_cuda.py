"""Upstream's compiled module of this name: LAMB with the gradients' norm as a number, which `lamb` accepts."""

from amp_C import multi_tensor_lamb as lamb

__all__ = ["lamb"]
