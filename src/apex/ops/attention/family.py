"""The attention family, as the dispatch knows it."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _device, _library
from . import config
from .self_check import self_check

FAMILY = _library.register_family(
    _library.OpFamily(
        "attention",
        "attention with mask, bias and packed sequences, forward and backward",
        self_check,
        small_inputs=f"PyTorch's scaled_dot_product_attention for heads of more than {config.LARGEST_HEAD} elements",
    )
)


def takes_head(tensor: Tensor) -> bool:
    """Whether the kernels take heads of the size of the tensor's last dimension."""
    size = tensor.shape[-1]
    if size <= config.LARGEST_HEAD // 2:
        return True
    return size <= config.largest_head(tensor.dtype.itemsize, _device.facts(tensor.device))


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """What autocast turns the inputs of an attention into, as it does for PyTorch's own; None if nothing."""
    return None if tensor.dtype == torch.float64 else _library.autocast_dtype(tensor)
