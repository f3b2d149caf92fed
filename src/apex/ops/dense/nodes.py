"""What the autograd nodes of the dense layers have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library


def as_given(function: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a Function's forward or backward in the dtype of its tensors, also under autocast."""

    @functools.wraps(function)
    def wrapper(ctx: Any, *args: Any) -> Any:
        if torch._C._is_any_autocast_enabled():  # the quick question first: most calls end here
            tensor = next(value for value in args if isinstance(value, Tensor))
            if _library.autocast_dtype(tensor) not in (None, tensor.dtype):
                with torch.autocast(tensor.device.type, enabled=False):
                    return function(ctx, *args)
        return function(ctx, *args)

    return wrapper


def shaped(rows: Tensor, like: Tensor) -> Tensor:
    """Rows as a tensor with the leading dimensions of `like`."""
    if like.dim() == 2:
        return rows
    # Not a view of another tensor, which autograd would not let the caller of a Function change.
    return torch.ops.aten._unsafe_view.default(rows, (*like.shape[:-1], rows.shape[-1]))


def cast_like_autocast(dtype: torch.dtype | None, tensors: Sequence[Any]) -> Sequence[Any]:
    """What autocast would make of the arguments of a matrix product."""
    if dtype is None:
        return tensors
    return [t if t is None or t.dtype in (dtype, torch.float64) else t.to(dtype) for t in tensors]


def differentiable_gradients(
    wanted: Sequence[bool], function: Callable[..., Tensor], inputs: Sequence[Tensor | None], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients that have gradients themselves, for create_graph=True."""
    # Each argument by itself, though several may be one tensor.
    aliases = [tensor if tensor is None else tensor.view_as(tensor) for tensor in inputs]
    chosen = [alias for alias, is_wanted in zip(aliases, wanted, strict=True) if is_wanted and alias is not None]
    found = iter(torch.autograd.grad(function(*aliases), chosen, dy, create_graph=True))
    return tuple(next(found) if is_wanted else None for is_wanted in wanted)
