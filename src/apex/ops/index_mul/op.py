"""Products with indexed rows: in1[index] * in2 for matrices in1 and in2, with first and second derivatives."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _library
from .._checks import check_tensors
from .._device import facts
from .._op import Derivative, Kernels, Op, Saved
from . import config, reference

kernels = _library.LazyModule(f"{__package__}.kernels")

# Positions and rows are 32-bit in the kernels.
MOST_ROWS = 2**31 - 2**16


def prefers_operators(in2: Tensor) -> bool:
    """Return whether PyTorch's operators under its own autograd are quicker for the same result.

    They are if the host is the limit or no kernels run. They are never used for half precision, because they would
    round products before adding them up.
    """
    if in2.dtype not in (torch.float32, torch.float64):
        return False
    small = in2.numel() < config.NATIVE_BELOW and _library.requested == "auto"
    return small or not _library.runs_triton(FAMILY, in2)


def by_operators(in1: Tensor, in2: Tensor, index: Tensor) -> Tensor:
    """Return in1[index] * in2, differentiable by PyTorch's autograd and deterministic."""
    # A CPU sums rows like an embedding, in 1.3 ms for 8192 rows of 128 float32 where indexing needs 28.
    return in1[index] * in2 if in2.is_cuda else reference.forward(in1, in2, index)


def index_mul_backward_backward(
    grad_grad1: Tensor | None, grad_grad2: Tensor | None, grad_out: Tensor, in1: Tensor, in2: Tensor, index: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of grad_out, in1 and in2 from the gradients of grad1 and grad2; None stands for zero."""
    if grad_grad1 is None and grad_grad2 is None:
        return None, None, None
    if not torch.is_grad_enabled():
        if grad_grad1 is None:
            of_in1, of_grad_out = INDEX_MUL.run_backward((grad_grad2,), (in1, grad_out, index), (), (True, True))  # type: ignore[arg-type]
            return of_grad_out, of_in1, None
        if grad_grad2 is None:
            return INDEX_MUL.run(grad_grad1, in2, index)[0], None, INDEX_MUL.run(grad_grad1, grad_out, index)[0]
        if in2.numel() and _library.runs_triton(FAMILY, in2):
            tensors = [t.contiguous() for t in (grad_out, in1, in2, index, grad_grad1, grad_grad2)]
            of_in1, of_in2, of_grad_out = launch_sums(*tensors, need2=True)
            return of_grad_out, of_in1, of_in2
    first = torch.zeros_like(in1) if grad_grad1 is None else grad_grad1
    second = torch.zeros_like(in2) if grad_grad2 is None else grad_grad2
    return reference.backward_backward(first, second, grad_out, in1, in2, index)


def check(in1: Tensor, in2: Tensor, index: Tensor) -> None:
    """Raise for arguments that do not fit together. Does not read the values of the indices."""
    check_tensors(in1=in1, in2=in2, idx1=index)
    if in1.dim() != 2 or in2.dim() != 2 or in1.shape[1] != in2.shape[1]:
        raise ValueError(
            f"in1 and in2 must be matrices with rows of the same length, got {list(in1.shape)} and {list(in2.shape)}"
        )
    if index.shape != in2.shape[:1]:
        raise ValueError(f"idx1 must hold one index per row of in2, {list(in2.shape[:1])}, got {list(index.shape)}")
    if not in1.shape[0] and index.shape[0]:
        raise ValueError(f"in1 has no rows for the {index.shape[0]} indices of idx1")
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"idx1 must be int64 or int32, got {index.dtype}")
    if in1.dtype != in2.dtype or not in1.is_floating_point():
        raise TypeError(f"in1 and in2 must have the same floating-point dtype, got {in1.dtype} and {in2.dtype}")
    if not in1.device == in2.device == index.device:
        raise ValueError(f"in1 is on {in1.device}, in2 on {in2.device}, idx1 on {index.device}")
    if max(in1.shape[0], *in2.shape) >= MOST_ROWS:
        raise ValueError(f"in1 and in2 may have at most {MOST_ROWS - 1} rows and columns")


def launch_forward(in1: Tensor, in2: Tensor, index: Tensor) -> Tensor:
    count, width = in2.shape
    out = torch.empty_like(in2)
    if not count:
        return out
    tile = config.tile(width, *config.FORWARD, facts(in2.device))
    column_blocks = -(-width // tile.block)
    kernels.index_mul_forward(
        (-(-count // tile.rows) * column_blocks,),
        (in1, in2, index, out),
        (count, in1.shape[0], width, column_blocks),
        ALIGN=math.gcd(width, 16),
        ROWS=tile.rows,
        BLOCK=tile.block,
        FULL=count % tile.rows == 0 and width % tile.block == 0,
        num_warps=tile.num_warps,
    )
    return out


def launch_backward(
    grad_out: Tensor, in1: Tensor, in2: Tensor, index: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    if not wanted[0]:
        return None, launch_forward(in1, grad_out, index)
    return launch_sums(grad_out, in1, in2, index, need2=wanted[1])[:2]


def launch_sums(
    grad_out: Tensor, in1: Tensor, in2: Tensor, index: Tensor, *grad_grads: Tensor, need2: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of in1, in2 and, given `grad_grads`, of grad_out; in2 must not be empty."""
    count, width = in2.shape
    in1_rows, device = in1.shape[0], facts(in2.device)
    grad_grad1, grad_grad2 = grad_grads or (None, None)
    keys, order = torch.sort(index.to(torch.int32), stable=True)
    rows = torch.arange(in1_rows + 1, dtype=torch.int32, device=in2.device)
    offsets = torch.searchsorted(keys, rows, out_int32=True)
    grad1 = torch.empty_like(in1)
    grad2 = torch.empty_like(in2) if need2 else None
    grad_grad_out = torch.empty_like(grad_out) if grad_grads else None
    tile, steps = config.tile(width, *config.BACKWARD, device), config.backward_steps(count, device)
    chunks, column_blocks = -(-count // steps), -(-width // tile.block)
    partials = torch.empty(2 * chunks, width, dtype=torch.float32, device=in2.device)
    sizes, shared = (count, in1_rows, width, column_blocks), {"ALIGN": math.gcd(width, 16), "STEPS": steps}
    kernels.index_mul_backward(
        (-(-chunks // tile.rows) * column_blocks,),
        (grad_out, in1, in2, grad_grad1, grad_grad2, keys, order, offsets, grad1, grad2, grad_grad_out, partials),
        sizes,
        **shared,
        CHUNKS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.num_warps,
    )
    kernels.index_mul_finish(
        (max(chunks, -(-in1_rows // config.FINISH_ROWS)) * column_blocks,),
        (keys, offsets, partials, grad1),
        sizes,
        **shared,
        ROWS=config.FINISH_ROWS,
        BLOCK=tile.block,
        num_warps=config.finish_warps(tile.block, device),
    )
    return grad1, grad2, grad_grad_out


FAMILY = _library.register_family(
    _library.OpFamily(
        "index_mul",
        "products with indexed rows, first and second derivatives",
        small_inputs=f"PyTorch's operators below {config.NATIVE_BELOW:,} float32 elements",
    )
)

INDEX_MUL = Op(
    FAMILY,
    "index_mul(Tensor in1, Tensor in2, Tensor index) -> Tensor",
    reference=reference.forward,
    kernels=Kernels(launch_forward, launch_backward),
    shapes=lambda in1, in2, index: in2.new_empty(in2.shape),
    saved=Saved("in1", "in2", "index"),
    derivative=Derivative(of=("in1", "in2")),
)
