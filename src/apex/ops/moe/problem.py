"""Sizes and settings of a call of a mixture's experts, and the constants of launches that follow from them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._device import DeviceFacts, facts
from ..attention.config import precision
from ..glu.reference import ACTIVATIONS as GLU_ACTIVATIONS
from . import config, grouped


class Problem(NamedTuple):
    """Sizes and settings of a call: T, K, E, H, F of `reference`, and how matrices lie in memory."""

    tokens: int
    chosen: int
    experts: int
    hidden: int
    width: int
    activation: str
    interleaved: bool
    transposed: bool
    dtype: torch.dtype
    device: DeviceFacts

    @property
    def rows(self) -> int:
        return self.tokens * self.chosen

    @property
    def tile_rows(self) -> int:
        return config.tile_rows(self.rows, self.experts, self.dtype, self.device)

    @property
    def tiles(self) -> int:
        """An upper bound of the tiles of all experts, for any routing, because the host does not read the routing."""
        return -(-self.rows // self.tile_rows) + self.experts

    @property
    def align(self) -> int:
        return math.gcd(self.hidden, self.width, 16)

    def route(self, x: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor | None) -> grouped.Route:
        """Return which products PyTorch's `grouped_mm` computes."""
        plain = self.activation in GLU_ACTIVATIONS and not self.interleaved and all(bias is None for bias in biases)
        return grouped.route(x, (gate_up, down), self.rows, (self.experts, self.hidden, self.width), plain)

    def unit(self) -> dict[str, Any]:
        return {"ACTIVATION": self.activation, "INTERLEAVED": self.interleaved}

    def product(self, inner: int, columns: int, operands: int, out_first: bool) -> tuple[int, int, dict[str, Any]]:
        """Return programs, blocks of columns, and the constants of a product of sorted rows by matrices."""
        tile = config.product_tile(self.tile_rows, inner, columns, operands, self.dtype, self.device)
        blocks = -(-columns // tile.columns)
        constants = {
            "ALIGN": self.align,
            "OUT_FIRST": out_first,
            "WHOLE": inner % tile.inner == 0,
            "FULL": columns % tile.columns == 0,
            "PRECISION": precision(self.dtype, self.device),
            "ROWS": tile.rows,
            "COLUMNS": tile.columns,
            "INNER": tile.inner,
            "GROUP": config.GROUP,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }
        return self.tiles * blocks, blocks, constants


def problem_of(
    x: Tensor, gate_up: Tensor, index: Tensor, activation: str, interleaved: bool, transposed: bool
) -> Problem:
    """Return the sizes and settings of a call."""
    width = gate_up.shape[2 if transposed else 1] // 2
    (tokens, chosen), experts, hidden = index.shape, gate_up.shape[0], x.shape[1]
    layout = (activation, interleaved, transposed)
    return Problem(tokens, chosen, experts, hidden, width, *layout, x.dtype, facts(x.device))


def takes(gate_up: Tensor, down: Tensor, index: Tensor) -> bool:
    """Return whether the kernels take tensors of these sizes: none may be empty, and offsets in them have 32 bits."""
    return (
        min(gate_up.numel(), index.numel(), down.numel()) > 0
        and gate_up.numel() // gate_up.shape[0] <= config.LARGEST_MATRIX
        and index.numel() <= config.LARGEST_MATRIX
    )
