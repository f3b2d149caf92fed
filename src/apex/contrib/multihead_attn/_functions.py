"""Upstream's autograd Functions of multihead attention, which take their arguments by position.

Sequences are [length, batch, embedding]. `mask` is [queries, keys] with `use_time_mask`, else [batch, keys]. A nonzero
element hides a key; an additive mask is added to the logits instead. Dropout applies only if `is_training`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops import multihead
from ...ops._library import cast_for_autocast, once_differentiable
from ...ops.multihead import explicit

# Attention step by step, with a backward pass from the saved result of each step.


def _forward(ctx: Any, inputs: int, tensor_arguments: Sequence[Any], mask: Any, *settings: Any) -> Tensor:
    """Compute attention; `tensor_arguments` are `inputs` input tensors, then weights, then biases or None."""
    heads, scale, dropout = settings
    tensors, weights = cast_for_autocast(*tensor_arguments), 2 * inputs + 1
    parameters = tensors[:inputs], tensors[inputs:weights], tensors[weights:]
    outputs, packed, core = explicit.forward(*parameters, mask=mask, heads=heads, scale=scale, dropout=dropout)
    ctx.save_for_backward(*tensors[:weights], *packed, core.context, core.probabilities, core.dropped, core.noise)
    ctx.settings = inputs, (*settings, tensor_arguments[weights] is not None)
    return outputs


def _backward(ctx: Any, output_grads: Tensor) -> tuple[Tensor | None, ...]:
    inputs, settings = ctx.settings
    saved, weights = ctx.saved_tensors, 2 * inputs + 1
    groups = saved[:inputs], saved[inputs:weights], saved[weights:-4], saved[-4:]
    return explicit.backward(output_grads, *groups, settings)


class SelfAttnFunc(torch.autograd.Function):
    """The autograd node of self attention with both projections; biases may be None.

    Arguments: (use_time_mask, is_training, heads, scale, inputs, input_weights, output_weights, input_biases,
    output_biases, mask, is_additive_mask, dropout_prob).
    """

    @staticmethod
    def forward(ctx, use_time_mask, is_training, heads, scale, *arguments) -> Tensor:  # type: ignore[override]
        *tensor_arguments, mask, is_additive_mask, dropout_prob = arguments
        cover = multihead.make_mask(mask, use_time_mask, is_additive_mask)
        return _forward(ctx, 1, tensor_arguments, cover, heads, scale, dropout_prob if is_training else 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, output_grads: Tensor):  # type: ignore[override]
        return None, None, None, None, *_backward(ctx, output_grads), None, None, None


class EncdecAttnFunc(torch.autograd.Function):
    """The autograd node of attention of `inputs_q` to `inputs_kv` with all projections; biases may be None.

    Arguments: (use_time_mask, is_training, heads, scale, inputs_q, inputs_kv, input_weights_q, input_weights_kv,
    output_weights, input_biases_q, input_biases_kv, output_biases, mask, dropout_prob).
    """

    @staticmethod
    def forward(ctx, use_time_mask, is_training, heads, scale, *arguments) -> Tensor:  # type: ignore[override]
        *tensor_arguments, mask, dropout_prob = arguments
        cover = multihead.make_mask(mask, use_time_mask, additive=False)
        return _forward(ctx, 2, tensor_arguments, cover, heads, scale, dropout_prob if is_training else 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, output_grads: Tensor):  # type: ignore[override]
        return None, None, None, None, *_backward(ctx, output_grads), None, None


# Attention by PyTorch's fused function, which has its own derivative and never stores the logits.


class _FastFunction(torch.autograd.Function):
    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        inputs = [leaf for leaf in ctx.leaves if leaf is not None and leaf.requires_grad]
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        results = iter(torch.autograd.grad(ctx.output, inputs, gradient, retain_graph=keep))
        gradients = [next(results) if leaf is not None and leaf.requires_grad else None for leaf in ctx.leaves]
        return None, None, None, *gradients, *(None,) * (len(ctx.needs_input_grad) - 3 - len(gradients))


def _fast_forward(ctx, inputs, use_time_mask, is_training, heads, *arguments, norm=False, additive=False) -> Tensor:  # type: ignore[no-untyped-def]
    """Compute attention of `inputs` input tensors and keep the autograd graph for the backward pass.

    The tensors are the inputs, weight and bias of the layer norm if `norm`, the weights, and the biases.
    """
    *tensors, pad_mask, dropout_prob = arguments
    mask = multihead.make_mask(pad_mask, use_time_mask, additive)
    needs_grad = ctx.needs_input_grad[3 : 3 + len(tensors)]
    leaves = [None if t is None else t.detach().requires_grad_(w) for t, w in zip(tensors, needs_grad, strict=True)]
    first = inputs + 2 * norm
    options = {"heads": heads, "mask": mask, "dropout": dropout_prob if is_training else 0.0}
    parameters = leaves[first : first + inputs + 1], leaves[first + inputs + 1 :]
    with torch.enable_grad():
        ctx.output = multihead.attention(leaves[:inputs], *parameters, norm=leaves[inputs:first], **options)  # type: ignore[arg-type]
    ctx.leaves = leaves
    return ctx.output.detach()


class FastSelfAttnFunc(_FastFunction):
    """The autograd node of fused self attention: `SelfAttnFunc` with the scale 1 / sqrt(head size).

    Arguments: (use_time_mask, is_training, heads, inputs, input_weights, output_weights, input_biases, output_biases,
    pad_mask, mask_additive, dropout_prob).
    """

    @staticmethod
    def forward(ctx, *arguments) -> Tensor:  # type: ignore[override]
        *leading, mask_additive, dropout_prob = arguments
        return _fast_forward(ctx, 1, *leading, dropout_prob, additive=mask_additive)


class FastSelfAttnNormAddFunc(_FastFunction):
    """The autograd node of `inputs` + dropout(fused self attention of the layer norm of `inputs`).

    Arguments: (use_time_mask, is_training, heads, inputs, lyr_nrm_gamma_weights, lyr_nrm_beta_weights, input_weights,
    output_weights, pad_mask, dropout_prob).
    """

    @staticmethod
    def forward(ctx, *arguments) -> Tensor:  # type: ignore[override]
        return _fast_forward(ctx, 1, *arguments, norm=True)


class FastEncdecAttnFunc(_FastFunction):
    """The autograd node of fused attention to another sequence: `EncdecAttnFunc` without biases.

    The scale is 1 / sqrt(head size). Arguments: (use_time_mask, is_training, heads, inputs_q, inputs_kv,
    input_weights_q, input_weights_kv, output_weights, pad_mask, dropout_prob).
    """

    @staticmethod
    def forward(ctx, *arguments) -> Tensor:  # type: ignore[override]
        return _fast_forward(ctx, 2, *arguments)


class FastEncdecAttnNormAddFunc(_FastFunction):
    """The autograd node of `inputs_q` + dropout(fused attention of the layer norm of `inputs_q` to `inputs_kv`).

    Arguments: (use_time_mask, is_training, heads, inputs_q, inputs_kv, lyr_nrm_gamma_weights, lyr_nrm_beta_weights,
    input_weights_q, input_weights_kv, output_weights, pad_mask, dropout_prob).
    """

    @staticmethod
    def forward(ctx, *arguments) -> Tensor:  # type: ignore[override]
        return _fast_forward(ctx, 2, *arguments, norm=True)
