"""Upstream's compiled module of this name: LAMB with the gradients' norm given as a number, which ours may be too."""

from amp_C import multi_tensor_lamb as lamb

__all__ = ["lamb"]
