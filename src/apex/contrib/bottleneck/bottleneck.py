"""Bottleneck and SpatialBottleneck: ResNet's block with frozen batch norms as a single autograd node.

Images are [N, C, H, W], fastest in channels_last. With `explicit_nhwc`, images and the weights in checkpoints are
[N, H, W, C].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...ops._checks import check_floats
from ...ops._library import autocast_dtype, autocast_off, is_eager, once_differentiable
from ...ops.conv.bottleneck import (
    bottleneck_backward,
    bottleneck_forward,
    bottleneck_reference,
    cast,
    scales_and_biases,
)
from .halo_exchangers import HaloPadder


class FrozenBatchNorm2d(nn.Module):
    """A frozen batch norm: x * scale + shift, with scale = weight / sqrt(running_var) and without an epsilon.

    The shift is bias - running_mean * scale. All four tensors are buffers.
    """

    def __init__(self, n: int) -> None:
        super().__init__()
        for name, value in nn.BatchNorm2d(n).state_dict().items():
            if name != "num_batches_tracked":
                self.register_buffer(name, value)

    def get_scale_bias(self, nhwc: bool) -> list[Tensor]:
        """Return scale and bias as [1, 1, 1, C] or [1, C, 1, 1], in the buffers' dtype."""
        shape = (1, 1, 1, -1) if nhwc else (1, -1, 1, 1)
        return [values.view(shape) for (values,) in scales_and_biases([list(self._buffers.values())])]

    def forward(self, x: Tensor) -> Tensor:
        scale, bias = self.get_scale_bias(False)
        return x * scale + bias


def _forward(ctx, nhwc, stride, scale, bias, x, conv, pad=None, overlap=False):  # type: ignore[no-untyped-def]
    dtype = autocast_dtype(x) or x.dtype
    x, *weights = [cast(_channels_second(tensor, nhwc), dtype) for tensor in (x, *conv)]
    norms = bias if scale is None else list(zip(scale, bias, strict=True))
    with autocast_off(x):
        y, saved = bottleneck_forward(x, weights, norms, stride, pad, overlap)
    ctx.save_for_backward(*saved)
    ctx.nhwc, ctx.stride, ctx.pad, ctx.count = nhwc, stride, pad, 1 + len(conv)
    return _channels_last(y, nhwc)


def _channels_second(tensor: Tensor, nhwc: bool) -> Tensor:
    return tensor.movedim(-1, 1) if nhwc else tensor


def _channels_last(tensor: Tensor, nhwc: bool) -> Tensor:
    return tensor.movedim(1, -1) if nhwc else tensor


class BottleneckFunction(torch.autograd.Function):
    """The autograd node of a bottleneck block.

    `scale` and `bias` hold one tensor for each weight in `conv`. If `scale` is None, `bias` holds the buffers of each
    norm instead.
    """

    @staticmethod
    def forward(ctx, nhwc, stride_1x1, scale, bias, x, *conv):  # type: ignore[override]
        return _forward(ctx, nhwc, stride_1x1, scale, bias, x, conv)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o):  # type: ignore[override]
        needs_grad = ctx.needs_input_grad[-ctx.count :]
        dy = _channels_second(grad_o, ctx.nhwc)
        with autocast_off(dy):
            gradients = bottleneck_backward(dy, ctx.saved_tensors, ctx.stride, needs_grad, ctx.pad)
        gradients = [gradient if gradient is None else _channels_last(gradient, ctx.nhwc) for gradient in gradients]
        return *[None] * (len(ctx.needs_input_grad) - ctx.count), *gradients


class SpatialBottleneckFunction(BottleneckFunction):
    """The autograd node of a bottleneck block whose images are split by rows over ranks.

    It has upstream's arguments; the thresholds are not used.
    """

    @staticmethod
    def forward(ctx, *arguments):  # type: ignore[override]
        size, rank, _, exchanger, method, _, nhwc, stride, scale, bias, _top, _bottom, x, *conv = arguments
        height = x.shape[1 if nhwc else 2]
        if height % stride and rank < size - 1:
            raise ValueError(
                f"x has {height} rows on rank {rank} of {size}; all ranks but the last need a multiple of the stride, "
                f"{stride}"
            )
        pad = None if size == 1 else HaloPadder(exchanger)
        return _forward(ctx, nhwc, stride, scale, bias, x, conv, pad, method != 2)


class Bottleneck(nn.Module):
    """relu(norm(conv1x1(relu(norm(conv3x3(relu(norm(conv1x1(x)))))))) + shortcut) with frozen norms.

    The first convolution has the stride. The shortcut is x, or a 1x1 convolution and a norm if the stride is not 1 or
    the number of channels changes. `use_cudnn` is accepted and has no effect: one implementation serves every device,
    dtype and layout. `SpatialBottleneck` describes `spatial_parallel_args`.
    """

    def __init__(
        self,
        in_channels: int,
        bottleneck_channels: int,
        out_channels: int,
        stride: int = 1,
        groups: int = 1,
        dilation: int = 1,
        norm_func: Any = None,
        use_cudnn: bool = False,
        explicit_nhwc: bool = False,
        spatial_parallel_args: tuple | None = None,
    ) -> None:
        super().__init__()
        if groups != 1 or dilation != 1 or norm_func is not None:
            raise RuntimeError(
                f"groups={groups}, dilation={dilation}, norm_func={norm_func}: only 1, 1 and None (frozen batch norms) "
                "are supported"
            )
        if stride < 1:
            raise ValueError(f"stride={stride}: at least 1 is needed")
        self.spatial_parallel_args = spatial_parallel_args or (1, 0, None, None, 0, False)
        size, rank, _, exchanger, method, _ = self.spatial_parallel_args
        if not 0 <= rank < size:
            raise ValueError(f"spatial_parallel_args: rank {rank} is not one of a group of {size}")
        if size > 1 and (exchanger is None or method not in (1, 2, 3)):
            raise ValueError(
                f"spatial_parallel_args: {size} ranks need a halo exchanger and method 1, 2 or 3, got {exchanger} "
                f"and {method}"
            )
        self.downsample = None
        if stride != 1 or in_channels != out_channels:
            shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, FrozenBatchNorm2d(out_channels))
        self.conv1 = nn.Conv2d(in_channels, bottleneck_channels, 1, stride, bias=False)
        self.conv2 = nn.Conv2d(bottleneck_channels, bottleneck_channels, 3, padding=1, bias=False)
        self.conv3 = nn.Conv2d(bottleneck_channels, out_channels, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.bn1, self.bn2 = FrozenBatchNorm2d(bottleneck_channels), FrozenBatchNorm2d(bottleneck_channels)
        self.bn3 = FrozenBatchNorm2d(out_channels)
        self.stride, self.use_cudnn, self.explicit_nhwc = stride, use_cudnn, explicit_nhwc
        self.w_scale: list[Tensor] | None = None
        self.w_bias: list[Tensor] | None = None
        for weight in self.w_conv:
            nn.init.kaiming_uniform_(weight, a=1)
            if explicit_nhwc:
                weight.data = weight.data.movedim(1, -1).contiguous()

    @property
    def w_conv(self) -> list[Any]:
        """Return the convolutions' weights; the shortcut's weight comes last."""
        modules: Any = self._modules  # reading a submodule as an attribute takes a microsecond
        shortcut = self.downsample
        weights = [modules["conv1"].weight, modules["conv2"].weight, modules["conv3"].weight]
        return weights if shortcut is None else [*weights, shortcut[0].weight]

    def _norms(self) -> list[Any]:
        modules: Any = self._modules
        shortcut = self.downsample
        norms = [modules["bn1"], modules["bn2"], modules["bn3"]]
        return norms if shortcut is None else [*norms, shortcut[1]]

    def _scales_and_biases(self) -> tuple[Any, Any]:
        """Return the tensors kept by `get_scale_bias_callable`; without them, None and the norms' buffers."""
        if self.w_scale is None or self.w_bias is None:
            return None, [tuple(norm._buffers.values()) for norm in self._norms()]
        weight, scale = next(self.bn1.buffers()), self.w_scale[0]
        if (weight.device, weight.dtype) != (scale.device, scale.dtype):
            raise RuntimeError(
                f"scales were computed in {scale.dtype} on {scale.device}, the norms are now in {weight.dtype} on "
                f"{weight.device}; call get_scale_bias_callable() again"
            )
        return self.w_scale, self.w_bias

    def get_scale_bias_callable(self) -> Callable[[], None]:
        """Compute scales and biases once, for use in graphs, and return a function that renews them in place.

        After this call `forward` reads the kept scales and biases and no longer the norms' buffers.
        """
        norms = self._norms()
        pairs = [norm.get_scale_bias(self.explicit_nhwc) for norm in norms]
        stored = self.w_scale, self.w_bias = tuple([pair[index] for pair in pairs] for index in range(2))

        def renew() -> None:
            current = scales_and_biases([tuple(norm._buffers.values()) for norm in norms])
            for tensors, values in zip(stored, current, strict=True):
                torch._foreach_copy_([memory.view(-1) for memory in tensors], values)

        return renew

    def forward(self, x: Tensor) -> Tensor:
        check_floats(x=x)
        nhwc, stride, weights = self.explicit_nhwc, self.stride, self.w_conv
        channel_dim = -1 if nhwc else 1
        channels = weights[0].shape[channel_dim]
        if x.dim() != 4 or x.shape[channel_dim] != channels:
            layout = "[N, H, W, C]" if nhwc else "[N, C, H, W]"
            raise ValueError(f"x has shape {list(x.shape)}, expected {layout} with {channels} channels")
        scales, biases = self._scales_and_biases()
        if self.spatial_parallel_args[0] > 1:
            options = (*self.spatial_parallel_args, nhwc, stride, scales, biases, None, None)
            return SpatialBottleneckFunction.apply(*options, x, *weights)
        if is_eager(x):
            return BottleneckFunction.apply(nhwc, stride, scales, biases, x, *weights)
        if scales is None:
            scales, biases = scales_and_biases(biases)
        images, *weights = (_channels_second(tensor, nhwc) for tensor in (x, *weights))
        return _channels_last(bottleneck_reference(images, weights, scales, biases, stride), nhwc)


class SpatialBottleneck(Bottleneck):
    """A Bottleneck of images whose rows are split over ranks from top to bottom; equal to the unsplit block.

    `spatial_parallel_args` are (group size, rank in the group, communicator, halo exchanger, method, use_delay_kernel).
    Methods 1 and 3 compute the inner rows of the 3x3 convolution during the halo exchange and its outer rows after it.
    Method 2 waits for the exchange and computes all rows at once. All methods give the same results up to rounding.
    Weight gradients cover this rank's rows only: sum them over ranks. The communicator and use_delay_kernel are
    accepted and not used.
    """
