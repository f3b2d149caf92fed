"""`index_mul_2d(in1, in2, idx1)` computes in1[idx1] * in2 for matrices in1 and in2, with first and second derivatives.

Both matrices have the same floating dtype and rows of the same length. idx1 has one index per row of in2, from 0 to the
number of rows of in1 less one. Gradients are deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import index_mul


class IndexMul2d_(torch.autograd.Function):
    """The autograd node behind `index_mul_2d`."""

    @staticmethod
    def forward(ctx, in1, in2, idx1):  # type: ignore[override]
        index_mul.check(in1, in2, idx1)
        return index_mul.INDEX_MUL.forward_and_save(ctx, in1, in2, idx1)

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[override]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # create_graph=True: the gradients themselves must be differentiable.
            return *IndexMul2dBackward_.apply(*ctx.saved_tensors, grad_out), None
        return *index_mul.INDEX_MUL.backward_from_saved(ctx, grad_out), None


class IndexMul2dBackward_(torch.autograd.Function):
    """The autograd node that computes the gradients of in1 and in2, for second derivatives."""

    @staticmethod
    def forward(ctx, in1, in2, idx1, grad_out):  # type: ignore[override]
        ctx.save_for_backward(in1, in2, idx1, grad_out)
        ctx.set_materialize_grads(False)  # an unused gradient stays None and costs no pass
        return index_mul.INDEX_MUL.run_backward((grad_out,), (in1, in2, idx1), (), (True, True))

    @staticmethod
    def backward(ctx, grad_grad_in1, grad_grad_in2):  # type: ignore[override]
        in1, in2, idx1, grad_out = ctx.saved_tensors
        arguments = (grad_grad_in1, grad_grad_in2, grad_out, in1, in2, idx1)
        of_grad_out, of_in1, of_in2 = index_mul.index_mul_backward_backward(*arguments)
        return of_in1, of_in2, None, of_grad_out


def index_mul_2d(in1: Tensor, in2: Tensor, idx1: Tensor) -> Tensor:
    """Compute in1[idx1] * in2."""
    index_mul.check(in1, in2, idx1)
    if index_mul.prefers_operators(in2):
        return index_mul.by_operators(in1, in2, idx1)
    return IndexMul2d_.apply(in1, in2, idx1)


index_mul_2d_backward = IndexMul2dBackward_.apply
