"""What upstream's fused functions do under autocast, at the path where clients find it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .ops._library import autocast_dtype

__all__ = ["_cast_if_autocast_enabled", "_get_autocast_dtypes"]


def _get_autocast_dtypes() -> list[torch.dtype]:
    """The half-precision dtypes that autocast can use here: without bfloat16 on a GPU that has none."""
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        return [torch.float16]
    return [torch.float16, torch.bfloat16]


def _cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """The arguments, floating-point tensors among them in the autocast dtype where autocast is on; float64 stays."""
    if not torch._C._is_any_autocast_enabled():  # the quick question first: most calls end here
        return args
    return tuple(_cast(argument) for argument in args)


def _cast(argument: Any) -> Any:
    if not isinstance(argument, Tensor) or not argument.is_floating_point() or argument.dtype == torch.float64:
        return argument
    dtype = autocast_dtype(argument)
    return argument if dtype is None else argument.to(dtype)
