"""Multihead attention by `F.scaled_dot_product_attention` on views of packed projections, and `dropout_add`.

`dropout_add` computes residual + dropout(x) in one pass that saves a bit per element for the backward pass.

Letters: S queries, T keys, B batches, H heads, D the size of a head, E = H * D. The projections of a head are adjacent:
a row of the packed queries, keys and values is [B, H, 3, D], of packed keys and values [B, H, 2, D].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _library
from ..norm import layer_norm
from .checks import check_attention, check_dropout
from .explicit import split
from .masks import Mask, MaskKind, added_logits, check_mask

kernels = _library.LazyModule(f"{__package__}.kernels")

# Largest second and third dimension of a CUDA grid, which count the heads in PyTorch's kernels.
MOST_HEADS = 65535
# Up to this length memory-efficient attention is the quickest on Hopper. Forward and backward of 80 sequences of 64
# with 16 heads of 64 in float16: 91 us (cuDNN: 129), with mask and dropout 129 (172); 40 sequences of 128: 130 (108).
SHORT = 64
NORM_EPS = 1e-5
# A program of `dropout_add` has four stretches of this many elements.
QUARTER = 1024
# Below this many elements the host is the limit, and two calls into C++ are quicker than one into Python: 5.2 million
# take 20 us instead of 23, and the host 23 us more.
NATIVE_BELOW = 1 << 23


def attend(queries: Tensor, keys: Tensor, values: Tensor, heads: int, mask: Mask | None, dropout: float) -> Tensor:
    """Return [S, B, E] from queries [S, B*H, D], keys and values [T, B*H, D]; zeros for a query that sees nothing."""
    length, batch_heads, size = queries.shape
    batch = batch_heads // heads
    check_mask(mask, length, keys.shape[0], batch, queries.device)
    shape = (1, batch_heads) if _folds(queries, batch_heads, keys.shape[0]) else (batch, heads)
    added = added_logits(mask, heads, queries.dtype, folded=shape[1] != heads)
    causal = mask is not None and mask.kind is MaskKind.CAUSAL
    q, k, v = [part.reshape(part.shape[0], *shape, size).permute(1, 2, 0, 3) for part in (queries, keys, values)]
    context = dot_product_attention(q, k, v, added, dropout, causal)
    return context.permute(2, 0, 1, 3).reshape(length, batch, heads * size)


def _folds(queries: Tensor, batch_heads: int, keys: int) -> bool:
    """Return whether all heads of all batches should be treated as heads of one batch.

    The result is then [S, B*H, D], as the next projection reads it. As B batches of H heads it is [B, S, H, D] and must
    be transposed, and so must its gradient: a step of 80 sequences of 64 takes 268 us, by batches 334. But cuDNN's and
    flash attention, which take long sequences of half precision, keep the order of the queries' dimensions and are no
    quicker with one batch (8 sequences of 2048: 1822 us; by batches 1808).
    """
    is_long_half = queries.is_cuda and queries.dtype.itemsize == 2 and (len(queries) > SHORT or keys > SHORT)
    return batch_heads <= MOST_HEADS and not is_long_half


def dot_product_attention(
    queries: Tensor, keys: Tensor, values: Tensor, added: Tensor | None, dropout: float, causal: bool
) -> Tensor:
    """Return [B, H, S, D] from queries of that shape, keys and values [B, H, T, D], and a mask added to the logits."""
    if 0 < keys.shape[2] <= SHORT and queries.shape[2] <= SHORT and _is_best_for_short(queries, added):
        added = None if added is None else added.expand(*queries.shape[:3], -1)
        operator = torch.ops.aten._scaled_dot_product_efficient_attention
        return operator(queries, keys, values, added, True, dropout, causal)[0]
    if not queries.numel() or not keys.numel():
        # Zeros, differentiable. PyTorch 2.9's attention on a CPU divides by a size and ends the process.
        return (queries @ keys.transpose(2, 3)).softmax(-1) @ values
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=added, dropout_p=dropout, is_causal=causal)


def _is_best_for_short(queries: Tensor, added: Tensor | None) -> bool:
    """Return whether PyTorch's memory-efficient attention takes these sequences and is quicker than PyTorch's choice.

    Measured on Hopper, where PyTorch would choose cuDNN. `torch.compile` gets the operator that it knows best.
    """
    return (
        queries.is_cuda
        and not torch.compiler.is_compiling()
        and queries.dtype.itemsize == 2
        and queries.numel() > 0
        and queries.shape[3] % 8 == 0
        and (added is None or added.shape[-1] % 8 == 0)
        and _is_hopper(queries.device)
        and torch.backends.cuda.mem_efficient_sdp_enabled()
    )


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def attention(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Sequence[Any] = (),
    *,
    heads: int,
    mask: Mask | None = None,
    dropout: float = 0.0,
    norm: Sequence[Tensor] = (),
) -> Tensor:
    """Return attention of one input [S, B, E] to itself, or of the first to the second, [T, B, E].

    `weights` are given for each input, [H * 3 * D, E] or [E, E] and [H * 2 * D, E], then for the outputs; `biases` as
    many or none. With a `norm`, weight and bias, the layer norm of the first input attends, and the result after
    dropout is added to the first input.
    """
    check_attention(inputs, weights, heads, dropout)
    first, *others = inputs
    normed = first
    if norm:
        gamma, beta = norm
        normed = layer_norm(first, (first.shape[2],), gamma, beta, NORM_EPS)
    packed = [
        F.linear(each, weights[place], biases[place] if biases else None)
        for place, each in enumerate((normed, *others))
    ]
    queries, keys, values = split(packed, heads)
    context = attend(queries, keys, values, heads, mask, dropout)
    outputs = F.linear(context, weights[-1], biases[-1] if biases else None)
    return dropout_add(outputs, first, dropout) if norm else outputs


def dropout_add(x: Tensor, residual: Tensor, dropout: float) -> Tensor:
    """Return residual + dropout(x), in the wider of the two dtypes; random numbers come from the device's generator.

    Compiled code uses PyTorch's own operators, which `torch.compile` fuses into an equally good kernel.
    """
    check_dropout(dropout)
    if x.shape != residual.shape:
        raise ValueError(f"x has shape {list(x.shape)}, the residual {list(residual.shape)}: they must be equal")
    if dropout == 0.0:
        return residual + x
    is_large = x.numel() >= NATIVE_BELOW or (x.numel() > 0 and _library.requested == "triton")
    takes_kernel = x.device == residual.device and all(_library.runs_triton(FAMILY, each) for each in (x, residual))
    if torch.compiler.is_compiling() or not is_large or not takes_kernel:
        return residual + F.dropout(x, dropout)
    seed = torch.empty(1, dtype=torch.int64, device=x.device).random_()
    return DropoutAdd.apply(x, residual, seed, dropout, torch.promote_types(x.dtype, residual.dtype))


class DropoutAdd(torch.autograd.Function):
    """Autograd node of residual + dropout(x), drawn from a seed; without a residual, of x masked by given keep bits.

    The second form is the gradient of the first, and its own gradient.
    """

    @staticmethod
    def forward(ctx, x, residual, seed_or_kept, dropout, dtype):  # type: ignore[override]
        output, kept = launch_dropout_add(x, residual, seed_or_kept, dropout, dtype)
        ctx.save_for_backward(kept)
        ctx.dropout, ctx.dtype = dropout, x.dtype
        return output

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        (kept,) = ctx.saved_tensors
        of_x, of_residual, *_ = ctx.needs_input_grad
        dx = DropoutAdd.apply(gradient, None, kept, ctx.dropout, ctx.dtype) if of_x else None
        return dx, gradient if of_residual else None, None, None, None  # autograd casts it to the residual's dtype


def launch_dropout_add(
    x: Tensor, residual: Tensor | None, seed_or_kept: Tensor, dropout: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the output in `dtype` and the keep bits, without autograd."""
    draws, count = residual is not None, x.numel()
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    output = torch.empty_like(x, dtype=dtype)
    programs = -(-count // (4 * QUARTER))
    seed, kept = None, seed_or_kept
    if draws:
        seed, kept = kept, torch.empty(programs * QUARTER, dtype=torch.uint8, device=x.device)
    kernels.dropout_add(
        (programs,),
        (x, residual, seed, kept, output),
        (count,),
        (dropout, 1.0 / (1.0 - dropout)),
        QUARTER=QUARTER,
        num_warps=8,  # 16.8 million elements of float16: 35 us where 4 warps take 38, in trials without the bits
    )
    return output, kept


FAMILY = _library.register_family(
    _library.OpFamily(
        "multihead",
        "multihead attention: PyTorch's attention on packed projections; dropout and residual in one pass",
        small_inputs=f"PyTorch's dropout below {NATIVE_BELOW:,} elements",
    )
)
