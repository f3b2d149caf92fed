"""Products with indexed rows, without autograd: checks and dispatch."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _library
from .._checks import check_tensors
from . import reference
from .launches import triton_backward, triton_forward
from .self_check import self_check

# Below this many elements the host is the limit, and sorting from Python takes more of it than PyTorch's operators do:
# a step of 8192x256 takes 553 us of an H200's host, that of the operators 373.
NATIVE_BELOW = 1 << 23
# Positions and rows are 32-bit in the kernels.
MOST_ROWS = 2**31 - 2**16

FAMILY = _library.register_family(
    _library.OpFamily(
        "index_mul",
        "products with indexed rows, first and second derivatives",
        self_check,
        small_inputs=f"PyTorch's operators below {NATIVE_BELOW:,} float32 elements",
    )
)


def prefers_operators(in2: Tensor) -> bool:
    """Whether PyTorch's operators under its own autograd are the quicker way to the same result.

    They are where the host is the limit, and where there are no kernels. Half precision is not for them: they would
    round products before they add them up.
    """
    if in2.dtype not in (torch.float32, torch.float64):
        return False
    small = in2.numel() < NATIVE_BELOW and _library.requested() == "auto"
    return small or not _library.runs_triton(FAMILY, in2)


def by_operators(in1: Tensor, in2: Tensor, index: Tensor) -> Tensor:
    """in1[index] * in2, differentiable by PyTorch's autograd and deterministic."""
    if in2.is_cuda:
        return in1[index] * in2
    return reference.forward(in1, in2, index)


def index_mul_forward(in1: Tensor, in2: Tensor, index: Tensor) -> Tensor:
    """in1[index] * in2 for arguments that were checked."""
    if not in2.numel():
        return torch.empty_like(in2)
    if _library.runs_triton(FAMILY, in2):
        return triton_forward(in1, in2, index)
    return reference.forward(in1, in2, index)


def index_mul_backward(
    grad_out: Tensor, in1: Tensor, in2: Tensor, index: Tensor, *, need1: bool = True, need2: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of in1 and in2 for arguments that were checked; None where not needed. Deterministic."""
    if not need1:
        return None, index_mul_forward(in1, grad_out, index) if need2 else None
    if not in2.numel():
        return torch.zeros_like(in1), torch.empty_like(in2) if need2 else None
    if _library.runs_triton(FAMILY, in2):
        grad1, grad2, _ = triton_backward(grad_out, in1, in2, index, need2)
        return grad1, grad2
    return reference.backward(grad_out, in1, in2, index, need1=need1, need2=need2)


def index_mul_backward_backward(
    grad_grad1: Tensor | None,
    grad_grad2: Tensor | None,
    grad_out: Tensor,
    in1: Tensor,
    in2: Tensor,
    index: Tensor,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of grad_out, in1 and in2 from those of what `index_mul_backward` returned; None stands for zero."""
    if grad_grad1 is None and grad_grad2 is None:
        return None, None, None
    if torch.is_grad_enabled():  # derivatives of derivatives come from PyTorch's operators
        first = torch.zeros_like(in1) if grad_grad1 is None else grad_grad1
        second = torch.zeros_like(in2) if grad_grad2 is None else grad_grad2
        return reference.backward_backward(first, second, grad_out, in1, in2, index)
    if grad_grad1 is None:
        assert grad_grad2 is not None
        of_in1, of_grad_out = index_mul_backward(grad_grad2, in1, grad_out, index)
        return of_grad_out, of_in1, None
    if grad_grad2 is None:
        return index_mul_forward(grad_grad1, in2, index), None, index_mul_forward(grad_grad1, grad_out, index)
    if in2.numel() and _library.runs_triton(FAMILY, in2):
        of_in1, of_in2, of_grad_out = triton_backward(grad_out, in1, in2, index, True, grad_grad1, grad_grad2)
        return of_grad_out, of_in1, of_in2
    return reference.backward_backward(grad_grad1, grad_grad2, grad_out, in1, in2, index)


def check(in1: Tensor, in2: Tensor, index: Tensor) -> None:
    """Refuses arguments that do not fit, in clear words. The values of the indices are not looked at."""
    if not (isinstance(in1, Tensor) and isinstance(in2, Tensor) and isinstance(index, Tensor)):
        check_tensors(in1=in1, in2=in2, idx1=index)
    if not (
        in1.dim() == in2.dim() == 2
        and index.shape == in2.shape[:1]
        and in1.shape[1] == in2.shape[1]
        and in1.dtype == in2.dtype
        and in1.is_floating_point()
        and index.dtype in (torch.int64, torch.int32)
        and in1.device == in2.device == index.device
        and max(in1.shape[0], in2.shape[0], in2.shape[1]) < MOST_ROWS
    ):
        _explain(in1, in2, index)


def _explain(in1: Tensor, in2: Tensor, index: Tensor) -> None:
    if in1.dim() != 2 or in2.dim() != 2 or in1.shape[1] != in2.shape[1]:
        raise ValueError(
            f"in1 and in2 must be matrices with rows of the same length, got {list(in1.shape)} and {list(in2.shape)}"
        )
    if index.shape != in2.shape[:1]:
        raise ValueError(f"idx1 must hold one index per row of in2, {list(in2.shape[:1])}, got {list(index.shape)}")
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"idx1 must be int64 or int32, got {index.dtype}")
    if in1.dtype != in2.dtype or not in1.is_floating_point():
        raise TypeError(f"in1 and in2 must have the same floating-point dtype, got {in1.dtype} and {in2.dtype}")
    if not in1.device == in2.device == index.device:
        raise ValueError(f"in1 is on {in1.device}, in2 on {in2.device}, idx1 on {index.device}")
    raise ValueError(f"in1 and in2 may have at most {MOST_ROWS - 1} rows and columns")
