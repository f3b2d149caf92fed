"""Bias, ReLU, mask and frozen scale behind a convolution."""

from .functions import ConvBias_, ConvBiasMaskReLU_, ConvBiasReLU_, ConvFrozenScaleBiasReLU_
from .op import FAMILY, ConvSpec, conv_bias, conv_bias_gradients, conv_bias_relu, conv_bias_relu_gradients
