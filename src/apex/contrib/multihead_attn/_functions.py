"""Upstream's autograd Functions of multihead attention, which take their arguments by position.

Sequences are [length, batch, embedding]. `mask` is [queries, keys] with `use_time_mask`, else [batch, keys]; nonzero
hides a key, or with an additive mask the values are added to the logits. There is dropout only if `is_training`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops import multihead
from ...ops._library import cast_for_autocast, once_differentiable
from ...ops.multihead import explicit

# Step by step, with a backward pass from what each step left.


def _forward(ctx: Any, inputs: int, given: Sequence[Any], cover: Any, *settings: Any) -> Tensor:
    """Attention of so many inputs, which come first among the tensors given, then weights, then biases or None."""
    heads, scale, dropout = settings
    tensors, weights = cast_for_autocast(*given), 2 * inputs + 1
    parameters = tensors[:inputs], tensors[inputs:weights], tensors[weights:]
    outputs, packed, core = explicit.forward(*parameters, mask=cover, heads=heads, scale=scale, dropout=dropout)
    ctx.save_for_backward(*tensors[:weights], *packed, core.context, core.probabilities, core.dropped, core.noise)
    ctx.settings = inputs, (*settings, given[weights] is not None)
    return outputs


def _backward(ctx: Any, output_grads: Tensor) -> tuple[Tensor | None, ...]:
    inputs, settings = ctx.settings
    saved, weights = ctx.saved_tensors, 2 * inputs + 1
    given = saved[:inputs], saved[inputs:weights], saved[weights:-4], saved[-4:]
    return explicit.backward(output_grads, *given, settings)


class SelfAttnFunc(torch.autograd.Function):
    """(use_time_mask, is_training, heads, scale, inputs, input_weights, output_weights, input_biases, output_biases,
    mask, is_additive_mask, dropout_prob): self attention with both projections; biases may be None."""

    @staticmethod
    def forward(ctx, use_time_mask, is_training, heads, scale, *arguments) -> Tensor:  # type: ignore[override]
        *given, mask, is_additive_mask, dropout_prob = arguments
        cover = multihead.make_mask(mask, use_time_mask, is_additive_mask)
        return _forward(ctx, 1, given, cover, heads, scale, dropout_prob if is_training else 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, output_grads: Tensor):  # type: ignore[override]
        return None, None, None, None, *_backward(ctx, output_grads), None, None, None


class EncdecAttnFunc(torch.autograd.Function):
    """(use_time_mask, is_training, heads, scale, inputs_q, inputs_kv, input_weights_q, input_weights_kv,
    output_weights, input_biases_q, input_biases_kv, output_biases, mask, dropout_prob): attention of `inputs_q` to
    `inputs_kv` with all projections; biases may be None."""

    @staticmethod
    def forward(ctx, use_time_mask, is_training, heads, scale, *arguments) -> Tensor:  # type: ignore[override]
        *given, mask, dropout_prob = arguments
        cover = multihead.make_mask(mask, use_time_mask, additive=False)
        return _forward(ctx, 2, given, cover, heads, scale, dropout_prob if is_training else 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, output_grads: Tensor):  # type: ignore[override]
        return None, None, None, None, *_backward(ctx, output_grads), None, None


# Through PyTorch's fused attention, which has its own derivative; the logits are never stored.


class _FastFunction(torch.autograd.Function):
    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        wanted = [leaf for leaf in ctx.leaves if leaf is not None and leaf.requires_grad]
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        found = iter(torch.autograd.grad(ctx.output, wanted, gradient, retain_graph=keep))
        gradients = [next(found) if leaf is not None and leaf.requires_grad else None for leaf in ctx.leaves]
        return None, None, None, *gradients, *(None,) * (len(ctx.needs_input_grad) - 3 - len(gradients))


def _fast_forward(ctx, inputs, use_time_mask, is_training, heads, *arguments, norm=False, additive=False) -> Tensor:  # type: ignore[no-untyped-def]
    """Attention of so many inputs, keeping the graph that leads back to the tensors that want a gradient.

    The tensors are the inputs, weight and bias of a layer norm if it has a `norm`, then weights and biases.
    """
    *tensors, pad_mask, dropout_prob = arguments
    mask = multihead.make_mask(pad_mask, use_time_mask, additive)
    wanted = ctx.needs_input_grad[3 : 3 + len(tensors)]
    leaves = [None if t is None else t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
    first = inputs + 2 * norm
    options = {"heads": heads, "mask": mask, "dropout": dropout_prob if is_training else 0.0}
    parameters = leaves[first : first + inputs + 1], leaves[first + inputs + 1 :]
    with torch.enable_grad():
        ctx.output = multihead.attention(leaves[:inputs], *parameters, norm=leaves[inputs:first], **options)  # type: ignore[arg-type]
    ctx.leaves = leaves
    return ctx.output.detach()


class FastSelfAttnFunc(_FastFunction):
    """(use_time_mask, is_training, heads, inputs, input_weights, output_weights, input_biases, output_biases, pad_mask,
    mask_additive, dropout_prob): as `SelfAttnFunc` with the scale of the head's size."""

    @staticmethod
    def forward(ctx, *arguments) -> Tensor:  # type: ignore[override]
        *given, mask_additive, dropout_prob = arguments
        return _fast_forward(ctx, 1, *given, dropout_prob, additive=mask_additive)


class FastSelfAttnNormAddFunc(_FastFunction):
    """(use_time_mask, is_training, heads, inputs, lyr_nrm_gamma_weights, lyr_nrm_beta_weights, input_weights,
    output_weights, pad_mask, dropout_prob): `inputs` + dropout(`FastSelfAttnFunc` of their layer norm)."""

    @staticmethod
    def forward(ctx, *arguments) -> Tensor:  # type: ignore[override]
        return _fast_forward(ctx, 1, *arguments, norm=True)


class FastEncdecAttnFunc(_FastFunction):
    """(use_time_mask, is_training, heads, inputs_q, inputs_kv, input_weights_q, input_weights_kv, output_weights,
    pad_mask, dropout_prob): as `EncdecAttnFunc` with the scale of the head's size and without biases."""

    @staticmethod
    def forward(ctx, *arguments) -> Tensor:  # type: ignore[override]
        return _fast_forward(ctx, 2, *arguments)


class FastEncdecAttnNormAddFunc(_FastFunction):
    """(use_time_mask, is_training, heads, inputs_q, inputs_kv, lyr_nrm_gamma_weights, lyr_nrm_beta_weights,
    input_weights_q, input_weights_kv, output_weights, pad_mask, dropout_prob):
    `inputs_q` + dropout(`FastEncdecAttnFunc` of their layer norm to `inputs_kv`)."""

    @staticmethod
    def forward(ctx, *arguments) -> Tensor:  # type: ignore[override]
        return _fast_forward(ctx, 2, *arguments, norm=True)
