"""The compiled module of this name in AMD's apex: SwiGLU with a bias, forward and backward, without autograd.

As in AMD's module, `backward` returns only the gradient of the input; the bias's gradient is its sum over rows.
`apex.fused_bias_swiglu` has autograd and computes both gradients in one pass. Here the bias may be None too.
"""

from __future__ import annotations

from torch import Tensor

from apex.ops._checks import check_shape
from apex.ops.glu import GLU, check


def forward(input: Tensor, bias: Tensor | None) -> Tensor:
    check(input, bias, "silu")
    return GLU.run(input, bias, "silu")[0]


def backward(grad_output: Tensor, input: Tensor, bias: Tensor | None) -> Tensor:
    check(input, bias, "silu")
    check_shape("the gradient", grad_output, (*input.shape[:-1], input.shape[-1] // 2), input.device)
    return GLU.run_backward((grad_output,), (input, bias), ("silu",), (True, False))[0]
