"""OpenFold's attention: softmax(q k^T / sqrt(head size) + bias + (mask - 1) * inf) v.

Letters: `...` batches, H heads, Q queries, K keys, C the size of a head. query is [..., H, Q, C], key and value are
[..., H, K, C]; mask (1 to attend, 0 not to) and bias are broadcast to [..., H, Q, K]. The bias has a gradient, the mask
has none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...ops._checks import check_floats, check_tensors
from ...ops.attention import attention, op_biased
from ...ops.attention.config import usual_tile

_enabled = False


def is_enabled() -> bool:
    """Return whether a model should call `AttnTri` and related functions; a switch for client code, initially off."""
    return _enabled


def enable() -> None:
    """Turn the switch of `is_enabled` on."""
    global _enabled
    _enabled = True


def disable() -> None:
    """Turn the switch of `is_enabled` off."""
    global _enabled
    _enabled = False


def CanSchTriMHA(
    in_shape: Sequence[int], has_bias: bool = True, inf: float = 1000000000.0, training: bool = True
) -> bool:
    """Return whether `AttnTri` accepts a query of this shape: any [..., H, Q, C], with or without bias, in any mode."""
    return len(in_shape) >= 3 and all(size > 0 for size in in_shape)


def schedule_triton_mha(in_shape: Sequence[int], fwd: bool = True) -> tuple[int, int, int, int]:
    """Return the tile's queries and keys, the warps and the stages for half precision on a large GPU.

    `in_shape` is [batches, H, Q, C]. The backward pass has several kernels; with `fwd=False` the result describes the
    kernel that computes the gradients of keys and values.
    """
    return usual_tile(in_shape[-2], in_shape[-1], forward=fwd)


class FusedAttenionCoreFunc(torch.autograd.Function):
    """The autograd node of the attention; with `is_training=False` it saves nothing and has no backward pass."""

    @staticmethod
    def forward(ctx, q, k, v, mask=None, bias=None, inf=1000000000.0, is_training=True):  # type: ignore[override]
        check_floats(q=q, k=k, v=v)
        arguments = op_biased.checked_arguments(q, k, v, mask, bias, inf)
        ctx.is_training = is_training
        if not is_training:
            return op_biased.inference(*arguments).detach()
        return op_biased.ATTENTION.forward_and_save(ctx, *arguments)

    @staticmethod
    def backward(ctx, do):  # type: ignore[override]
        if not ctx.is_training:
            raise RuntimeError("FusedAttenionCoreFunc was called with is_training=False, so that it has no gradient")
        dq, dk, dv, dbias = op_biased.ATTENTION.backward_from_saved(ctx, do)
        return dq, dk, dv, None, dbias, None, None


def AttnTri(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    inf: float = 1000000000.0,
    is_training: bool = True,
) -> Tensor:
    """Compute the attention; `is_training` has no effect, because tensors are saved only if a backward can follow."""
    check_floats(q=q, k=k, v=v)
    return op_biased.attend(q, k, v, mask, bias, inf)


def AttnBiasJIT(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, bias: Tensor, inf: float) -> Tensor:
    """Compute the attention with mask and bias."""
    check_tensors(mask=mask, bias=bias)
    return attention(query, key, value, mask, bias, inf)


def AttnNoBiasJIT(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, inf: float) -> Tensor:
    """Compute the attention with a mask and without bias."""
    check_tensors(mask=mask)
    return attention(query, key, value, mask, None, inf)
