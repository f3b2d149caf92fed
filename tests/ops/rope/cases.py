"""The table of rope cases, and the embedding written out plainly in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from apex.ops.rope import RopeSpec

_HALF, _BF16, _F32 = torch.float16, torch.bfloat16, torch.float32


def turned(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the leading channels of `t`, as many as `cos` has."""
    rotated, rest = t[..., : cos.shape[-1]], t[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, -1)
    return torch.cat((rotated * cos + torch.cat((-second, first), -1) * sin, rest), -1)


def plain(t: Tensor, tables: Sequence[Tensor], spec: RopeSpec, edges: Sequence[int] | None = None) -> Tensor:
    """The embedding by the formula of the papers, one sequence after the other; differentiable."""
    tables = [table.to(t.dtype) for table in tables]
    if len(tables) == 1:
        tables = [tables[0].cos(), tables[0].sin()]
    if spec.pairs != "halves":
        rotated = tables[0].shape[-1]
        halves, neighbours = torch.arange(rotated), torch.arange(rotated).view(-1, 2).T.flatten()
        source = neighbours if spec.pairs.startswith("neighbours") else halves
        target = neighbours if spec.pairs.endswith("neighbours") else halves
        inner = plain(torch.cat((t[..., source], t[..., rotated:]), -1), tables, RopeSpec(spec.layout))
        return torch.cat((inner[..., :rotated][..., target.argsort()], inner[..., rotated:]), -1)
    if spec.layout == "sbhd":
        return turned(t, *tables)
    if spec.layout == "bshd":
        return turned(t.transpose(0, 1), *tables).transpose(0, 1)
    if spec.layout == "thd":
        assert edges is not None
        parts = [t[: edges[0]]]
        for start, end in itertools.pairwise(edges):
            parts.append(turned(t[start:end, None], *(table[: end - start] for table in tables))[:, 0])
        return torch.cat((*parts, t[edges[-1] :]))
    rows, columns = t.shape[1] // spec.width, spec.width
    image = t.unflatten(1, (rows, columns))
    by_row, by_column = image.chunk(2, -1)
    by_row = turned(by_row, *(table[:, :rows, None] for table in tables[:2]))
    by_column = turned(by_column, *(table[:, None, :columns] for table in tables[2:]))
    return torch.cat((by_row, by_column), -1).flatten(1, 2)


@dataclass(frozen=True)
class RopeCase:
    """`edges` are cu_seqlens; `order` is how dimensions lie in memory; tables hold angles unless `cached`."""

    name: str
    spec: RopeSpec
    shape: tuple[int, ...]
    rotated: int
    dtype: torch.dtype = _F32
    table_dtype: torch.dtype = _F32
    cached: bool = False
    positions: tuple[int, ...] | None = None
    edges: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.name

    def tensors(self, device: str) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor | None]:
        """Input, gradient of the output, tables, cu_seqlens."""
        generator = torch.Generator().manual_seed(sum(self.shape))
        t, dy = (torch.randn(self.shape, generator=generator).to(self.dtype) for _ in range(2))
        if self.order is not None:
            inverse = [self.order.index(i) for i in range(len(self.order))]
            t = t.permute(self.order).contiguous().permute(inverse)
        tables: list[Tensor] = []
        for positions in self.positions or (self.shape[0 if self.spec.layout == "sbhd" else 1],):
            shape = (positions, 1, 1, self.rotated)
            angles = torch.rand(shape, generator=generator, dtype=torch.float64) * 50
            if self.spec.layout == "image":
                angles = angles.transpose(0, 1)
            tables += [angles.cos(), angles.sin()] if self.cached else [angles]
        edges = None if self.edges is None else torch.tensor(self.edges, dtype=torch.int32, device=device)
        return t.to(device), dy.to(device), tuple(table.to(device, self.table_dtype) for table in tables), edges


_SBHD, _BSHD, _THD = RopeSpec("sbhd"), RopeSpec("bshd"), RopeSpec("thd")
_SWAPPED = RopeSpec("sbhd", swap_memory=True)
_NEIGHBOURS = RopeSpec("bshd", pairs="neighbours")
_TO_HALVES = RopeSpec("bshd", pairs="neighbours to halves")

# Small enough for the interpreter; with and without masks of tokens, heads and channels.
CASES = [
    RopeCase("one element of everything", _SBHD, (1, 1, 1, 2), 2),
    RopeCase("power of two", _SBHD, (8, 2, 4, 32), 32),
    RopeCase("more heads than a tile", _SBHD, (1, 3, 32, 32), 32),
    RopeCase("odd", _SBHD, (7, 3, 5, 22), 22),
    RopeCase("part of the channels", _SBHD, (8, 2, 4, 32), 16),
    RopeCase("odd part of the channels", _SBHD, (7, 3, 5, 23), 6),
    RopeCase("eight does, sixteen does not divide", _SBHD, (6, 2, 3, 72), 40, _BF16),
    RopeCase("float16", _SBHD, (8, 2, 4, 32), 32, _HALF),
    RopeCase("bfloat16", _SBHD, (8, 2, 4, 32), 32, _BF16),
    RopeCase("cached", _SBHD, (8, 2, 4, 32), 24, cached=True),
    RopeCase("cached bfloat16, float32 tables", _SBHD, (8, 2, 4, 32), 32, _BF16, cached=True),
    RopeCase("cached bfloat16, bfloat16 tables", _SBHD, (8, 2, 4, 32), 32, _BF16, _BF16, cached=True),
    RopeCase("float64 angles", _SBHD, (8, 2, 4, 32), 32, _HALF, torch.float64),
    RopeCase("float64 tables", _SBHD, (8, 2, 4, 32), 32, _F32, torch.float64, cached=True),
    RopeCase("swapped memory", _SWAPPED, (8, 3, 4, 32), 32, _BF16),
    RopeCase("swapped memory, swapped input", _SWAPPED, (8, 3, 4, 32), 24, order=(1, 0, 2, 3)),
    RopeCase("heads last in memory", _SBHD, (4, 2, 8, 16), 16, order=(0, 1, 3, 2)),
    RopeCase("everything the other way round", _SBHD, (4, 2, 3, 16), 8, _BF16, order=(3, 2, 1, 0)),
    RopeCase("bshd", _BSHD, (3, 9, 4, 32), 32, _BF16),
    RopeCase("bshd swapped memory", RopeSpec("bshd", swap_memory=True), (3, 8, 4, 32), 16, cached=True),
    RopeCase("bshd, one head", _BSHD, (3, 8, 1, 32), 32),
    RopeCase("neighbours", _NEIGHBOURS, (3, 8, 4, 32), 32, _BF16, cached=True),
    RopeCase("neighbours, part of the channels", _NEIGHBOURS, (2, 7, 3, 32), 16, cached=True),
    RopeCase("neighbours, odd part of the channels", _NEIGHBOURS, (2, 7, 3, 23), 6, cached=True),
    RopeCase("neighbours, not a power of two", _NEIGHBOURS, (2, 5, 3, 24), 24, _HALF, cached=True),
    RopeCase("neighbours to halves", _TO_HALVES, (3, 8, 1, 32), 32, _BF16, cached=True),
    RopeCase("neighbours to halves, part", _TO_HALVES, (2, 7, 3, 24), 8, cached=True, order=(0, 2, 1, 3)),
    RopeCase("halves to neighbours", RopeSpec("sbhd", pairs="halves to neighbours"), (7, 2, 3, 12), 12),
    RopeCase("packed", _THD, (23, 4, 32), 32, _BF16, positions=(10,), edges=(0, 4, 14, 15, 23)),
    RopeCase("packed, empty sequences", _THD, (9, 3, 24), 16, positions=(9,), edges=(0, 0, 4, 4, 4, 9, 9)),
    RopeCase("packed, tokens of no sequence", _THD, (16, 2, 16), 16, positions=(7,), edges=(2, 5, 12)),
    RopeCase("packed, no sequence", _THD, (5, 2, 16), 16, positions=(3,), edges=(0,)),
    RopeCase("packed, many sequences", _THD, (80, 1, 16), 16, positions=(2,), edges=(*range(0, 70, 2), *range(70, 81))),
    RopeCase("packed cached", _THD, (23, 4, 32), 16, cached=True, positions=(20,), edges=(0, 3, 23), order=(0, 2, 1)),
    RopeCase("image", RopeSpec("image", width=5), (2, 15, 4, 32), 16, _BF16, cached=True, positions=(3, 5)),
    RopeCase("image, larger tables", RopeSpec("image", width=2), (1, 6, 3, 20), 10, cached=True, positions=(5, 9)),
    RopeCase(
        "image, half tables, swapped",
        RopeSpec("image", width=4),
        (3, 8, 2, 16),
        8,
        _HALF,
        _HALF,
        cached=True,
        positions=(2, 4),
        order=(1, 0, 2, 3),
    ),
]
