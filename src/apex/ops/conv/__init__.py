"""Bias, ReLU, mask and frozen scale behind a convolution."""

from .op import (
    FAMILY,
    ConvSpec,
    composed_conv_bias_relu,
    conv_bias,
    conv_bias_gradients,
    conv_bias_relu,
    conv_bias_relu_gradients,
    plan_gradients,
    small_with_gradients,
)

__all__ = [
    "FAMILY",
    "ConvSpec",
    "composed_conv_bias_relu",
    "conv_bias",
    "conv_bias_gradients",
    "conv_bias_relu",
    "conv_bias_relu_gradients",
    "plan_gradients",
    "small_with_gradients",
]
