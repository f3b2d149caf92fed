"""Rotary position embeddings: dispatch, autograd, and the functions that the public modules call."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import check_floats, check_optional_tensors, check_tensors
from . import native, reference
from .launches import Plan, plan
from .self_check import self_check
from .spec import TABLE_NAMES, RopeSpec, checked_sizes, memory_is_swapped, signature, way_back

FAMILY = _library.register_family(
    _library.OpFamily("rope", "rotary position embeddings, forward and backward", self_check)
)


def rotary_embedding(
    t: Tensor,
    freqs: Tensor | tuple[Tensor, Tensor],
    *,
    tensor_format: str = "sbhd",
    cu_seqlens: Tensor | None = None,
    transpose_output_memory: bool = False,
) -> Tensor:
    """`t` with the first r channels of every head rotated by the angles of its token, the others copied.

    `t` is [s, b, h, d], [b, s, h, d] (`tensor_format="bshd"`), or [t, h, d] where sequences are packed and token
    `cu_seqlens[i]` is the first one of sequence i. `freqs` are the angles [s, 1, 1, r], or a pair of their cosines and
    sines; with `cu_seqlens` as many rows as the longest sequence has tokens. They get no gradient.
    """
    tables, spec = _arguments(freqs, tensor_format, cu_seqlens, transpose_output_memory)
    return rotate(t, tables, spec, cu_seqlens)


def rotary_embedding_pair(
    query: Tensor,
    key: Tensor,
    freqs: Tensor | tuple[Tensor, Tensor],
    *,
    tensor_format: str = "sbhd",
    cu_seqlens: Tensor | None = None,
    transpose_output_memory: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rotary_embedding` of a query and a key, which may differ in heads, with one launch for both."""
    tables, spec = _arguments(freqs, tensor_format, cu_seqlens, transpose_output_memory)
    return rotate_pair(query, key, tables, spec, cu_seqlens)


def _arguments(
    freqs: Tensor | tuple[Tensor, Tensor], tensor_format: str, cu_seqlens: Tensor | None, transpose_output_memory: bool
) -> tuple[tuple[Tensor, ...], RopeSpec]:
    if tensor_format not in ("sbhd", "bshd"):
        raise ValueError(f"tensor_format={tensor_format!r} is not known; use sbhd or bshd")
    if cu_seqlens is not None and transpose_output_memory:
        raise ValueError("transpose_output_memory=True is for [s, b, h, d] and [b, s, h, d], not packed sequences")
    tables = tuple(freqs) if isinstance(freqs, tuple | list) and len(freqs) == 2 else (freqs,)
    return tables, RopeSpec(tensor_format if cu_seqlens is None else "thd", transpose_output_memory)


def rotate(t: Tensor, tables: tuple[Tensor, ...], spec: RopeSpec, cu_seqlens: Tensor | None = None) -> Tensor:
    """The rotation of `t`, differentiable with respect to it as often as you like."""
    if not (isinstance(t, Tensor) and all(isinstance(table, Tensor) for table in tables)):
        check_tensors(t=t, **dict(zip(TABLE_NAMES[len(tables)], tables, strict=True)))
    check_optional_tensors(cu_seqlens=cu_seqlens)
    if torch.compiler.is_compiling():
        return torch.ops.apex.rope(t, list(tables), cu_seqlens, *spec)
    if t.requires_grad and torch.is_grad_enabled():
        if native.takes_operators(t, spec) and not _library.runs_triton(FAMILY, t):
            _check(t, tables, spec, cu_seqlens)
            native.check_lengths(tables[0], cu_seqlens)
            _warn_of_gradients(tables)
            return reference.rotate(t, [table.detach() for table in tables], spec, cu_seqlens)
        return _apply_node(t, spec, cu_seqlens, *tables)
    return rotate_now(t, tables, spec, cu_seqlens)


def rotate_pair(
    query: Tensor, key: Tensor, tables: tuple[Tensor, ...], spec: RopeSpec, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`rotate` for two tensors with the same tables."""
    check_floats(query=query, key=key)
    check_tensors(**dict(zip(TABLE_NAMES[len(tables)], tables, strict=True)))
    check_optional_tensors(cu_seqlens=cu_seqlens)
    if torch.compiler.is_compiling():
        return torch.ops.apex.rope_pair(query, key, list(tables), cu_seqlens, *spec)
    if (query.requires_grad or key.requires_grad) and torch.is_grad_enabled():
        return _apply_pair_node(query, key, spec, cu_seqlens, *tables)
    return rotate_pair_now(query, key, tables, spec, cu_seqlens)


def _planned(
    tensors: tuple[Tensor, ...], tables: Sequence[Tensor], spec: RopeSpec, cu_seqlens: Tensor | None
) -> Plan | None:
    """The launch for these tensors; None where there is no kernel for them."""
    first = tensors[0]
    if not _library.runs_triton(FAMILY, first) or torch.jit.is_tracing():
        return None
    for other in tensors[1:]:
        if other.dtype != first.dtype or other.device != first.device or type(other) is not type(first):
            return None
    return plan(tensors, tables, spec, cu_seqlens)


def rotate_now(t: Tensor, tables: Sequence[Tensor], spec: RopeSpec, cu_seqlens: Tensor | None = None) -> Tensor:
    """The rotation without autograd."""
    planned = _planned((t,), tables, spec, cu_seqlens)
    if planned is not None:
        return planned.run((t,), tables, cu_seqlens)[0]
    with torch.no_grad():
        return _by_operators(t, tables, spec, cu_seqlens)


def rotate_pair_now(
    query: Tensor, key: Tensor, tables: Sequence[Tensor], spec: RopeSpec, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The rotation of two tensors without autograd."""
    planned = _planned((query, key), tables, spec, cu_seqlens)
    if planned is not None:
        first, second = planned.run((query, key), tables, cu_seqlens)
        return first, second
    return rotate_now(query, tables, spec, cu_seqlens), rotate_now(key, tables, spec, cu_seqlens)


def _by_operators(t: Tensor, tables: Sequence[Tensor], spec: RopeSpec, cu_seqlens: Tensor | None) -> Tensor:
    """The rotation where there is no kernel and autograd is off."""
    if torch.jit.is_tracing():  # sizes are tensors then
        return reference.rotate(t, tables, spec, cu_seqlens)
    _check(t, tables, spec, cu_seqlens)
    if type(t) is not Tensor and type(t) is not torch.nn.Parameter:  # DTensor and the like
        return reference.rotate(t, tables, spec, cu_seqlens)
    return native.rotate(t, tables, spec, cu_seqlens)


def _check(t: Tensor, tables: Sequence[Tensor], spec: RopeSpec, cu_seqlens: Tensor | None) -> None:
    edges = None if cu_seqlens is None else signature(cu_seqlens)
    checked_sizes(signature(t), tuple([signature(table) for table in tables]), edges, spec)


def forward_and_save(
    ctx: Any, t: Tensor, tables: tuple[Tensor, ...], spec: RopeSpec, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The forward of every autograd Function of one tensor."""
    if torch.compiler.is_compiling():
        tables = _save(ctx, (t,), tables, spec, cu_seqlens)
        return torch.ops.apex.rope(t, list(tables), cu_seqlens, *spec)
    planned = _planned((t,), tables, spec, cu_seqlens)
    tables = _save(ctx, (t,), tables, spec, cu_seqlens, planned)
    if planned is not None:
        return planned.run((t,), tables, cu_seqlens)[0]
    return _by_operators(t, tables, spec, cu_seqlens)


def backward_from_saved(ctx: Any, dy: Tensor) -> Tensor:
    """The backward of every autograd Function of one tensor: a gradient laid out in memory as the input was."""
    cu_seqlens, *tables = ctx.saved_tensors
    back, strides = ctx.back
    if back is not None and (dy.stride(),) == strides and not torch.is_grad_enabled():
        return back.run((dy,), tables, cu_seqlens)[0]
    if back is None and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _by_operators(dy, tables, ctx.specs[0], cu_seqlens)
    return rotate(dy, tuple(tables), ctx.specs[0], cu_seqlens)


def _save(
    ctx: Any,
    tensors: tuple[Tensor, ...],
    tables: tuple[Tensor, ...],
    spec: RopeSpec,
    cu_seqlens: Tensor | None,
    planned: Plan | None = None,
) -> tuple[Tensor, ...]:
    """Saves what the way back needs, and returns the tables to use: operators would compute cosines a second time."""
    _warn_of_gradients(tables)
    # Planned here, for gradients laid out as the results are: autograd's thread is slow at Python.
    ctx.back = (None, None) if planned is None else (planned.inverse, planned.result_strides)
    if (
        planned is None
        and len(tables) == 1
        and not torch.compiler.is_compiling()
        and not _library.runs_triton(FAMILY, tensors[0])
    ):
        _check(tensors[0], tables, spec, cu_seqlens)
        tables = tuple(reference.as_cosines(tables, reference.compute_dtype(tensors[0])))
    ctx.save_for_backward(cu_seqlens, *tables)
    if planned is not None:
        ctx.specs = planned.inverse_specs
    elif torch.compiler.is_compiling():  # which warns of caches
        ctx.specs = [way_back.__wrapped__(spec, memory_is_swapped(t)) for t in tensors]
    else:
        ctx.specs = [way_back(spec, memory_is_swapped(t)) for t in tensors]
    return tables


def _warn_of_gradients(tables: Sequence[Tensor]) -> None:
    if not torch.compiler.is_compiling() and any(table.requires_grad for table in tables):
        warnings.warn(
            "rotary position embeddings give no gradient to their frequencies, although these require one: detach "
            "them, or compute the embedding from PyTorch operators",
            stacklevel=4,
        )


class RotateFunction(torch.autograd.Function):
    """The autograd node behind `rotate`."""

    @staticmethod
    def forward(ctx, t, spec, cu_seqlens, *tables):  # type: ignore[override]
        return forward_and_save(ctx, t, tables, spec, cu_seqlens)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        return (backward_from_saved(ctx, dy), *(None,) * (len(ctx.needs_input_grad) - 1))


_apply_node = _library.quick_apply(RotateFunction)


class RotatePairFunction(torch.autograd.Function):
    """The autograd node behind `rotate_pair`."""

    @staticmethod
    def forward(ctx, query, key, spec, cu_seqlens, *tables):  # type: ignore[override]
        planned = _planned((query, key), tables, spec, cu_seqlens)
        tables = _save(ctx, (query, key), tables, spec, cu_seqlens, planned)
        ctx.set_materialize_grads(False)
        if planned is not None:
            return tuple(planned.run((query, key), tables, cu_seqlens))
        return rotate_pair_now(query, key, tables, spec, cu_seqlens)

    @staticmethod
    def backward(ctx, dquery, dkey):  # type: ignore[override]
        cu_seqlens, *saved = ctx.saved_tensors
        tables, (first, second) = tuple(saved), ctx.specs
        wanted = ctx.needs_input_grad
        if dquery is not None and dkey is not None and wanted[0] and wanted[1] and first == second:
            back, strides = ctx.back
            if back is not None and (dquery.stride(), dkey.stride()) == strides and not torch.is_grad_enabled():
                dquery, dkey = back.run((dquery, dkey), tables, cu_seqlens)
            else:
                dquery, dkey = rotate_pair(dquery, dkey, tables, first, cu_seqlens)
        else:
            dquery = rotate(dquery, tables, first, cu_seqlens) if wanted[0] and dquery is not None else None
            dkey = rotate(dkey, tables, second, cu_seqlens) if wanted[1] and dkey is not None else None
        return (dquery, dkey, *(None,) * (len(wanted) - 2))


_apply_pair_node = _library.quick_apply(RotatePairFunction)
