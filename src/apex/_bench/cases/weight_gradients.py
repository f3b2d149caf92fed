"""Weight gradients of a dense layer, added to a float32 matrix in place.

This is no example of the dense family, because the peer rounds the product to the inputs' dtype before it adds.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...ops._examples import Make
from ...ops._tolerance import tensor_core_error
from ...ops.dense import wgrad_gemm_accum
from ..directions import SHORT
from ..registry import OURS, Call, Case, Expected, Family, Prepared, register

# rows, input features, output features
GPU, CPU = (torch.bfloat16, 8192, 4096, 4096), (torch.float32, 512, 512, 512)


def _prepare(dtype: torch.dtype, rows: int, ins: int, outs: int, device: torch.device) -> Prepared:
    make = Make(dtype, device)
    x, dy = (make.normal(rows, width, grad=False) for width in (ins, outs))
    total = torch.zeros(outs, ins, device=device)

    def ours() -> tuple[Tensor]:
        wgrad_gemm_accum(x, dy, total)
        return (total,)

    def eager() -> tuple[Tensor]:
        return (total.add_(dy.t().mm(x)),)

    def accumulating(call: Call, checked: bool) -> Call:
        """Return a call that zeroes the sum first if it is `checked`; a timed call keeps accumulating."""

        def from_zero() -> Sequence[Tensor]:
            total.zero_()
            return call()

        return from_zero if checked else call

    calls: dict[str, Call] = {OURS: ours, "torch": eager}
    product = dy.double().t() @ x.double()
    slack = tensor_core_error(rows) if device.type == "cuda" else 0.0
    return Prepared(
        {name: functools.partial(accumulating, call, True) for name, call in calls.items()},
        # In the inputs' dtype, because the peer rounds the product to it before the addition.
        [Expected(product, dtype, rows, slack)],
        timed={name: functools.partial(accumulating, call, False) for name, call in calls.items()},
        expected_of={OURS: [Expected(product, torch.float32, rows, slack)]},
    )


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Return the case; a CPU gets a smaller one."""
    dtype, rows, ins, outs = GPU if device.type == "cuda" else CPU
    bytes_moved = dtype.itemsize * rows * (ins + outs) + 8 * ins * outs
    make = functools.partial(_prepare, dtype, rows, ins, outs)
    note = f"{2e-9 * rows * ins * outs:.1f} GFLOP; limited by the product, not by memory"
    return [Case(f"wgrad_accum {SHORT[dtype]}->fp32 {rows}x{ins}x{outs}", bytes_moved, make, note=note)]


register(Family("weight_gradients", "weight gradients of dense layers added in float32", cases))
