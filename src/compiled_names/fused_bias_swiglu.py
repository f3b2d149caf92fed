"""The compiled module of this name in AMD's apex: SwiGLU with a bias, forward and backward, without autograd.

As there, `backward` gives the gradient of the input alone; the bias's is its sum over rows. `apex.fused_bias_swiglu`
has autograd, and computes both gradients in one pass. Here the bias may be None as well.
"""

from __future__ import annotations

from torch import Tensor

from apex.ops.glu import check, glu_backward, glu_forward


def forward(input: Tensor, bias: Tensor | None) -> Tensor:
    check(input, bias, "silu")
    return glu_forward(input, bias, "silu")


def backward(grad_output: Tensor, input: Tensor, bias: Tensor | None) -> Tensor:
    check(input, bias, "silu")
    return glu_backward(grad_output, input, bias, "silu", bias_grad=False)[0]
