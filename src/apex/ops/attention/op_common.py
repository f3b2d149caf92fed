"""Launches of the attention kernels, shared by attention with a bias and attention within packed sequences.

Letters: Z batches or packed sequences, H heads, M queries, N keys, D the size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _library
from .._device import DeviceFacts, contiguous_strides, empty_on, facts, launch_rule
from . import config
from .reference import dropout_threshold

kernels_forward = _library.LazyModule(f"{__package__}.kernels_forward")
kernels_backward = _library.LazyModule(f"{__package__}.kernels_backward")

# Strides of batch (or packed sequence), head and row, in elements.
Strides = tuple[int, int, int]

FAMILY = _library.register_family(
    _library.OpFamily(
        "attention",
        "attention with mask, bias and packed sequences, forward and backward",
        small_inputs=f"PyTorch's scaled_dot_product_attention for heads of more than {config.LARGEST_HEAD} elements",
    )
)


def takes_head(tensor: Tensor) -> bool:
    """Return whether the kernels take heads of the size of the tensor's last dimension."""
    size = tensor.shape[-1]
    if size <= config.LARGEST_HEAD // 2:
        return True
    return size <= config.largest_head(tensor.dtype.itemsize, facts(tensor.device))


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return autocast's dtype for the inputs of an attention, as for PyTorch's own; None if they are not cast."""
    return None if tensor.dtype == torch.float64 else _library.autocast_dtype(tensor)


class Problem(NamedTuple):
    """Sizes and options of an attention, beside its tensors.

    `mask_group` and `bias_group` are how many batches share a mask or a bias, 0 without one. `bias_pitch` is the row
    stride of the bias in the forward pass, 0 if rows have no gaps. `total` is the number of rows of packed sequences, 0
    if none are packed; `batch` then counts the sequences, and `tail` says that rows after the last sequence must be
    zeros. `cudnn_first` says that cuDNN has computed an attention of sequences of `rows` each; its result is right if
    they all have that length and fill all rows. `total_keys` is the number of packed rows of keys if they have bounds
    of their own. `group` heads of queries share a head of keys. A query sees keys from `window[0]` before its own
    position to `window[1]` after it, -1 for all.
    """

    batch: int
    heads: int
    rows: int
    columns: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    mask_group: int = 0
    bias_group: int = 0
    total: int = 0
    tail: bool = False
    dropout_p: float = 0.0
    cudnn_first: bool = False
    bias_pitch: int = 0
    total_keys: int = 0
    group: int = 1
    window: tuple[int, int] = (-1, -1)

    @property
    def scale(self) -> float:
        """Factor of the logits, 1 / sqrt(head size)."""
        return 1 / math.sqrt(self.head_dim)

    def _statistics_strides(self) -> tuple[int, int, int]:
        """Return the strides of the statistics for batch and head, and from plane to plane."""
        if self.cudnn_first:  # [batch, heads, rows]; kernels add the first row of a sequence, which is batch * rows
            return (self.heads - 1) * self.rows, self.rows, self.heads * self.total
        if self.total:
            return 0, self.total, self.heads * self.total
        return self.heads * self.rows, self.rows, self.batch * self.heads * self.rows

    def row_terms(self) -> tuple[int, int, int]:
        """Return the shape of the two terms of each packed query that a backward kernel writes for the other one."""
        alignment = config.ROW_TERMS_ALIGNMENT
        return 2, self.heads, (self.total // alignment + self.batch + 1) * alignment

    def choose(self, rule: config.TileRule, split: str = "queries") -> config.Tile:
        """Return the tile of a kernel whose programs split the queries or the keys."""
        device = facts(self.device)
        parts = {"mask": self.mask_group, "bias": self.bias_group, "packed": self.total, "window": max(self.window) + 1}
        kind = " ".join(name for name, number in parts.items() if number)
        tile = rule(self.head_dim, self.dtype.itemsize, self.rows, self.columns, kind, device)
        heads = self.batch * self.heads // (self.group if split == "keys" else 1)
        return config.spread(tile, split, self.rows, self.columns, heads, self.head_dim, self.dtype.itemsize, device)

    def tiling(self, tile: config.Tile) -> dict[str, Any]:
        """Return the constants of a tile, and its warps and stages."""
        sizes = (self.rows, self.columns, self.head_dim)
        return config.tile_constants(tile, *sizes, self.total > 0, self.dtype, facts(self.device))

    def programs(self, batch: int, rows: int, block: int, keys: bool = False) -> int:
        """Return the number of programs: one per tile of each head, of keys and their heads if `keys`, else of queries.

        With a tail, each packed sequence and the rows after the last have at most one tile too many. Tiles
        for the greatest length of every sequence, and for all rows, would be 98,304 programs for 16 documents of 512 to
        8192 rows, 65,536 in all, and only 33,000 of them would have rows.
        """
        total = (self.total_keys if keys else 0) or self.total
        tiles = total // block + batch + 1 if self.tail else batch * -(-rows // block)
        return tiles * (self.heads // self.group if keys else self.heads)

    def prepare(
        self, kernel: Any, programs: int, tile: config.Tile, strides: tuple[int, ...], *more: int, **flags: int
    ) -> Any:
        """Prepare a kernel with these sizes and options; `more` and `flags` are its additional arguments."""
        mask_group, bias_group, total, dropout = self.mask_group, self.bias_group, self.total, self.dropout_p
        sizes = (*self[:5], total, self.total_keys or total, *strides, *self._statistics_strides())
        left, right = self.window
        return kernel.prepare(
            (programs,),
            (*sizes, mask_group or 1, bias_group or 1, dropout_threshold(dropout), left, right, *more),
            HAS_MASK=mask_group > 0,
            HAS_BIAS=bias_group > 0,
            PACKED=total > 0,
            TAIL=self.tail,
            GROUP=self.group,
            LEFT=left >= 0,
            RIGHT=right >= 0,
            DROPS=dropout > 0,
            ALIGN_S=math.gcd(16, *strides),
            **flags,
            **self.tiling(tile),
        )


def output_launch(problem: Problem, strides: tuple[int, ...], saves: bool, device: DeviceFacts) -> Any:
    """Prepare the kernel that reads q, k, v, mask, bias, cu_seqlens of queries and keys, seed and writes the output.

    It also writes the statistics if it `saves` them. `strides` belong to q, k, v and output.
    """
    tile = problem.choose(config.forward_tile)
    programs = problem.programs(problem.batch, problem.rows, tile.queries)
    if problem.cudnn_first:
        programs = min(programs, config.REPAIRS_PER_MULTIPROCESSOR * device.multiprocessors)
    pitch = problem.bias_pitch or problem.columns
    flags = {"SAVES": saves, "REPAIRS": problem.cudnn_first, "ALIGN_P": math.gcd(pitch, 16)}
    return problem.prepare(kernels_forward.attention_forward, programs, tile, strides, pitch, **flags)


def dquery_launch(problem: Problem, strides: tuple[int, ...], device: DeviceFacts) -> Any:
    """Prepare the kernel that computes `delta` and dquery.

    It reads q, k, v, mask, bias, cu_seqlens of queries and of keys, seed, output, its gradient and statistics. `delta`
    is the dot product of every row of the output with its gradient, or for packed sequences `Problem.row_terms`.
    `strides` belong to q, k, v, output, its gradient and dquery.
    """
    tile = problem.choose(config.queries_tile)
    programs = problem.programs(problem.batch, problem.rows, tile.queries)
    return problem.prepare(kernels_backward.attention_backward_queries, programs, tile, strides)


def dkey_dvalue_launch(
    problem: Problem, strides: tuple[int, ...], batches: tuple[int, int] | None, device: DeviceFacts
) -> Any:
    """Prepare the kernel that computes dkey and dvalue from the tensors of `dquery_launch` and `delta`.

    With `batches`, a first batch and a number of them, it covers only these, writes `dlogits` and reads no `delta`.
    The last of `strides` belong to dkey and dvalue.
    """
    tile = problem.choose(config.keys_tile, "keys")
    first, count = batches or (0, problem.batch)
    programs = problem.programs(count, problem.columns, tile.keys, keys=True)
    stores = batches is not None
    return problem.prepare(kernels_backward.attention_backward_keys, programs, tile, strides, first, STORES=stores)


def dquery_dbias_launch(
    problem: Problem, strides: tuple[int, ...], batches: tuple[int, int], sums: bool, device: DeviceFacts
) -> Any:
    """Prepare the kernel that computes dquery and, if it `sums`, dbias from key and the stored `dlogits` of `batches`.

    `strides` belong to key and dquery. The kernel takes one float.
    """
    tile = problem.choose(config.stored_tile)
    first, count = batches
    programs = problem.programs(count, problem.rows, tile.queries)
    group, plane = min(count, problem.bias_group), problem.heads * problem.columns * config.pitch(problem.rows)
    block = config.sum_block(plane, group, device)
    sum_programs = count // group * -(-plane // block[1]) if sums else 0
    batch_sizes = (first, programs, group, first // problem.bias_group)
    return kernels_backward.attention_backward_stored.prepare(
        (programs + sum_programs,),
        (problem.heads, problem.rows, problem.columns, problem.head_dim, *strides, *batch_sizes),
        SUMS=sums,
        ADDS=first % problem.bias_group > 0,
        ALIGN_S=math.gcd(16, *strides),
        BATCHES=block[0],
        ELEMENTS=block[1],
        **problem.tiling(tile),
    )


def launch_packed_forward(
    tensors: tuple[Tensor, ...],
    bounds: tuple[Any, ...],
    joint: tuple[torch.Size, tuple[int, ...]] | None,
    settings: tuple[Any, ...],
    saves: bool = True,
    results: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None] | None:
    """Return output and statistics [H, total] of packed sequences; None if kernels do not take the sizes.

    `tensors` are query, key and value. `bounds` are cu_seqlens of queries, cu_seqlens of keys (None: the same) and the
    seed of dropout. `joint` is shape and strides of qkv, [total, 3, H, D], if the tensors are its parts, None if they
    are contiguous. `settings` are the greatest lengths of queries and keys, scale (None: 1 / sqrt(D)), the window,
    dropout's probability, `tail` and `cudnn_first`. The kernel checks the `results` of cuDNN if they are given.
    """
    query, key, _ = tensors
    own = bounds[1] is not None
    form = (query.shape, key.shape, own, joint, query.dtype, bounds[0].shape[0], settings, query.device)
    launches = _packed_launches(form, "saves" if saves else "infers")
    if launches is None:
        return None
    launch, floats, of_output, of_statistics = launches
    if results is None:
        empty: Any = empty_on(query.device)
        results = empty(*of_output, query.dtype), empty(*of_statistics, torch.float32) if saves else None
    launch((*tensors, None, None, *bounds, *results), floats)
    return results


def launch_packed_backward(
    dout: Tensor,
    tensors: tuple[Tensor, ...],
    bounds: tuple[Any, ...],
    results: Sequence[Tensor],
    joint: tuple[torch.Size, tuple[int, ...]] | None,
    settings: tuple[Any, ...],
    wants_keys: bool = True,
) -> Any:
    """Return the gradient of qkv, or of query, key and value, from the arguments of `launch_packed_forward`.

    Gradients of key and value are undefined unless `wants_keys`. Returns None if kernels do not take the sizes.
    """
    query, key, _ = tensors
    own = bounds[1] is not None
    form = (query.shape, key.shape, own, joint, query.dtype, bounds[0].shape[0], settings, query.device)
    launches = _packed_launches(form, "backward")
    if launches is None:
        return None
    of_queries, of_keys, floats, of_delta, layouts = launches
    empty: Any = empty_on(query.device)
    delta = empty(*of_delta, torch.float32)
    gradients: Any = (
        [empty(*layout, query.dtype) for layout in layouts] if joint is None else empty(*layouts, query.dtype)
    )
    dquery, dkey, dvalue = gradients if joint is None else gradients.unbind(1)
    arguments = (*tensors, None, None, *bounds, results[0], dout, results[1], delta)
    of_queries((*arguments, dquery), floats)  # also computes `delta`, which the other kernel needs
    if wants_keys:
        of_keys((*arguments, None, dkey, dvalue), floats)
    return gradients


@launch_rule
def _packed_launches(form: tuple[Any, ...], kind: str) -> tuple[Any, ...] | None:
    """Return the prepared kernels of a pass over packed sequences, their floats, and sizes and strides of results."""
    shape, key_shape, own_keys, joint, dtype, edges, settings, device = form
    longest, longest_keys, scale, left, right, dropout_p, tail, cudnn_first = settings
    if joint is not None:
        whole, strides = joint
        shape = key_shape = (whole[0], *whole[2:])
    (total, heads, head_dim), (total_keys, key_heads, _), here = shape, key_shape, facts(device)
    if head_dim > config.largest_head(dtype.itemsize, here) or min(*shape, *key_shape, edges - 1, *settings[:2]) < 1:
        return None
    sizes, options = (edges - 1, heads, longest, longest_keys, head_dim), (total, tail, dropout_p, cudnn_first, 0)
    of_keys = (total_keys if own_keys else 0, heads // key_heads, (left, right))
    problem = Problem(*sizes, dtype, device, 0, 0, *options, *of_keys)
    of_rows, of_key = (0, head_dim, heads * head_dim), (0, head_dim, key_heads * head_dim)
    given: tuple[int, ...] = (*of_rows, *of_key, *of_key) if joint is None else (0, strides[2], strides[0]) * 3
    floats = (problem.scale if scale is None else scale, 0.0, 1 / (1 - dropout_p))
    if kind != "backward":
        launch = output_launch(problem, (*given, *of_rows), kind == "saves", here)
        return launch, floats, _layout(*shape), _layout(heads, total)
    given, of_gradients = (*given, *of_rows, *of_rows), (of_rows, of_key)
    layouts: Any = [_layout(*sizes) for sizes in (shape, key_shape, key_shape)]
    if joint is not None:  # gradients are parts of one tensor
        of_gradients, layouts = ((0, head_dim, 3 * heads * head_dim),) * 2, _layout(*whole)
    of_query = dquery_launch(problem, (*given, *of_gradients[0]), here)
    of_key_value = dkey_dvalue_launch(problem, (*given, *of_gradients[1] * 2), None, here)
    return of_query, of_key_value, floats, _layout(*problem.row_terms()), layouts


def _layout(*sizes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return sizes, contiguous_strides(sizes)
