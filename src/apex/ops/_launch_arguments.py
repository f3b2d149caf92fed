"""Arguments of kernels besides tensors and numbers. Importing this module needs no Triton."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@functools.cache
def has_descriptors() -> bool:
    """Return whether this Triton takes descriptors that the host makes; imports Triton, if it is installed."""
    if importlib.util.find_spec("triton") is None:
        return False
    return importlib.util.find_spec("triton.tools.tensor_descriptor") is not None


@dataclass(frozen=True)
class Described:
    """A tensor that a kernel loads by a descriptor, in tiles of `block`; its last dimension is contiguous.

    Attributes of the tensor, such as its dtype and device, are attributes of this object.
    """

    tensor: Tensor
    block: tuple[int, ...]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def argument(self) -> Any:
        """Return Triton's descriptor."""
        descriptor = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
        return descriptor(self.tensor, list(self.tensor.shape), list(self.tensor.stride()), list(self.block))


def as_argument(value: Any) -> Any:
    """Return a tensor, a descriptor of a tensor, or None as Triton takes it."""
    return value.argument() if isinstance(value, Described) else value
