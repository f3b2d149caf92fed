"""Upstream's compiled module of this name: in1[idx1] * in2 and its derivatives, written to the caller's tensors.

Like upstream's kernels, the functions add to `grad_in1` and overwrite the other results. The float and half functions
are identical here and work in the tensors' dtypes.
"""

from __future__ import annotations

from torch import Tensor

from apex.ops.index_mul import INDEX_MUL, check, index_mul_backward_backward


def _check_result(name: str, result: Tensor, like: Tensor) -> None:
    if result.shape != like.shape or result.device != like.device:
        raise ValueError(
            f"{name} has shape {list(result.shape)} on {result.device}, expected {list(like.shape)} on {like.device}"
        )


def float_forward(out, in1, in2, idx1):
    check(in1, in2, idx1)
    _check_result("out", out, in2)
    out.copy_(INDEX_MUL.run(in1, in2, idx1)[0])


def float_backward(grad_in1, grad_in2, grad_out, in1, in2, idx1):
    check(in1, in2, idx1)
    _check_result("grad_in1", grad_in1, in1)
    _check_result("grad_in2", grad_in2, in2)
    _check_result("grad_out", grad_out, in2)
    of_in1, of_in2 = INDEX_MUL.run_backward((grad_out,), (in1, in2, idx1), (), (True, True))
    grad_in1.add_(of_in1)
    grad_in2.copy_(of_in2)


def float_backward_backward(grad_grad_out, grad_in1, grad_in2, grad_out, grad_grad_in1, grad_grad_in2, in1, in2, idx1):
    check(in1, in2, idx1)
    for name, result in (("grad_in1", grad_in1), ("grad_grad_in1", grad_grad_in1)):
        _check_result(name, result, in1)
    for name, result in (
        ("grad_grad_out", grad_grad_out),
        ("grad_in2", grad_in2),
        ("grad_out", grad_out),
        ("grad_grad_in2", grad_grad_in2),
    ):
        _check_result(name, result, in2)
    arguments = (grad_grad_in1, grad_grad_in2, grad_out, in1, in2, idx1)
    of_grad_out, of_in1, of_in2 = index_mul_backward_backward(*arguments)
    grad_grad_out.copy_(of_grad_out)
    grad_in1.add_(of_in1)
    grad_in2.copy_(of_in2)


half_forward = float_forward
half_backward = float_backward
half_backward_backward = float_backward_backward
