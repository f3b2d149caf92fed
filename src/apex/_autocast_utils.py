"""Helpers of upstream's fused functions under autocast, at upstream's import path."""

from __future__ import annotations

import torch

from .ops._library import cast_for_autocast as _cast_if_autocast_enabled

__all__ = ["_cast_if_autocast_enabled", "_get_autocast_dtypes"]


def _get_autocast_dtypes() -> list[torch.dtype]:
    """Return the half-precision dtypes that autocast can use: float16, and bfloat16 unless the GPU lacks it."""
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        return [torch.float16]
    return [torch.float16, torch.bfloat16]
