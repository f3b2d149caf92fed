"""Functions that convolve images and then apply bias, ReLU, a mask or a frozen scale.

`bias` and `scale` have a value per channel, as [C] or [1, C, 1, 1]. Inside `torch.autocast` (or `apex.amp`) all
arguments except the mask are cast to autocast's dtype. Only results computed by PyTorch's operators alone can be
differentiated twice.
"""

from __future__ import annotations

from torch import Tensor

from ...ops._checks import check_floats
from ...ops.conv import ConvBias_ as ConvBias_
from ...ops.conv import ConvBiasMaskReLU_, ConvBiasReLU_, ConvFrozenScaleBiasReLU_, ConvSpec, conv_bias

ConvBiasReLU = ConvBiasReLU_.apply
ConvBiasMaskReLU = ConvBiasMaskReLU_.apply
ConvFrozenScaleBiasReLU = ConvFrozenScaleBiasReLU_.apply


def ConvBias(x: Tensor, weight: Tensor, bias: Tensor, padding: int, stride: int) -> Tensor:
    """Compute conv(x, weight) + bias by PyTorch's convolution, which includes the bias."""
    check_floats(x=x, weight=weight, bias=bias)
    return conv_bias(x, weight, bias, ConvSpec(padding, stride))
