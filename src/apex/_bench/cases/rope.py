"""Rotary position embeddings: sequences, packed sequences, images, a query with its key, steps of small shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.rope import RopeSpec, reference, rotary_embedding_pair
from ...transformer.functional import (
    fused_apply_rotary_pos_emb,
    fused_apply_rotary_pos_emb_2d,
    fused_apply_rotary_pos_emb_cached,
    fused_apply_rotary_pos_emb_thd,
)
from ..directions import SHORT, Random, has_liger, prepare, with_peers
from ..registry import Call, Case, Expected, Family, Prepared, register

# Maps the tensors of a problem to the rotated tensors.
Rotate = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Kind:
    """A problem: the kind of tensors to rotate and of the tables to rotate them by.

    `shape` is [s, b, h, d] for "sbhd" and "cached", which has tables of cosines and sines; [t, h, d] for "thd";
    [b, img_h, img_w, h, d] for "2d"; and [b, s, h, d] for "qk", with `key_heads` for the key.
    """

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    direction: str = "fwd"
    key_heads: int = 0

    @property
    def name(self) -> str:
        sizes = [str(size) for size in self.shape]
        if self.key_heads:
            sizes[2] += f"+{self.key_heads}"
        layout = "sbhd" if self.kind == "cached" else self.kind
        suffix = " cached" if self.kind == "cached" else ""
        return f"rope {layout} {SHORT[self.dtype]} {'x'.join(sizes)}{suffix}" + f" {self.direction}" * (
            self.direction != "fwd"
        )

    @property
    def elements(self) -> int:
        elements = torch.Size(self.shape).numel()
        return elements + elements // self.shape[2] * self.key_heads

    @property
    def spec(self) -> RopeSpec:
        layouts = {"cached": "sbhd", "2d": "image", "qk": "bshd"}
        return RopeSpec(layouts.get(self.kind, self.kind), width=self.shape[2] if self.kind == "2d" else 0)


def _tables(kind: Kind, device: torch.device) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return RoFormer's angles, or their cosines and sines, and the cu_seqlens of packed sequences."""
    channels = kind.shape[-1]
    if kind.kind == "2d":
        rows, columns = (_angles(n, channels // 2, device).transpose(0, 1) for n in kind.shape[1:3])
        return (rows.cos(), rows.sin(), columns.cos(), columns.sin()), None
    angles = _angles(kind.shape[1 if kind.kind == "qk" else 0], channels, device)
    if kind.kind != "thd":
        return ((angles,) if kind.kind == "sbhd" else (angles.cos(), angles.sin())), None
    cuts = torch.randperm(kind.shape[0], generator=torch.Generator().manual_seed(0))[:10].sort().values
    return (angles,), torch.tensor([0, *cuts.tolist(), kind.shape[0]], dtype=torch.int32, device=device)


def _angles(positions: int, channels: int, device: torch.device) -> Tensor:
    """Return the angles of both halves, [positions, 1, 1, channels]."""
    rates = 10000 ** (-torch.arange(0, channels, 2, device=device, dtype=torch.float32) / channels)
    half = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * rates
    return torch.cat((half, half), -1)[:, None, None]


def _ours(kind: Kind, tables: tuple[Tensor, ...], edges: Tensor | None) -> Rotate:
    if kind.kind == "sbhd":
        return lambda t: (fused_apply_rotary_pos_emb(t, tables[0]),)
    if kind.kind == "cached":
        return lambda t: (fused_apply_rotary_pos_emb_cached(t, tables[0], tables[1]),)
    if kind.kind == "thd":
        assert edges is not None
        return lambda t: (fused_apply_rotary_pos_emb_thd(t, edges, *tables),)
    if kind.kind == "2d":
        return lambda t: (fused_apply_rotary_pos_emb_2d(t, kind.shape[1], kind.shape[2], *tables),)
    return lambda query, key: rotary_embedding_pair(query, key, (tables[0], tables[1]), tensor_format="bshd")


def _turned(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = t.chunk(2, -1)
    return t * cos + torch.cat((-second, first), -1) * sin


def _eager(kind: Kind, tables: tuple[Tensor, ...], edges: Tensor | None) -> Rotate:
    """Return the formula as models write it: cosines and sines in the dtype of the input."""

    def cosines_and_sines(dtype: torch.dtype) -> list[Tensor]:
        if len(tables) == 1:
            return [tables[0].cos().to(dtype), tables[0].sin().to(dtype)]
        return [table.to(dtype) for table in tables]

    def rotate(*tensors: Tensor) -> Sequence[Tensor]:
        t = tensors[0]
        cos, sin, *across = cosines_and_sines(t.dtype)
        if kind.kind == "2d":
            rows, columns = t.unflatten(1, kind.shape[1:3]).chunk(2, -1)
            rows = _turned(rows, cos[:, :, None], sin[:, :, None])
            columns = _turned(columns, across[0][:, None], across[1][:, None])
            return (torch.cat((rows, columns), -1).flatten(1, 2),)
        if edges is not None:
            token = torch.arange(t.shape[0], device=t.device)
            position = token - edges[torch.searchsorted(edges, token, right=True) - 1]
            return (_turned(t, cos[position, 0], sin[position, 0]),)
        if kind.kind == "qk":
            cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)
        return [_turned(t, cos, sin) for t in tensors]

    return rotate


def _liger(tables: tuple[Tensor, ...]) -> Rotate:
    """Return Liger-Kernel's function, which rotates in place, with heads before tokens."""
    from liger_kernel.ops.rope import LigerRopeFunction  # type: ignore[import-not-found]

    cos, sin = (table[None, :, 0, 0] for table in tables)

    def rotate(query: Tensor, key: Tensor) -> Sequence[Tensor]:
        results = LigerRopeFunction.apply(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
        return [result.transpose(1, 2) for result in results]

    return rotate


def _prepare(kind: Kind, device: torch.device) -> Prepared:
    random, shapes = Random(device), [kind.shape]
    if kind.kind == "2d":
        shapes = [(kind.shape[0], kind.shape[1] * kind.shape[2], *kind.shape[3:])]
    elif kind.key_heads:
        shapes.append((*kind.shape[:2], kind.key_heads, kind.shape[3]))
    tensors, gradients = ([random.normal(*shape, dtype=kind.dtype) for shape in shapes] for _ in range(2))
    tables, edges = _tables(kind, device)
    forward, wide = kind.direction == "fwd", [table.double() for table in tables]
    spec = kind.spec._replace(inverse=not forward)
    expected = [
        Expected(reference.rotate(t.double(), wide, spec, edges), kind.dtype)
        for t in (tensors if forward else gradients)
    ]
    makers = with_peers(
        _ours(kind, tables, edges), _eager(kind, tables, edges), device, compile=kind.direction != "step"
    )
    leaves = [t.requires_grad_() for t in tensors]
    prepared = prepare(makers, leaves, gradients, kind.direction, expected)
    if kind.kind != "qk" or not has_liger(device):
        return prepared

    # Liger-Kernel rotates in place: it is checked on fresh copies, and timed on one copy that it rotates repeatedly.
    def check() -> Call:
        rotate = _liger(tables)
        return lambda: rotate(*(t.detach().clone() for t in leaves))

    def time() -> Call:
        rotate, own = _liger(tables), [t.detach().clone() for t in leaves]
        return lambda: rotate(*own)

    calls = prepared.implementations
    return Prepared({**calls, "liger": check}, expected, {**calls, "liger": time})


_BF16, _HALF, _F32 = torch.bfloat16, torch.float16, torch.float32
_GPU = [
    Kind("sbhd", _BF16, (4096, 4, 32, 128)),
    Kind("cached", _BF16, (4096, 4, 32, 128)),
    Kind("sbhd", _BF16, (4096, 4, 32, 128), "bwd"),
    Kind("sbhd", _BF16, (8192, 2, 64, 128)),
    Kind("cached", _BF16, (8192, 2, 64, 128)),
    Kind("thd", _BF16, (16384, 32, 128)),
    Kind("thd", _BF16, (16384, 64, 128)),
    Kind("2d", _BF16, (4, 64, 64, 32, 128)),
    Kind("2d", _BF16, (8, 64, 64, 32, 128)),
    Kind("qk", _BF16, (4, 4096, 32, 128), key_heads=8),
    Kind("sbhd", _BF16, (128, 2, 8, 64), "step"),
    Kind("qk", _BF16, (2, 128, 8, 64), "step", key_heads=2),
]
_CPU = [
    Kind(kind, dtype, shape)
    for dtype in (_F32, _BF16)
    for kind, shape in (
        ("sbhd", (512, 2, 8, 128)),
        ("cached", (512, 2, 8, 128)),
        ("thd", (1024, 8, 128)),
        ("2d", (2, 16, 32, 8, 128)),
    )
] + [
    Kind("sbhd", _HALF, (512, 2, 8, 128)),
    *(Kind("sbhd", dtype, (64, 2, 8, 64), "step") for dtype in (_F32, _BF16, _HALF)),
]


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Return large shapes forward, one of them backward, then steps of small shapes; a CPU gets smaller shapes."""
    kinds = _GPU if device.type == "cuda" else _CPU
    if quick:
        kinds = [kinds[0], kinds[-1]]
    return [
        Case(
            kind.name,
            (4 if kind.direction == "step" else 2) * kind.elements * kind.dtype.itemsize,
            functools.partial(_prepare, kind),
            "wall" if kind.direction == "step" else "device",
        )
        for kind in kinds
    ]


register(Family("rope", "rotary position embeddings", cases))
