"""Multihead attention step by step, keeping every intermediate result: what upstream's functions compute and return.

Letters: S queries, T keys, B batches, H heads, D the size of a head, E = H * D. Nothing here is recorded by autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import softmax
from .._library import autocast_dtype
from .checks import check_encdec, check_self
from .masks import Mask, broadcastable, check_mask


def in_autocast_dtype(*tensors: Tensor | None) -> Any:
    """The tensors as autocast would hand them to a matrix product, so that the backward pass has one dtype."""
    dtype = autocast_dtype(next(tensor for tensor in tensors if tensor is not None))
    if dtype is None:
        return tensors
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)


class Core(NamedTuple):
    """Results of attention proper: [B*H, S, T] but for the context [S, B*H, D].

    `dropped` are the probabilities after dropout; `noise` is what `apex.ops.softmax` drew for it, if anything.
    """

    logits: Tensor
    probabilities: Tensor
    dropped: Tensor
    noise: Tensor | None
    context: Tensor

    def kept(self, dropout: float) -> Tensor:
        return kept_bytes(self.noise, self.probabilities, dropout)


def kept_bytes(noise: Tensor | None, probabilities: Tensor, dropout: float) -> Tensor:
    """Upstream's dropout mask: bytes, 1 where kept; without elements where nothing was drawn."""
    shape = (-1, *probabilities.shape[-2:])
    if noise is None:
        return probabilities.new_empty((0, *shape[1:]), dtype=torch.uint8)
    return softmax.keep_mask(noise, probabilities, softmax.SoftmaxSpec(dropout=dropout)).view(shape)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, heads: int, scale: float, mask: Mask | None, dropout: float
) -> Core:
    """Queries [S, B*H, D], keys and values [T, B*H, D]."""
    length, batch_heads, size = queries.shape
    batch = batch_heads // heads
    check_mask(mask, length, keys.shape[0], batch, queries.device)
    logits = queries.new_empty((batch_heads, length, keys.shape[0]))
    _multiply_into(logits, queries.transpose(0, 1), keys.permute(1, 2, 0), scale)
    spec = softmax.SoftmaxSpec(dropout=dropout)
    by_batch = logits.view(batch, heads, *logits.shape[1:])
    noise = softmax.draw_noise(by_batch, spec)
    cover = broadcastable(mask, length, keys.shape[0], queries.device)
    dropped, probabilities = softmax.softmax_forward(by_batch, cover, spec, noise)
    dropped, probabilities = dropped.view(logits.shape), probabilities.view(logits.shape)
    context = queries.new_empty((length, batch_heads, size))
    _multiply_into(context.transpose(0, 1), dropped, values.transpose(0, 1))
    return Core(logits, probabilities, dropped, noise, context)


def attend_backward(
    gradient: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    probabilities: Tensor,
    dropped: Tensor,
    noise: Tensor | None,
    scale: float,
    dropout: float,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fills `into` with the gradients of queries, keys and values, given that of the context.

    `noise` may be the bytes that `Core.kept` gave.
    """
    gradient = gradient.reshape(queries.shape).transpose(0, 1)
    d_queries, d_keys, d_values = (part.transpose(0, 1) for part in into)
    _multiply_into(d_values, dropped.transpose(1, 2), gradient)
    d_dropped = torch.bmm(gradient, values.permute(1, 2, 0))
    d_logits = softmax_backward(d_dropped, probabilities, dropout, noise)
    _multiply_into(d_queries, d_logits, keys.transpose(0, 1), scale)
    _multiply_into(d_keys, d_logits.transpose(1, 2), queries.transpose(0, 1), scale)


def softmax_backward(gradient: Tensor, probabilities: Tensor, dropout: float, noise: Tensor | None) -> Tensor:
    """The gradient of the logits; `noise` is what was drawn, or bytes from `kept_bytes`."""
    if noise is None or not noise.numel():
        noise, dropout = None, 0.0
    elif noise.dtype != torch.int64:
        noise = noise.reshape(probabilities.shape)
    spec = softmax.SoftmaxSpec(dropout=dropout)
    return softmax.softmax_backward(gradient, probabilities, spec, noise)


def _multiply_into(result: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """result = scale * left @ right, matrix by matrix, written where the next step reads it, without a copy."""
    if torch.compiler.is_compiling():  # which takes no `out` with strides of its own
        result.copy_(torch.bmm(left, right) * scale)
    else:
        torch.baddbmm(result, left, right, beta=0, alpha=scale, out=result)


def linear_backward(
    gradient: Tensor, inputs: Tensor, weights: Tensor, biases: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of inputs, weights and, if there are any, biases."""
    rows = gradient.reshape(-1, weights.shape[0])
    d_inputs = torch.mm(rows, weights).view(inputs.shape)
    d_weights = torch.mm(rows.t(), inputs.reshape(-1, weights.shape[1]))
    return d_inputs, d_weights, rows.sum(0) if biases else None


def self_forward(
    inputs: Tensor, *parameters: Any, heads: int, scale: float, mask: Mask | None, dropout: float
) -> tuple[Tensor, Tensor, Core]:
    """Outputs, packed projections [S, B, 3E] and the core's results.

    `parameters` are the weights of inputs and of outputs, then their biases, which may be None.
    """
    input_weights, output_weights, input_biases, output_biases = parameters
    check_self(inputs, input_weights, output_weights, heads, dropout)
    packed = F.linear(inputs, input_weights, input_biases).contiguous()
    queries, keys, values = split(packed, heads, 3)
    core = attend(queries, keys, values, heads, scale, mask, dropout)
    return F.linear(core.context.view(inputs.shape), output_weights, output_biases), packed, core


def self_backward(gradient: Tensor, saved: Sequence[Any], settings: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Gradients of inputs, both weights and, if there are any, both biases.

    `saved` are inputs, both weights, packed projections, and of the core context, probabilities, dropped and noise;
    `settings` are heads, scale, dropout and whether there are biases.
    """
    inputs, input_weights, output_weights, packed, context, probabilities, dropped, noise = saved
    heads, scale, dropout, biases = settings
    d_context, d_output_weights, d_output_biases = linear_backward(gradient, context, output_weights, biases)
    d_packed = torch.empty_like(packed)
    (queries, keys, values), into = split(packed, heads, 3), split(d_packed, heads, 3)
    attend_backward(d_context, queries, keys, values, probabilities, dropped, noise, scale, dropout, into)
    d_inputs, d_input_weights, d_input_biases = linear_backward(d_packed, inputs, input_weights, biases)
    return d_inputs, d_input_weights, d_output_weights, d_input_biases, d_output_biases


def encdec_forward(
    inputs_q: Tensor, inputs_kv: Tensor, *parameters: Any, heads: int, scale: float, mask: Mask | None, dropout: float
) -> tuple[Tensor, Tensor, Tensor, Core]:
    """Outputs, projected queries [S, B, E], packed keys and values [T, B, 2E] and the core's results.

    `parameters` are the weights of queries, of keys and values and of outputs, then their biases, which may be None.
    """
    weights, (biases_q, biases_kv, output_biases) = parameters[:3], parameters[3:]
    check_encdec(inputs_q, inputs_kv, weights, heads, dropout)
    projected = F.linear(inputs_q, weights[0], biases_q).contiguous()
    packed = F.linear(inputs_kv, weights[1], biases_kv).contiguous()
    (queries,), (keys, values) = split(projected, heads, 1), split(packed, heads, 2)
    core = attend(queries, keys, values, heads, scale, mask, dropout)
    return F.linear(core.context.view(inputs_q.shape), weights[2], output_biases), projected, packed, core


def encdec_backward(gradient: Tensor, saved: Sequence[Any], settings: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Gradients of both inputs, the three weights and, if there are any, the three biases.

    `saved` are both inputs, the three weights, projected queries, packed keys and values, and of the core what
    `self_backward` takes; `settings` too.
    """
    inputs_q, inputs_kv, weights_q, weights_kv, output_weights, projected, packed, context, *core = saved
    probabilities, dropped, noise = core
    heads, scale, dropout, biases = settings
    d_context, d_output_weights, d_output_biases = linear_backward(gradient, context, output_weights, biases)
    d_projected, d_packed = torch.empty_like(projected), torch.empty_like(packed)
    (queries,), (keys, values) = split(projected, heads, 1), split(packed, heads, 2)
    into = (*split(d_projected, heads, 1), *split(d_packed, heads, 2))
    attend_backward(d_context, queries, keys, values, probabilities, dropped, noise, scale, dropout, into)
    d_inputs_q, d_weights_q, d_biases_q = linear_backward(d_projected, inputs_q, weights_q, biases)
    d_inputs_kv, d_weights_kv, d_biases_kv = linear_backward(d_packed, inputs_kv, weights_kv, biases)
    weights = d_weights_q, d_weights_kv, d_output_weights
    return d_inputs_q, d_inputs_kv, *weights, d_biases_q, d_biases_kv, d_output_biases


def split(packed: Tensor, heads: int, parts: int) -> Any:
    """Views [length, B*H, D] of each of the `parts` that lie beside each other per head."""
    length, batch, width = packed.shape
    return packed.view(length, batch * heads, parts, width // (parts * heads)).unbind(2)
