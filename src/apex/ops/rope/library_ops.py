"""`torch.ops.apex.rope` and `rope_pair`: what `torch.compile` sees of rotary position embeddings."""

from __future__ import annotations

import torch

from .. import _library
from .op import rotate_now, rotate_pair_now
from .spec import RopeSpec, empty_result, memory_is_swapped


def _rope(t, tables, cu_seqlens, layout, swap_memory, inverse, width):
    return rotate_now(t, tables, RopeSpec(layout, swap_memory, inverse, width), cu_seqlens)


def _rope_fake(t, tables, cu_seqlens, layout, swap_memory, inverse, width):
    return empty_result(t, swap_memory)


def _setup_context(ctx, inputs, output):
    t, tables, cu_seqlens, layout, _, inverse, width = inputs
    ctx.save_for_backward(cu_seqlens, *tables)
    ctx.arguments = (layout, memory_is_swapped(t), not inverse, width)


def _backward(ctx, dy):
    cu_seqlens, *tables = ctx.saved_tensors
    gradient = torch.ops.apex.rope(dy, tables, cu_seqlens, *ctx.arguments)
    return gradient, [None] * len(tables), None, None, None, None, None


def _rope_pair(query, key, tables, cu_seqlens, layout, swap_memory, inverse, width):
    return rotate_pair_now(query, key, tables, RopeSpec(layout, swap_memory, inverse, width), cu_seqlens)


def _rope_pair_fake(query, key, tables, cu_seqlens, layout, swap_memory, inverse, width):
    return empty_result(query, swap_memory), empty_result(key, swap_memory)


def _pair_setup_context(ctx, inputs, output):
    query, key, tables, cu_seqlens, layout, _, inverse, width = inputs
    ctx.save_for_backward(cu_seqlens, *tables)
    ctx.arguments = (layout, memory_is_swapped(query) and memory_is_swapped(key), not inverse, width)


def _pair_backward(ctx, dquery, dkey):
    cu_seqlens, *tables = ctx.saved_tensors
    gradients = torch.ops.apex.rope_pair(dquery, dkey, tables, cu_seqlens, *ctx.arguments)
    return *gradients, [None] * len(tables), None, None, None, None, None


_REST = "Tensor[] tables, Tensor? cu_seqlens, str layout, bool swap_memory, bool inverse, int width"
_library.register_op(
    f"rope(Tensor t, {_REST}) -> Tensor", _rope, _rope_fake, backward=_backward, setup_context=_setup_context
)
_library.register_op(
    f"rope_pair(Tensor query, Tensor key, {_REST}) -> (Tensor, Tensor)",
    _rope_pair,
    _rope_pair_fake,
    backward=_pair_backward,
    setup_context=_pair_setup_context,
)
