"""The launches of the attention kernels, which attention with a bias and attention within packed sequences share.

Letters: Z batches or packed sequences, H heads, M queries, N keys, D the size of a head.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _library
from .._device import DeviceFacts, facts
from . import config
from .reference import dropout_threshold

kernels_forward = _library.LazyModule(f"{__package__}.kernels_forward")
kernels_backward = _library.LazyModule(f"{__package__}.kernels_backward")

# Of batch (or packed sequence), head and row, in elements.
Strides = tuple[int, int, int]

FAMILY = _library.register_family(
    _library.OpFamily(
        "attention",
        "attention with mask, bias and packed sequences, forward and backward",
        small_inputs=f"PyTorch's scaled_dot_product_attention for heads of more than {config.LARGEST_HEAD} elements",
    )
)


def takes_head(tensor: Tensor) -> bool:
    """Whether the kernels take heads of the size of the tensor's last dimension."""
    size = tensor.shape[-1]
    if size <= config.LARGEST_HEAD // 2:
        return True
    return size <= config.largest_head(tensor.dtype.itemsize, facts(tensor.device))


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """What autocast turns the inputs of an attention into, as it does for PyTorch's own; None if nothing."""
    return None if tensor.dtype == torch.float64 else _library.autocast_dtype(tensor)


class Problem(NamedTuple):
    """Sizes and options of an attention, beside its tensors.

    `mask_group` and `bias_group` are how many batches share a mask or a bias, 0 where there is none. `bias_pitch` is
    the stride of the bias from row to row in the forward pass, 0 where nothing lies between rows. `total` is the number
    of rows of packed sequences, 0 where none are packed; `batch` then counts the sequences, and `tail` says that rows
    after the last one are to be zeros. `cudnn_first` says that cuDNN has computed an attention of sequences of `rows`
    each, which is right if they have that length and fill all rows.
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

    @property
    def scale(self) -> float:
        """What logits are multiplied by."""
        return 1 / math.sqrt(self.head_dim)

    def _statistics_strides(self) -> tuple[int, int, int]:
        """Of batch and head, and from plane to plane."""
        if self.cudnn_first:  # as [batch, heads, rows]: kernels add the first row of a sequence, which is batch * rows
            return (self.heads - 1) * self.rows, self.rows, self.heads * self.total
        if self.total:
            return 0, self.total, self.heads * self.total
        return self.heads * self.rows, self.rows, self.batch * self.heads * self.rows

    def choose(self, rule: config.TileRule, split: str = "queries") -> config.Tile:
        """The tile of a kernel whose programs share the queries or the keys."""
        device = facts(self.device)
        given = {"mask": self.mask_group, "bias": self.bias_group, "packed": self.total}
        kind = " ".join(name for name, number in given.items() if number)
        tile = rule(self.head_dim, self.dtype.itemsize, self.rows, self.columns, kind, device)
        heads = self.batch * self.heads
        return config.spread(tile, split, self.rows, self.columns, heads, self.head_dim, self.dtype.itemsize, device)

    def tiling(self, tile: config.Tile) -> dict[str, Any]:
        """The constants of a tile, and its warps and stages."""
        sizes = (self.rows, self.columns, self.head_dim)
        return config.tile_constants(tile, *sizes, self.total > 0, self.dtype, facts(self.device))

    def programs(self, batch: int, rows: int, block: int) -> int:
        """A program for each tile of each head, and for tiles of what comes after the last sequence."""
        tail = -(-self.total // block) if self.tail else 0
        return (batch * -(-rows // block) + tail) * self.heads

    def prepare(
        self, kernel: Any, programs: int, tile: config.Tile, strides: tuple[int, ...], *more: int, **flags: int
    ) -> Any:
        """The launch of a kernel with these sizes and options; `more` and `flags` are what it takes beside them.

        Rules are asked with the dtypes of all tensors.
        """
        mask_group, bias_group, total, dropout = self.mask_group, self.bias_group, self.total, self.dropout_p
        sizes = (*self[:5], total, *strides, *self._statistics_strides())
        return kernel.prepare(
            (programs,),
            (*sizes, mask_group or 1, bias_group or 1, dropout_threshold(dropout), *more),
            HAS_MASK=mask_group > 0,
            HAS_BIAS=bias_group > 0,
            PACKED=total > 0,
            TAIL=self.tail,
            DROPS=dropout > 0,
            ALIGN_S=math.gcd(16, *strides),
            same_dtypes=True,
            **flags,
            **self.tiling(tile),
        )


def output_launch(problem: Problem, strides: tuple[int, ...], saves: bool, device: DeviceFacts) -> Any:
    """From q, k, v, mask, bias, cu_seqlens, seed: writes output and, if it `saves` them, statistics.

    `strides` are those of q, k, v and output.
    """
    tile = problem.choose(config.forward_tile)
    programs = problem.programs(problem.batch, problem.rows, tile.queries)
    repairs = problem.cudnn_first
    if repairs:
        programs = min(programs, config.REPAIRS_PER_MULTIPROCESSOR * device.multiprocessors)
    pitch = problem.bias_pitch or problem.columns
    flags = {"SAVES": saves, "REPAIRS": repairs, "ALIGN_P": math.gcd(pitch, 16)}
    return problem.prepare(kernels_forward.attention_forward, programs, tile, strides, pitch, **flags)


def dquery_launch(problem: Problem, strides: tuple[int, ...], device: DeviceFacts) -> Any:
    """From q, k, v, mask, bias, cu_seqlens, seed, output, its gradient, statistics: writes delta and dquery.

    `delta` is the product of every row of the output with its gradient. `strides` are those of q, k, v, output, its
    gradient and dquery.
    """
    tile = problem.choose(config.queries_tile)
    programs = problem.programs(problem.batch, problem.rows, tile.queries)
    return problem.prepare(kernels_backward.attention_backward_queries, programs, tile, strides)


def dkey_dvalue_launch(
    problem: Problem, strides: tuple[int, ...], batches: tuple[int, int] | None, device: DeviceFacts
) -> Any:
    """From what `dquery_launch` reads and `delta`: writes dlogits, dkey and dvalue; `strides` end with the latter's.

    With `batches`, a first one and a number, it is for these alone and reads no `delta`; else it writes no `dlogits`.
    """
    tile = problem.choose(config.keys_tile, "keys")
    first, count = batches or (0, problem.batch)
    programs, stores = problem.programs(count, problem.columns, tile.keys), batches is not None
    return problem.prepare(kernels_backward.attention_backward_keys, programs, tile, strides, first, STORES=stores)


def dquery_dbias_launch(
    problem: Problem, strides: tuple[int, ...], batches: tuple[int, int], sums: bool, device: DeviceFacts
) -> Any:
    """From dlogits, as `dkey_dvalue_launch` writes them for `batches`, and key: writes dquery and, if it `sums`, dbias.

    `strides` are those of key and dquery. Takes one float.
    """
    tile = problem.choose(config.stored_tile)
    first, count = batches
    programs = problem.programs(count, problem.rows, tile.queries)
    group, plane = min(count, problem.bias_group), problem.heads * problem.columns * config.pitch(problem.rows)
    block = config.sum_block(plane, group, device)
    sum_programs = count // group * -(-plane // block[1]) if sums else 0
    place = (first, programs, group, first // problem.bias_group)
    return kernels_backward.attention_backward_stored.prepare(
        (programs + sum_programs,),
        (problem.heads, problem.rows, problem.columns, problem.head_dim, *strides, *place),
        SUMS=sums,
        ADDS=first % problem.bias_group > 0,
        ALIGN_S=math.gcd(16, *strides),
        BATCHES=block[0],
        ELEMENTS=block[1],
        same_dtypes=True,
        **problem.tiling(tile),
    )
