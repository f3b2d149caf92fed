"""From an attention problem to kernel launches, which are planned once and cached."""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import _device
from . import config
from .reference import dropout_threshold

if TYPE_CHECKING:
    from .._launch import BoundLaunch

# Of batch (or packed sequence), head and row, in elements.
Strides = tuple[int, int, int]


@functools.cache
def _forward_kernels() -> ModuleType:
    """Imported at first use: importing apex needs no Triton."""
    from . import kernels_forward

    return kernels_forward


@functools.cache
def _backward_kernels() -> ModuleType:
    from . import kernels_backward

    return kernels_backward


class Problem(NamedTuple):
    """Sizes and options of an attention, beside its tensors.

    `mask_group` and `bias_group` are how many batches share a mask or a bias, 0 where there is none. `total` is the
    number of rows of packed sequences, 0 where none are packed; `batch` then counts the sequences, and `tail` says that
    rows after the last one are to be zeros. `filled` says that an attention for sequences of the same length has been
    computed already, which is right if they have `rows` each and fill all rows. `others` are the dtypes of mask, bias
    and `cu_seqlens` as they were given: a bound launch is for one set of dtypes.
    """

    batch: int
    heads: int
    rows: int
    columns: int
    head_dim: int
    dtype: torch.dtype
    inf: float = 0.0
    mask_group: int = 0
    bias_group: int = 0
    total: int = 0
    tail: bool = False
    dropout_p: float = 0.0
    filled: bool = False
    others: tuple[torch.dtype | None, ...] = ()

    @property
    def is_packed(self) -> bool:
        return self.total > 0

    @property
    def statistics_shape(self) -> tuple[int, ...]:
        """Of what the forward pass leaves for the backward pass, in float32: one or two numbers per row."""
        planes = 2 if self.mask_group or self.bias_group else 1
        return (planes, self.heads, self.total) if self.is_packed else (planes, self.batch, self.heads, self.rows)

    def _sizes(self) -> tuple[int, ...]:
        return self.batch, self.heads, self.rows, self.columns, self.head_dim, self.total

    def _statistics_strides(self) -> tuple[int, int, int]:
        """Of batch and head, and from plane to plane."""
        if self.filled:  # as [batch, heads, rows]: kernels add the first row of a sequence, which is batch * rows
            return (self.heads - 1) * self.rows, self.rows, self.heads * self.total
        if self.is_packed:
            return 0, self.total, self.heads * self.total
        return self.heads * self.rows, self.rows, self.batch * self.heads * self.rows

    def _options(self) -> tuple[int | float, ...]:
        scale = 1 / math.sqrt(self.head_dim)
        kept = 1 / (1 - self.dropout_p)
        groups = max(1, self.mask_group), max(1, self.bias_group)
        return *groups, dropout_threshold(self.dropout_p), scale, float(self.inf), kept

    def _flags(self) -> tuple[bool, ...]:
        return self.mask_group > 0, self.bias_group > 0, self.is_packed, self.tail, self.dropout_p > 0

    def _tiling(self, tile: config.Tile, facts: _device.DeviceFacts) -> tuple[bool | int | str, ...]:
        """Constants of a tile: what needs no masks, the precision of float32 products, the sizes."""
        block = config.head_block(self.head_dim)
        full = (
            not self.is_packed and self.rows % tile.queries == 0,
            not self.is_packed and self.columns % tile.keys == 0,
            self.head_dim == block,
        )
        return *full, self._precision(facts), tile.queries, tile.keys, block

    def _precision(self, facts: _device.DeviceFacts) -> str:
        """How products of matrices are computed; the sums are float32 in any case."""
        if self.dtype == torch.float32 and facts.backend == "cuda":
            return "tf32x3"  # in three passes of the matrix units, which lose no digits
        if self.dtype == torch.bfloat16 and facts.backend == "interpreter":
            return "widened"  # the interpreter would multiply the bits of bfloat16 numbers as integers
        return "ieee"

    def _programs(self, rows: int, block: int) -> int:
        tail = -(-self.total // block) if self.tail else 0
        return (self.batch * -(-rows // block) + tail) * self.heads


@functools.lru_cache(maxsize=4096)
def forward(
    problem: Problem,
    q: Strides,
    k: Strides,
    v: Strides,
    out: Strides,
    saves: bool,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> BoundLaunch:
    """Takes q, k, v, mask, bias, cu, seed, out, statistics; the last is written if it `saves`."""
    sizes = problem.head_dim, problem.dtype.itemsize, problem.rows, problem.columns
    tile = config.forward_tile(*sizes, facts)
    programs = problem._programs(problem.rows, tile.queries)
    if problem.filled:
        programs = min(programs, config.REPAIRS_PER_MULTIPROCESSOR * facts.multiprocessors)
    kernels = _forward_kernels()
    kernel = kernels.attention_repair if problem.filled else kernels.attention_forward
    return kernel.bind(
        (programs,),
        (*problem._sizes(), *q, *k, *v, *out, *problem._statistics_strides(), *problem._options()),
        (*problem._flags(), saves, *problem._tiling(tile, facts)),
        device=device,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@functools.lru_cache(maxsize=4096)
def backward_queries(
    problem: Problem,
    q: Strides,
    k: Strides,
    v: Strides,
    out: Strides,
    dout: Strides,
    dq: Strides,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> BoundLaunch:
    """Takes q, k, v, mask, bias, cu, seed, out, dout, statistics, delta, dq; writes the last two."""
    sizes = problem.head_dim, problem.dtype.itemsize, problem.rows, problem.columns
    tile = config.queries_tile(*sizes, facts)
    strides = (*q, *k, *v, *out, *dout, *dq, *problem._statistics_strides())
    return _backward_kernels().attention_backward_queries.bind(
        (problem._programs(problem.rows, tile.queries),),
        (*problem._sizes(), *strides, *problem._options()),
        (*problem._flags(), *problem._tiling(tile, facts)),
        device=device,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@functools.lru_cache(maxsize=4096)
def backward_keys(
    problem: Problem,
    q: Strides,
    k: Strides,
    v: Strides,
    out: Strides,
    dout: Strides,
    dk: Strides,
    dv: Strides,
    batches: tuple[int, int] | None,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> BoundLaunch:
    """Takes q, k, v, mask, bias, cu, seed, out, dout, statistics, delta, dlogits, dk, dv; writes the last two.

    With `batches`, a first one and a number, it is for these alone, takes no `delta` and writes `dlogits`.
    """
    sizes = problem.head_dim, problem.dtype.itemsize, problem.rows, problem.columns
    tile = config.keys_tile(*sizes, facts)
    strides = (*q, *k, *v, *out, *dout, *dk, *dv, *problem._statistics_strides())
    first, count = batches or (0, problem.batch)
    return _backward_kernels().attention_backward_keys.bind(
        (problem._replace(batch=count)._programs(problem.columns, tile.keys),),
        (*problem._sizes(), *strides, *problem._options(), first),
        (*problem._flags(), batches is not None, *problem._tiling(tile, facts)),
        device=device,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@functools.lru_cache(maxsize=4096)
def backward_stored(
    problem: Problem,
    k: Strides,
    dq: Strides,
    batches: tuple[int, int],
    device: torch.device,
    facts: _device.DeviceFacts,
) -> BoundLaunch:
    """Takes dlogits, k, dq; writes the last, for a number of batches from a first one on."""
    tile = config.stored_tile(problem.head_dim, problem.dtype.itemsize, problem.rows, problem.columns, facts)
    _, heads, rows, columns, head_dim, _ = problem._sizes()
    first, count = batches
    return _backward_kernels().attention_backward_stored.bind(
        (count * heads * -(-rows // tile.queries),),
        (heads, rows, columns, head_dim, *k, *dq, problem._options()[3], first),
        problem._tiling(tile, facts),
        device=device,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def parts_of_batches(problem: Problem) -> list[tuple[int, int]]:
    """Which batches' gradients of logits are stored at a time, each part as its first one and their number."""
    at_once, group = batches_at_once(problem), problem.bias_group
    if at_once >= group:
        return [(first, min(at_once, problem.batch - first)) for first in range(0, problem.batch, at_once)]
    return [
        (start + first, min(at_once, group - first))
        for start in range(0, problem.batch, group)
        for first in range(0, group, at_once)
    ]


def batches_at_once(problem: Problem) -> int:
    """How many batches' gradients of logits are stored at a time: whole groups of a bias, or equal parts of one."""
    of_one = problem.heads * problem.rows * problem.columns * problem.dtype.itemsize
    fitting = max(1, config.STORED_BYTES // of_one)
    group = problem.bias_group
    if fitting >= group:
        return min(problem.batch, fitting // group * group)
    return -(-group // -(-group // fitting))
