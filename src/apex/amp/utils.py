"""An upstream function that scripts import, mostly unused; editors offer it for completion."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_fp_tensor(x: Any) -> bool:
    """Return whether `x` is a floating-point tensor, or a list or tuple of only such tensors."""
    if isinstance(x, list | tuple):
        return all(map(is_fp_tensor, x))
    return isinstance(x, Tensor) and x.is_floating_point()
