"""`torch.ops.apex.attention_*` and `packed_attention_*`: what `torch.compile` sees of the attentions.

Operators return tensors, not None: an absent gradient is an empty tensor.
"""

from __future__ import annotations

import torch

from .. import _library
from . import biased, packed, plans


def _statistics_fake(query, planes, shape):
    return query.new_empty((planes, *shape), dtype=torch.float32)


def _forward(query, key, value, mask, bias, inf):
    return biased.forward(query, key, value, mask, bias, inf)


def _forward_fake(query, key, value, mask, bias, inf):
    *lead, heads, rows, _ = query.shape
    batch = 1
    for size in lead:
        batch = batch * size
    planes = 1 if mask is None and bias is None else 2
    return plans.empty_like(query), _statistics_fake(query, planes, (batch, heads, rows))


def _backward(dout, query, key, value, mask, bias, output, statistics, inf, bias_grad):
    *gradients, dbias = biased.backward(dout, query, key, value, mask, bias, output, statistics, inf, bias_grad)
    return *gradients, query.new_empty(0) if dbias is None else dbias


def _backward_fake(dout, query, key, value, mask, bias, output, statistics, inf, bias_grad):
    dbias = query.new_empty(0) if bias is None or not bias_grad else bias.new_empty(bias.shape)
    return *(plans.empty_like(tensor) for tensor in (query, key, value)), dbias


def _setup_context(ctx, inputs, output):
    query, key, value, mask, bias, ctx.inf = inputs
    ctx.save_for_backward(query, key, value, mask, bias, *output)
    ctx.mark_non_differentiable(output[1])


def _op_backward(ctx, dout, dstatistics):
    saved = ctx.saved_tensors
    wants_bias = ctx.needs_input_grad[4]
    *gradients, dbias = torch.ops.apex.attention_backward(dout, *saved, ctx.inf, wants_bias)
    return *gradients, None, dbias if wants_bias else None, None


def _packed_forward(qkv, cu_seqlens, seed, max_seqlen, dropout_p, zero_tail):
    return packed.forward(qkv, cu_seqlens, seed, max_seqlen, dropout_p, zero_tail)


def _packed_forward_fake(qkv, cu_seqlens, seed, max_seqlen, dropout_p, zero_tail):
    total, _, heads, head_dim = qkv.shape
    return qkv.new_empty((total, heads, head_dim)), _statistics_fake(qkv, 1, (heads, total))


def _packed_backward_fake(dout, qkv, cu_seqlens, seed, output, statistics, max_seqlen, dropout_p, zero_tail):
    return qkv.new_empty(qkv.shape)


def _packed_setup_context(ctx, inputs, output):
    qkv, cu_seqlens, seed, *ctx.options = inputs
    ctx.save_for_backward(qkv, cu_seqlens, seed, *output)
    ctx.mark_non_differentiable(output[1])


def _packed_op_backward(ctx, dout, dstatistics):
    qkv, cu_seqlens, seed, output, statistics = ctx.saved_tensors
    dqkv = torch.ops.apex.packed_attention_backward(dout, qkv, cu_seqlens, seed, output, statistics, *ctx.options)
    return dqkv, None, None, None, None, None


def _refuse_second_derivative(ctx, *gradients):
    raise RuntimeError(
        "torch.ops.apex.attention_forward and packed_attention_forward have a first derivative only; "
        "apex.ops.attention.attention and packed_attention have a second one"
    )


_library.register_op(
    "attention_forward(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, float inf) "
    "-> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    backward=_op_backward,
    setup_context=_setup_context,
)
_library.register_op(
    "attention_backward(Tensor dout, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, "
    "Tensor output, Tensor statistics, float inf, bool bias_grad) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    backward=_refuse_second_derivative,
    setup_context=lambda ctx, inputs, output: None,
)
_library.register_op(
    "packed_attention_forward(Tensor qkv, Tensor cu_seqlens, Tensor? seed, int max_seqlen, float dropout_p, "
    "bool zero_tail) -> (Tensor, Tensor)",
    _packed_forward,
    _packed_forward_fake,
    backward=_packed_op_backward,
    setup_context=_packed_setup_context,
)
_library.register_op(
    "packed_attention_backward(Tensor dout, Tensor qkv, Tensor cu_seqlens, Tensor? seed, Tensor output, "
    "Tensor statistics, int max_seqlen, float dropout_p, bool zero_tail) -> Tensor",
    packed.backward,
    _packed_backward_fake,
    backward=_refuse_second_derivative,
    setup_context=lambda ctx, inputs, output: None,
)
