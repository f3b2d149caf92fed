"""What a rotation is asked to do, and what its arguments must look like.

s: tokens of a sequence, b: batch, h: heads, d: channels of a head, t: tokens of all sequences, r: rotated channels.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

# Per layout the dimension of tokens, of the batch (None: there is none) and of heads.
DIMENSIONS: dict[str, tuple[int, int | None, int]] = {
    "sbhd": (0, 1, 2),
    "bshd": (1, 0, 2),
    "thd": (0, None, 1),
    "image": (1, 0, 2),  # b, rows * columns, h, d
}
# What the tables are called, by how many there are.
TABLE_NAMES = {1: ("freqs",), 2: ("cos_", "sin_"), 4: ("cos_h", "sin_h", "cos_w", "sin_w")}


class RopeSpec(NamedTuple):
    """Everything about a rotation but its tensors.

    `swap_memory`: the first two dimensions of the result are swapped in memory. `inverse`: the transpose of the
    rotation, which takes gradients back. `width`: of an image, in tokens.
    """

    layout: str
    swap_memory: bool = False
    inverse: bool = False
    width: int = 0


# Shape, dtype and device of a tensor: what checks need to know of it, and what launches are planned by.
Signature = tuple[torch.Size, torch.dtype, torch.device]


def signature(tensor: Tensor) -> Signature:
    return tensor.shape, tensor.dtype, tensor.device


class Sizes(NamedTuple):
    """Sizes of a rotation that was found fit; `rotated` counts the channels that one pair of tables rotates."""

    tokens: int
    batch: int
    heads: int
    channels: int
    rotated: int
    parts: int

    @property
    def rest(self) -> int:
        """Channels that are copied."""
        return self.channels - self.parts * self.rotated


@functools.lru_cache(maxsize=4096)
def checked_sizes(t: Signature, tables: tuple[Signature, ...], cu_seqlens: Signature | None, spec: RopeSpec) -> Sizes:
    """The sizes, or an exception that says which argument does not fit."""
    shape, dtype, device = t
    if spec.layout not in DIMENSIONS:
        raise ValueError(f"tensor_format={spec.layout!r} is not known; use sbhd or bshd")
    token_dim, batch_dim, head_dim = DIMENSIONS[spec.layout]
    letters = {"thd": "t, h, d", "image": "b, img_h * img_w, h, d"}.get(spec.layout, ", ".join(spec.layout))
    if len(shape) != (3 if batch_dim is None else 4):
        raise ValueError(f"t has shape {list(shape)}, expected [{letters}]")
    if not dtype.is_floating_point:
        raise TypeError(f"t must be floating-point, got {dtype}")
    named = dict(zip(TABLE_NAMES[len(tables)], tables, strict=True))
    for name, (_, table_dtype, table_device) in named.items():
        if not table_dtype.is_floating_point:
            raise TypeError(f"{name} must be floating-point, got {table_dtype}")
        if table_device != device:
            raise ValueError(f"{name} is on {table_device}, t on {device}")
    shapes = {name: table[0] for name, table in named.items()}
    for (name, table_shape), (other, other_shape) in zip(*[iter(shapes.items())] * 2, strict=False):
        if table_shape != other_shape:
            raise ValueError(f"{name} has shape {list(table_shape)}, {other} has {list(other_shape)}")
    if spec.layout == "image":
        _check_image(shape, shapes, spec.width)
    else:
        _check_tables(shape, shapes, None if spec.layout == "thd" else shape[token_dim])
    if spec.layout == "thd":
        _check_edges(cu_seqlens, device)
    return Sizes(
        tokens=shape[token_dim],
        batch=1 if batch_dim is None else shape[batch_dim],
        heads=shape[head_dim],
        channels=shape[-1],
        rotated=tables[0][0][-1],
        parts=2 if spec.layout == "image" else 1,
    )


def _check_tables(t: torch.Size, tables: dict[str, torch.Size], tokens: int | None) -> None:
    """`tokens` is how many rows a table must have, None where the data decide."""
    for name, shape in tables.items():
        if len(shape) not in (2, 4) or (len(shape) == 4 and (shape[1] != 1 or shape[2] != 1)):
            raise ValueError(f"{name} has shape {list(shape)}, expected [positions, 1, 1, rotated channels]")
        if tokens is not None and shape[0] != tokens:
            raise ValueError(f"{name} has {shape[0]} positions, but t, of shape {list(t)}, has {tokens} tokens")
        if shape[-1] % 2 or not 0 < shape[-1] <= t[-1]:
            raise ValueError(
                f"{name} rotates {shape[-1]} channels, expected an even number from 2 to the {t[-1]} channels of t"
            )


def _check_image(t: torch.Size, tables: dict[str, torch.Size], width: int) -> None:
    tokens, channels = t[1], t[-1]
    if width < 0 or (tokens and (width == 0 or tokens % width)):
        raise ValueError(f"img_w={width} does not divide the {tokens} tokens of t, whose shape is {list(t)}")
    if channels % 4 or not channels:
        raise ValueError(f"t has {channels} channels, a rotation in two dimensions needs a multiple of 4")
    height = tokens // width if tokens else 0
    for name, shape in tables.items():
        needed = height if name.endswith("h") else width
        if len(shape) != 4 or shape[0] != 1 or shape[2] != 1 or shape[3] != channels // 2:
            raise ValueError(f"{name} has shape {list(shape)}, expected [1, positions, 1, {channels // 2}]")
        if shape[1] < needed:
            raise ValueError(f"{name} has {shape[1]} positions, the image needs {needed}")


def _check_edges(cu_seqlens: Signature | None, device: torch.device) -> None:
    if cu_seqlens is None:
        raise ValueError("cu_seqlens is needed for packed sequences: the first token of each, then the number of all")
    shape, dtype, where = cu_seqlens
    if dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, got {dtype}")
    if len(shape) != 1 or not shape[0]:
        raise ValueError(f"cu_seqlens has shape {list(shape)}, expected [sequences + 1]")
    if where != device:
        raise ValueError(f"cu_seqlens is on {where}, t on {device}")


def memory_is_swapped(t: Tensor) -> bool:
    """Whether a tensor is contiguous but for its first two dimensions, which are swapped in memory."""
    return t.dim() == 4 and not t.is_contiguous() and t.transpose(0, 1).is_contiguous()


@functools.lru_cache(maxsize=256)
def way_back(spec: RopeSpec, swapped: bool) -> RopeSpec:
    """What takes a gradient back, to memory whose first two dimensions are swapped or not."""
    # Without `_replace`, which PyTorch 2.6 cannot compile.
    return RopeSpec(spec.layout, swapped, not spec.inverse, spec.width)


def empty_result(t: Tensor, swap_memory: bool) -> Tensor:
    """Room for a result of the shape, dtype and device of `t`."""
    if swap_memory:
        shape = t.shape
        return t.new_empty((shape[1], shape[0], *shape[2:])).transpose(0, 1)
    return t.new_empty(t.shape)
