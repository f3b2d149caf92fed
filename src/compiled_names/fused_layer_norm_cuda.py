"""Upstream's compiled module of this name: layer norm and RMS norm, forward and backward, without autograd.

Statistics are one float32 per row (float64 for float64 inputs). `input_or_output` is the input, or the output if
`memory_efficient`. Layer norm returns [output, mean, invvar], RMS norm [output, invvar].
"""

from __future__ import annotations

import math

from torch import Tensor

from apex.ops._checks import check_shape
from apex.ops.norm import NORM, checked_shape, joined_statistics


def _forward(input, normalized_shape, gamma, beta, epsilon, subtract_mean, out_dtype) -> list[Tensor]:
    row_length = math.prod(checked_shape(input, normalized_shape, gamma, beta))
    settings = (row_length, epsilon, subtract_mean, False, out_dtype, input.dtype)
    output, statistics = NORM.run(input, gamma, beta, *settings)
    invvar, *mean = statistics.unbind()
    return [output, *mean, invvar]


def _backward(
    dout, mean, invvar, input_or_output, normalized_shape, gamma, beta, epsilon, memory_efficient, subtract_mean
) -> list[Tensor]:
    row_length = math.prod(checked_shape(input_or_output, normalized_shape, gamma, beta))
    statistics = joined_statistics(mean, invvar, input_or_output, row_length, subtract_mean, memory_efficient)
    check_shape("the gradient", dout, input_or_output.shape, input_or_output.device)
    settings = (row_length, epsilon, subtract_mean, memory_efficient, dout.dtype, input_or_output.dtype)
    wanted = (True, gamma is not None, beta is not None)
    gradients = NORM.run_backward((dout,), (input_or_output, gamma, beta, statistics), settings, wanted)
    return [gradient for gradient in gradients if gradient is not None]


def forward_affine(input, normalized_shape, gamma, beta, epsilon):
    return _forward(input, normalized_shape, gamma, beta, epsilon, True, input.dtype)


def forward(input, normalized_shape, epsilon):
    return _forward(input, normalized_shape, None, None, epsilon, True, input.dtype)


def forward_affine_mixed_dtypes(input, normalized_shape, gamma, beta, epsilon):
    return _forward(input, normalized_shape, gamma, beta, epsilon, True, gamma.dtype)


def rms_forward_affine(input, normalized_shape, gamma, epsilon):
    return _forward(input, normalized_shape, gamma, None, epsilon, False, input.dtype)


def rms_forward(input, normalized_shape, epsilon):
    return _forward(input, normalized_shape, None, None, epsilon, False, input.dtype)


def rms_forward_affine_mixed_dtypes(input, normalized_shape, gamma, epsilon):
    return _forward(input, normalized_shape, gamma, None, epsilon, False, gamma.dtype)


def backward_affine(dout, mean_, invvar, input_or_output, normalized_shape, gamma, beta, epsilon, memory_efficient):
    return _backward(
        dout, mean_, invvar, input_or_output, normalized_shape, gamma, beta, epsilon, memory_efficient, True
    )


def backward(dout, mean_, invvar, input_or_output, normalized_shape, epsilon, memory_efficient):
    """Return the gradient of the input."""
    return _backward(
        dout, mean_, invvar, input_or_output, normalized_shape, None, None, epsilon, memory_efficient, True
    )[0]


def rms_backward_affine(dout, invvar, input_or_output, normalized_shape, gamma, epsilon, memory_efficient):
    return _backward(
        dout, None, invvar, input_or_output, normalized_shape, gamma, None, epsilon, memory_efficient, False
    )


def rms_backward(dout, invvar, input_or_output, normalized_shape, epsilon, memory_efficient):
    """Return the gradient of the input."""
    return _backward(
        dout, None, invvar, input_or_output, normalized_shape, None, None, epsilon, memory_efficient, False
    )[0]
