"""What upstream's fused functions do under autocast, at the path where clients find it."""

from __future__ import annotations

import torch

from .ops._library import cast_for_autocast as _cast_if_autocast_enabled

__all__ = ["_cast_if_autocast_enabled", "_get_autocast_dtypes"]


def _get_autocast_dtypes() -> list[torch.dtype]:
    """The half-precision dtypes that autocast can use here: without bfloat16 on a GPU that has none."""
    if torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        return [torch.float16]
    return [torch.float16, torch.bfloat16]
