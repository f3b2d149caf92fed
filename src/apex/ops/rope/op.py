"""Rotary position embeddings: of one tensor, or of a query and a key in one launch.

No `Op` declares the operator: it takes lists of tensors in any layout, saves only the tables for its backward pass, and
is its own derivative except for the sign of the angles.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import check_floats, check_optional_tensors, check_tensors, values_at_hand
from .._device import DeviceFacts, contiguous_strides, empty_on, facts, launch_rule
from . import config, reference
from .reference import TRANSPOSED_PAIRS, RopeSpec

kernels = _library.LazyModule(f"{__package__}.kernels")

Tensors = Sequence[Tensor]

# For each layout the dimension of tokens, of the batch (None if it has none) and of heads.
DIMENSIONS: dict[str, tuple[int, int | None, int]] = {
    "sbhd": (0, 1, 2),
    "bshd": (1, 0, 2),
    "thd": (0, None, 1),
    "image": (1, 0, 2),
}
# Names of the tables in errors, by their number.
TABLE_NAMES = {1: ("freqs",), 2: ("cos_", "sin_"), 4: ("cos_h", "sin_h", "cos_w", "sin_w")}
# Kernel arguments for absent tables, of up to four, by the number of given ones.
_ABSENT = {count: (None,) * (4 - count) for count in TABLE_NAMES}


def rotary_embedding(
    t: Tensor,
    freqs: Tensor | tuple[Tensor, Tensor],
    *,
    tensor_format: str = "sbhd",
    cu_seqlens: Tensor | None = None,
    transpose_output_memory: bool = False,
) -> Tensor:
    """Return `t` with the first r channels of every head rotated by the angles of its token; copies the others.

    `t` is [s, b, h, d], [b, s, h, d] (`tensor_format="bshd"`), or [t, h, d] if sequences are packed and token
    `cu_seqlens[i]` is the first one of sequence i. `freqs` are the angles [s, 1, 1, r], or a pair of their cosines and
    sines; with `cu_seqlens` they need as many rows as the longest sequence has tokens. They get no gradient.
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
    pairs: str = "halves",
) -> tuple[Tensor, Tensor]:
    """Return `rotary_embedding` of a query and a key, which may differ in heads, with one launch for both.

    `pairs` says how the two channels of a pair lie: "halves", "neighbours", or "neighbours to halves" (neighbours in
    the input, halves in the result). Tables are in halves. Packed sequences are in halves.
    """
    if pairs not in TRANSPOSED_PAIRS or (cu_seqlens is not None and pairs != "halves"):
        expected = list(TRANSPOSED_PAIRS)[: 1 if cu_seqlens is not None else None]
        raise ValueError(f"pairs={pairs!r} is not known here; use one of {', '.join(expected)}")
    tables, spec = _arguments(freqs, tensor_format, cu_seqlens, transpose_output_memory)
    spec = RopeSpec(spec.layout, spec.swap_memory, pairs=pairs)
    check_floats(query=query, key=key)
    dimensions = 4 if cu_seqlens is None else 3
    if query.dim() != dimensions or key.dim() != dimensions:
        shapes = list(query.shape), list(key.shape)
        raise ValueError(f"query and key must have {dimensions} dimensions, got shapes {shapes[0]} and {shapes[1]}")
    first, second = _rotate((query, key), tables, spec, cu_seqlens)
    return first, second


def _arguments(
    freqs: Tensor | tuple[Tensor, Tensor], tensor_format: str, cu_seqlens: Tensor | None, transpose_output_memory: bool
) -> tuple[tuple[Tensor, ...], RopeSpec]:
    if tensor_format not in ("sbhd", "bshd"):
        raise ValueError(f"tensor_format={tensor_format!r} is not known; use sbhd or bshd")
    if cu_seqlens is not None and transpose_output_memory:
        raise ValueError("transpose_output_memory=True is for [s, b, h, d] and [b, s, h, d], not packed sequences")
    tables = tuple(freqs) if isinstance(freqs, (tuple, list)) and len(freqs) == 2 else (freqs,)
    return tables, RopeSpec(tensor_format if cu_seqlens is None else "thd", transpose_output_memory)


def rotate(t: Tensor, tables: tuple[Tensor, ...], spec: RopeSpec, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return the rotation of `t`, differentiable any number of times."""
    if not isinstance(t, Tensor):
        check_tensors(t=t)
    return _rotate((t,), tables, spec, cu_seqlens)[0]


def rotate_now(t: Tensor, tables: tuple[Tensor, ...], spec: RopeSpec, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return the rotation of `t` without autograd."""
    with torch.no_grad():
        return rotate(t, tables, spec, cu_seqlens)


def _rotate(tensors: Tensors, tables: Tensors, spec: RopeSpec, cu_seqlens: Tensor | None) -> Tensors:
    """Return differentiable rotations by the same tables."""
    for table in tables:
        if not isinstance(table, Tensor):
            check_tensors(**dict(zip(TABLE_NAMES[len(tables)], tables, strict=True)))
    if cu_seqlens is not None:
        check_optional_tensors(cu_seqlens=cu_seqlens)
    is_compiling = torch.compiler.is_compiling()
    if is_compiling and (spec.layout in ("thd", "image") or _library.runs_triton(FAMILY, tensors[0])):
        return _as_operator(tensors, tables, spec, cu_seqlens)
    if is_compiling or _library.sees_operators_only():
        if not torch.jit.is_tracing():  # tracing makes sizes tensors
            for t in tensors:
                _check(t, tables, spec, cu_seqlens)
        return _by_operators(tensors, tables, spec, cu_seqlens)
    if torch.is_grad_enabled() and (tensors[0].requires_grad or tensors[-1].requires_grad):
        return _RotateFunction.apply((tables, spec, cu_seqlens), *tensors)
    return _run(tensors, tables, spec, cu_seqlens, checked=False)


def _as_operator(tensors: Tensors, tables: Tensors, spec: RopeSpec, cu_seqlens: Tensor | None) -> Tensors:
    """Return rotations by the operator that torch.compile does not decompose."""
    return torch.ops.apex.rope(list(tensors), list(tables), cu_seqlens, *spec)


def _run(
    tensors: Tensors, tables: Tensors, spec: RopeSpec, cu_seqlens: Tensor | None, checked: bool = True
) -> list[Tensor]:
    """Return rotations without autograd; check the arguments unless they are `checked`."""
    first = tensors[0]
    if not checked:
        _check(first, tables, spec, cu_seqlens)
    if len(tensors) == 2 and not _differ_in_heads_alone(first, tensors[1], DIMENSIONS[spec.layout][2]):
        return [_run((t,), tables, spec, cu_seqlens, checked)[0] for t in tensors]
    is_empty = not first.numel() or not tensors[-1].numel()
    if _library.runs_triton_now(FAMILY, first) and not is_empty and first.shape[-1] <= config.LONGEST_ROW:
        return launch(tensors, tables, spec, cu_seqlens)
    with torch.no_grad():
        return _by_operators(tensors, tables, spec, cu_seqlens)


def _differ_in_heads_alone(query: Tensor, key: Tensor, head_dim: int) -> bool:
    if query.dtype != key.dtype or query.device != key.device or type(query) is not type(key):
        return False
    return query.shape == (*key.shape[:head_dim], query.shape[head_dim], *key.shape[head_dim + 1 :])


def _by_operators(tensors: Tensors, tables: Tensors, spec: RopeSpec, cu_seqlens: Tensor | None) -> list[Tensor]:
    if not torch.jit.is_tracing():
        _check_lengths(tables[0], cu_seqlens)
    tables = [table.detach() for table in tables]
    return [reference.rotate(t, tables, spec, cu_seqlens) for t in tensors]


def _check(t: Tensor, tables: Tensors, spec: RopeSpec, cu_seqlens: Tensor | None) -> None:
    """Raise for arguments that do not fit together."""
    shape, device, layout = t.shape, t.device, spec.layout
    if layout not in DIMENSIONS:
        raise ValueError(f"tensor_format={layout!r} is not known; use sbhd or bshd")
    token_dim, batch_dim, _ = DIMENSIONS[layout]
    if len(shape) != (3 if batch_dim is None else 4):
        letters = {"thd": "t, h, d", "image": "b, img_h * img_w, h, d"}.get(layout, ", ".join(layout))
        raise ValueError(f"t has shape {list(shape)}, expected [{letters}]")
    if not t.is_floating_point():
        raise TypeError(f"t must be floating-point, got {t.dtype}")
    names = TABLE_NAMES[len(tables)]
    for name, table in zip(names, tables, strict=True):
        if not table.is_floating_point():
            raise TypeError(f"{name} must be floating-point, got {table.dtype}")
        if hasattr(table, "device_mesh") != hasattr(t, "device_mesh"):
            which = f"{name} is" if hasattr(t, "device_mesh") else "t is"
            raise TypeError(f"{which} a plain tensor beside a DTensor; use torch.distributed.tensor.distribute_tensor")
        if table.device != device:
            raise ValueError(f"{name} is on {table.device}, t on {device}")
    for i in range(1, len(tables), 2):
        if tables[i].shape != tables[i - 1].shape:
            sizes, other_sizes = list(tables[i - 1].shape), list(tables[i].shape)
            raise ValueError(f"{names[i - 1]} has shape {sizes}, {names[i]} has {other_sizes}")
    if layout == "image":
        _check_image(shape, dict(zip(names, tables, strict=True)), spec.width)
    else:
        _check_table(shape, names[0], tables[0].shape, None if layout == "thd" else shape[token_dim])
    if layout == "thd":
        _check_edges(cu_seqlens, device)


def _check_table(t: torch.Size, name: str, shape: torch.Size, tokens: int | None) -> None:
    """Raise for a table of the wrong shape; `tokens` is its required number of rows, None if the data decide."""
    if len(shape) not in (2, 4) or (len(shape) == 4 and (shape[1] != 1 or shape[2] != 1)):
        raise ValueError(f"{name} has shape {list(shape)}, expected [positions, 1, 1, rotated channels]")
    if tokens is not None and shape[0] != tokens:
        raise ValueError(f"{name} has {shape[0]} positions, but t, of shape {list(t)}, has {tokens} tokens")
    if shape[-1] % 2 or not 0 < shape[-1] <= t[-1]:
        raise ValueError(
            f"{name} rotates {shape[-1]} channels, expected an even number from 2 to the {t[-1]} channels of t"
        )


def _check_image(t: torch.Size, tables: dict[str, Tensor], width: int) -> None:
    tokens, channels = t[1], t[-1]
    if width < 0 or (tokens and (width == 0 or tokens % width)):
        raise ValueError(f"img_w={width} does not divide the {tokens} tokens of t, whose shape is {list(t)}")
    if channels % 4 or not channels:
        raise ValueError(f"t has {channels} channels, a rotation in two dimensions needs a multiple of 4")
    height = tokens // width if tokens else 0
    for name, table in tables.items():
        shape, needed = table.shape, height if name.endswith("h") else width
        if len(shape) != 4 or shape[0] != 1 or shape[2] != 1 or shape[3] != channels // 2:
            raise ValueError(f"{name} has shape {list(shape)}, expected [1, positions, 1, {channels // 2}]")
        if shape[1] < needed:
            raise ValueError(f"{name} has {shape[1]} positions, the image needs {needed}")


def _check_edges(cu_seqlens: Tensor | None, device: torch.device) -> None:
    if cu_seqlens is None:
        raise ValueError("cu_seqlens is needed for packed sequences: the first token of each, then the number of all")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or not cu_seqlens.shape[0]:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}, expected [sequences + 1]")
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, t on {device}")


def _check_lengths(table: Tensor, cu_seqlens: Tensor | None) -> None:
    """Raise for sequences longer than the table, if the host can read the lengths without waiting for a device."""
    edges = None if cu_seqlens is None else values_at_hand(cu_seqlens)
    if not edges:
        return
    lengths = [end - start for start, end in pairwise(edges)]
    if edges[0] < 0 or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens={edges} must grow from zero or more")
    longest = max(lengths, default=0)
    if longest > table.shape[0]:
        raise ValueError(
            f"cu_seqlens has a sequence of {longest} tokens, the table of angles has {table.shape[0]} positions"
        )


def launch(tensors: Tensors, tables: Tensors, spec: RopeSpec, cu_seqlens: Tensor | None) -> list[Tensor]:
    """Rotate a tensor, or two that differ only in heads, by one launch."""
    first, device = tensors[0], tensors[0].device
    for table in tables:
        if table.dtype == torch.float64 or not table.is_contiguous():
            tables = _kernel_tables(tables)
            break
    if cu_seqlens is not None and not cu_seqlens.is_contiguous():
        cu_seqlens = cu_seqlens.contiguous()
    edges = spec.width if cu_seqlens is None else cu_seqlens.shape[0] - 1
    layouts = tuple([(t.shape, t.stride()) for t in tensors])
    dtype, empty = first.dtype, empty_on(device)
    dtypes = (None if cu_seqlens is None else cu_seqlens.dtype, dtype, *[table.dtype for table in tables])
    prepared, results = _prepared_launch(layouts, dtypes, spec, tables[0].shape, edges, device)
    outputs = [empty(shape, strides, dtype) for shape, strides in results]
    pair = (*tensors, *outputs) if len(tensors) == 2 else (first, None, outputs[0], None)
    prepared((*pair, *tables, *_ABSENT[len(tables)], cu_seqlens))
    return outputs


Side = tuple[torch.Size, tuple[int, ...], tuple[int, ...]]  # shape and strides of a tensor, strides of its result


@launch_rule
def _prepared_launch(
    given: tuple[tuple[torch.Size, tuple[int, ...]], ...],
    dtypes: tuple[Any, ...],
    spec: RopeSpec,
    table: torch.Size,
    edges: int,
    device: torch.device,
) -> tuple[Any, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Return the kernel for one or two tensors, `given` by shapes and strides, and shapes and strides of the results.

    `dtypes` belong to edges, tensors and tables; the first table has the shape `table`.
    """
    layout, here, itemsize = spec.layout, facts(device), dtypes[1].itemsize
    results = [(tuple(shape), _result_strides(tuple(shape), spec.swap_memory)) for shape, _ in given]
    sides: list[Side] = [(*each, strides) for each, (_, strides) in zip(given, results, strict=True)]
    shape = sides[0][0]
    constants = config.channel_constants(layout, len(dtypes) - 2, spec.inverse, shape[-1], table[-1], spec.pairs)
    sizes = (shape[DIMENSIONS[layout][0]], math.prod(table[:-1]), edges, edges.bit_length())
    programs, side, tile, num_warps = _side(sides[0], layout, itemsize, here)
    key_programs, key_side, key_tile, key_warps = 0, (1,) * len(side), tile, num_warps
    if len(sides) == 2:
        key_programs, key_side, key_tile, key_warps = _side(sides[1], layout, itemsize, here)
    launch = kernels.rope.prepare(
        (programs + key_programs,),
        (*sizes, programs, *side, *key_side),
        CHANNELS=constants,
        QUERY_TILE=tile,
        KEY_TILE=key_tile,
        num_warps=max(num_warps, key_warps),
    )
    return launch, results


def _result_strides(shape: tuple[int, ...], swap_memory: bool) -> tuple[int, ...]:
    """Return the strides of a contiguous result, or of one whose first two dimensions are swapped in memory."""
    if not swap_memory:
        return contiguous_strides(shape)
    outer, inner, *rest = contiguous_strides((shape[1], shape[0], *shape[2:]))
    return (inner, outer, *rest)


def _kernel_tables(tables: Tensors) -> list[Tensor]:
    """Return contiguous tables, in float32 if one is float64: cosines of float64 angles are then computed first."""
    if any(table.dtype == torch.float64 for table in tables):
        tables = (tables[0].cos(), tables[0].sin()) if len(tables) == 1 else tables
        tables = [table.to(torch.float32) for table in tables]
    return [table.contiguous() for table in tables]


def _side(
    side: Side, layout: str, itemsize: int, device: DeviceFacts
) -> tuple[int, tuple[int, ...], tuple[int, int, bool, int], int]:
    """Return one tensor's programs, its sizes and strides in kernel order, the TILE constant, and warps."""
    (shape, strides, out_strides), (token_dim, batch_dim, head_dim) = side, DIMENSIONS[layout]
    tokens, heads = shape[token_dim], shape[head_dim]
    batch, batch_stride, out_batch_stride = 1, 0, 0
    if batch_dim is not None:
        batch, batch_stride, out_batch_stride = shape[batch_dim], strides[batch_dim], out_strides[batch_dim]
    head_stride, out_head_stride = strides[head_dim], out_strides[head_dim]
    # Batch entries that follow each other in memory can be treated as more heads.
    if batch == 1 or (batch_stride == heads * head_stride and out_batch_stride == heads * out_head_stride):
        batch, heads, batch_stride, out_batch_stride = 1, batch * heads, 0, 0
    elif heads == 1:
        batch, heads, head_stride, out_head_stride = 1, batch, batch_stride, out_batch_stride
        batch_stride = out_batch_stride = 0
    tile = config.tile(tokens, heads, shape[-1], itemsize, layout == "image", device)
    source = (strides[token_dim], batch_stride, head_stride)
    target = (out_strides[token_dim], out_batch_stride, out_head_stride)
    unit, counted = config.strides_in_units((*source, *target))
    programs = -(-tokens // tile.tokens) * batch * -(-heads // tile.heads)
    numbers = (batch, heads, *counted[:3], strides[-1], *counted[3:])
    full = tokens % tile.tokens == 0 and heads % tile.heads == 0  # no token and no head needs a mask
    return programs, numbers, (tile.tokens, tile.heads, full, unit), tile.num_warps


def _empty_result(t: Tensor, swap_memory: bool) -> Tensor:
    """Allocate a result of the shape, dtype and device of `t`."""
    if swap_memory:
        return torch.empty_like(t.transpose(0, 1), memory_format=torch.contiguous_format).transpose(0, 1)
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _memory_is_swapped(t: Tensor) -> bool:
    """Return whether a tensor would be contiguous if its first two dimensions were swapped."""
    return t.dim() == 4 and not t.is_contiguous() and t.transpose(0, 1).is_contiguous()


def forward_and_save(
    ctx: Any, tensors: Tensors, tables: Tensors, spec: RopeSpec, cu_seqlens: Tensor | None = None
) -> Tensors:
    """Run as the forward of every autograd Function of rotations."""
    compiling = torch.compiler.is_compiling()
    if not compiling and True in [table.requires_grad for table in tables]:
        warnings.warn(
            "rotary position embeddings give no gradient to their frequencies, although these require one: detach "
            "them, or compute the embedding from PyTorch operators",
            stacklevel=4,
        )
    ctx.save_for_backward(cu_seqlens, *tables)
    # Specs of the gradients, which get the tensors' memory layout. PyTorch 2.6 cannot compile `_replace`.
    pairs = TRANSPOSED_PAIRS[spec.pairs]
    ctx.specs = [RopeSpec(spec.layout, _memory_is_swapped(t), not spec.inverse, spec.width, pairs) for t in tensors]
    if compiling:
        return _as_operator(tensors, tables, spec, cu_seqlens)
    return _run(tensors, tables, spec, cu_seqlens, checked=False)


def backward_from_saved(ctx: Any, *gradients: Tensor | None) -> list[Tensor | None]:
    """Run as the backward of a Function of rotations: return gradients in the inputs' memory layout, None for None."""
    cu_seqlens, *tables = ctx.saved_tensors
    rotate = _as_operator if torch.compiler.is_compiling() else _rotate if torch.is_grad_enabled() else _run
    specs = ctx.specs
    # In one launch, unless their memory layouts differ.
    if gradients[0] is not None and gradients[-1] is not None and specs[0] == specs[-1]:
        return list(rotate(gradients, tables, specs[0], cu_seqlens))  # type: ignore[arg-type]
    return [
        None if gradient is None else rotate((gradient,), tables, spec, cu_seqlens)[0]
        for gradient, spec in zip(gradients, specs, strict=True)
    ]


class _RotateFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, settings, *tensors):  # type: ignore[override]
        ctx.set_materialize_grads(False)
        return tuple(forward_and_save(ctx, tensors, *settings))

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[override]
        wanted = ctx.needs_input_grad[1:]
        if False in wanted:
            gradients = tuple([g if needed else None for g, needed in zip(gradients, wanted, strict=True)])
        return None, *backward_from_saved(ctx, *gradients)


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    tensors, tables, cu_seqlens, layout, _, inverse, width, pairs = inputs
    ctx.save_for_backward(cu_seqlens, *tables)
    ctx.spec = (layout, all(_memory_is_swapped(t) for t in tensors), not inverse, width, TRANSPOSED_PAIRS[pairs])


def _library_backward(ctx, gradients):  # type: ignore[no-untyped-def]
    cu_seqlens, *tables = ctx.saved_tensors
    results = torch.ops.apex.rope(gradients, tables, cu_seqlens, *ctx.spec)
    return results, [None] * len(tables), None, None, None, None, None, None


# The operator that torch.compile sees.
_library.register_op(
    "rope(Tensor[] tensors, Tensor[] tables, Tensor? cu_seqlens, str layout, bool swap_memory, bool inverse, int width,"
    " str pairs) -> Tensor[]",
    lambda tensors, tables, cu_seqlens, *spec: _run(tensors, tables, RopeSpec(*spec), cu_seqlens, checked=False),
    lambda tensors, tables, cu_seqlens, layout, swap_memory, *spec: [_empty_result(t, swap_memory) for t in tensors],
    backward=_library_backward,
    setup_context=_setup_context,
)


FAMILY = _library.register_family(_library.OpFamily("rope", "rotary position embeddings, forward and backward"))
