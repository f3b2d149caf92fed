"""Convolution, bias and ReLU by one call of cuDNN: all that tensors of one kind decide, found by one lookup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import _library
from .._device import stream_here
from .._plans import Plans, kind
from .._results import Maker, maker
from ..dense.op import plan_activation_backward
from .op import ConvSpec, check, conv_bias_relu_gradients, cudnn_does_it

if TYPE_CHECKING:
    from ..dense.launches import ActivationPlan

_convolution_backward = torch.ops.aten.convolution_backward.default


class _Backward(NamedTuple):
    """The pass over the gradient before that of the convolution: its launches and what makes its results."""

    launches: ActivationPlan
    dz: Maker
    dbias: Maker | None


class ConvPlan:
    """What is left to do for tensors of one kind."""

    def __init__(self, bias: Tensor, spec: ConvSpec) -> None:
        self._spec, self._index = spec, bias.device.index
        self._bias_shape, self._flat = bias.shape, bias.dim() == 1
        stride, padding = (spec.stride,) * 2, (spec.padding,) * 2
        self._forward = (stride, padding, (1, 1), 1)
        self._gradients = (stride, padding, (1, 1), False, (0, 0), 1)
        self._backward: dict[tuple, _Backward | None] = {}

    def run(self, input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """relu(conv(input, weight) + bias), without autograd."""
        return torch.cudnn_convolution_relu(input, weight, bias if self._flat else bias.view(-1), *self._forward)

    def gradients(
        self, dy: Tensor, output: Tensor, input: Tensor, weight: Tensor, wanted: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of input, weight and bias, where they are `wanted`."""
        of_input, of_weight, of_bias = wanted[:3]
        strides = output.stride()
        try:
            backward = self._backward[strides, of_bias]
        except KeyError:
            backward = self._backward[strides, of_bias] = self._plan_backward(output, of_bias)
        if backward is None or dy.stride() != strides:
            rest = (self._spec, of_bias, (of_input, of_weight))
            dx, dweight, dbias = conv_bias_relu_gradients(dy, output, input, weight, *rest)
            return dx, dweight, None if dbias is None else dbias.view(self._bias_shape)
        stream = stream_here(self._index)
        dz = backward.dz(stream)
        dbias = None if backward.dbias is None else backward.dbias(stream)
        backward.launches.fill(stream, dy, output, dz, dbias)
        if not (of_input or of_weight):
            return None, None, dbias
        dx, dweight, _ = _convolution_backward(dz, input, weight, None, *self._gradients, (of_input, of_weight, False))
        return dx, dweight, dbias

    def _plan_backward(self, output: Tensor, of_bias: bool) -> _Backward | None:
        if not output.is_contiguous(memory_format=torch.channels_last):
            return None
        channels, dtype, device = output.shape[1], output.dtype, output.device
        launches = plan_activation_backward(output, "relu", of_bias, (output.numel() // channels, channels))
        if launches is None:
            return None
        dz = maker(output.shape, dtype, device, output.stride())
        return _Backward(launches, dz, maker(self._bias_shape, dtype, device) if of_bias else None)


_UNKNOWN: Any = object()
_plans: Plans[ConvPlan | None] = Plans()


def plan_for(input: Tensor, weight: Tensor, bias: Tensor, padding: int, stride: int) -> ConvPlan | None:
    """The plan for tensors that fit each other, else an exception; None where it takes more than the one call."""
    if not _library.may_plan(input):
        return None
    key = (
        *(input.shape, input.dtype, input.device, weight.shape, weight.dtype, weight.device),
        *(kind(bias), padding, stride, torch._C._get_cudnn_enabled()),
    )
    plan = _plans.get(key, _UNKNOWN)
    if plan is _UNKNOWN:
        spec = ConvSpec(padding, stride)
        check(input, weight, spec, bias=bias)
        quick = cudnn_does_it(input, weight, bias) and bias.is_contiguous()
        plan = _plans.keep(key, ConvPlan(bias, spec) if quick else None)
    return plan
