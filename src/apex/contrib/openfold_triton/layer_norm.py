"""OpenFold's layer norm as an autograd Function."""

from __future__ import annotations

import torch

from ...ops import norm
from ...ops._checks import check_floats


class LayerNormSmallShapeOptImpl(torch.autograd.Function):
    """The autograd node of layer norm over the trailing `normalized_shape`; the output has the input's dtype."""

    @staticmethod
    def forward(ctx, inputs, normalized_shape, weight, bias, eps=1e-05):  # type: ignore[override]
        check_floats(inputs=inputs, weight=weight, bias=bias)
        return norm.forward_and_save(ctx, inputs, weight, bias, normalized_shape, eps, False, True, inputs.dtype)

    @staticmethod
    def backward(ctx, d_y):  # type: ignore[override]
        needed = ctx.needs_input_grad
        wanted = (needed[0], needed[2], needed[3])
        dinputs, dweight, dbias = norm.NORM.backward_from_saved(ctx, d_y, wanted=wanted)
        return dinputs, None, dweight, dbias, None
