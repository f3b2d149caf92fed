"""Bottleneck and SpatialBottleneck: ResNet's block with frozen batch norms, one Function for each direction.

The stride is that of the first 1x1 convolution, as in the first ResNet. Images are [N, C, H, W], best in channels_last;
with `explicit_nhwc` they are [N, H, W, C], and so are the weights in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..._distributed.collectives import on_stream, wait_for
from ...ops._checks import check_floats
from ...ops._library import autocast_dtype, autocast_off, eager_apply, is_eager, once_differentiable
from ...ops.conv.bottleneck import (
    BottleneckResults,
    Exchange,
    bottleneck_backward,
    bottleneck_forward,
    bottleneck_reference,
    cast,
    scales_and_biases,
)


class FrozenBatchNorm2d(nn.Module):
    """x * scale + bias with scale = weight / sqrt(running_var), without an epsilon, and bias - running_mean * scale.

    All four are buffers; nothing of them is trained.
    """

    def __init__(self, n: int) -> None:
        super().__init__()
        for name, value in nn.BatchNorm2d(n).state_dict().items():
            if name != "num_batches_tracked":
                self.register_buffer(name, value)

    def get_scale_bias(self, nhwc: bool) -> list[Tensor]:
        """Scale and bias as [1, 1, 1, C] or [1, C, 1, 1], in the buffers' dtype."""
        shape = (1, 1, 1, -1) if nhwc else (1, -1, 1, 1)
        return [values.view(shape) for (values,) in scales_and_biases(_buffers([self]))]

    def forward(self, x: Tensor) -> Tensor:
        scale, bias = self.get_scale_bias(False)
        return x * scale + bias


def _buffers(norms: Sequence[nn.Module]) -> list[list[Any]]:
    """Weight, bias, mean and variance of each norm; as attributes of a module four of them would take 7 us."""
    return [list(norm._buffers.values()) for norm in norms]


def _forward(ctx, nhwc, stride, scale, bias, exchange, overlap, x, conv):  # type: ignore[no-untyped-def]
    dtype = autocast_dtype(x) or x.dtype
    x, *weights = [cast(_channels_second(each, nhwc), dtype) for each in (x, *conv)]
    with autocast_off(x):
        results = bottleneck_forward(x, weights, scale, bias, stride, exchange, overlap)
    ctx.save_for_backward(*results[:4], *results.scaled_weights, *scale)
    ctx.nhwc, ctx.stride, ctx.exchange, ctx.shape, ctx.count = nhwc, stride, exchange, x.shape, len(conv)
    return results.y.movedim(1, -1) if nhwc else results.y


def _backward(ctx: Any, grad_o: Tensor) -> list[Tensor | None]:
    """Gradients of x and of the weights."""
    pixels, out1, out2, y, *others = ctx.saved_tensors
    count = ctx.count
    results = BottleneckResults(pixels, out1, out2, y, others[:count])
    wanted = ctx.needs_input_grad[-1 - count :]
    dy = _channels_second(grad_o, ctx.nhwc)
    with autocast_off(dy):
        gradients = bottleneck_backward(dy, results, others[count:], ctx.shape, ctx.stride, wanted, ctx.exchange)
    return [each.movedim(1, -1) if ctx.nhwc and each is not None else each for each in gradients]


def _channels_second(tensor: Tensor, nhwc: bool) -> Tensor:
    return tensor.movedim(-1, 1) if nhwc else tensor


class BottleneckFunction(torch.autograd.Function):
    """A block; `scale` and `bias` are lists with an entry for each of the weights `conv`."""

    @staticmethod
    def forward(ctx, nhwc, stride_1x1, scale, bias, x, *conv):  # type: ignore[override]
        return _forward(ctx, nhwc, stride_1x1, scale, bias, None, False, x, conv)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o):  # type: ignore[override]
        return None, None, None, None, *_backward(ctx, grad_o)


_bottleneck = eager_apply(BottleneckFunction)


class SpatialBottleneckFunction(torch.autograd.Function):
    """A block of images divided by rows, for upstream's arguments.

    spatial_group_size, spatial_group_rank, spatial_communicator, spatial_halo_exchanger, spatial_method,
    use_delay_kernel, explicit_nhwc, stride_1x1, scale, bias, thresholdTop, thresholdBottom, x, *conv; of these the
    communicator, use_delay_kernel and the thresholds are not needed.
    """

    @staticmethod
    def forward(ctx, *arguments):  # type: ignore[override]
        size, rank, _, exchanger, method, _, nhwc, stride, scale, bias, _, _, x, *conv = arguments
        height = x.shape[1 if nhwc else 2]
        if height % stride and rank < size - 1:
            raise ValueError(
                f"x has {height} rows on rank {rank} of {size}; all ranks but the last need a multiple of the stride, "
                f"{stride}"
            )
        exchange = None if size == 1 else _exchange_by(exchanger, nhwc)
        return _forward(ctx, nhwc, stride, scale, bias, exchange, method != 2, x, conv)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o):  # type: ignore[override]
        return *[None] * 12, *_backward(ctx, grad_o)


def _exchange_by(exchanger: Any, nhwc: bool) -> Exchange:
    """An exchange of rows on the exchanger's first stream, which later work of the current one waits for."""

    def exchange(images: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        rows = [images[:, :, :1], images[:, :, -1:]]
        with on_stream(exchanger.stream1):
            found = exchanger.left_right_halo_exchange(*(each.movedim(1, -1) if nhwc else each for each in rows))

        def wait() -> tuple[Tensor, Tensor]:
            wait_for(exchanger.stream1)
            above, below = (_channels_second(each, nhwc) for each in found)
            return above, below

        return wait

    return exchange


class Bottleneck(nn.Module):
    """relu(norm(conv1x1(relu(norm(conv3x3(relu(norm(conv1x1(x)))))))) + shortcut), norms frozen, the stride in front.

    The shortcut is x, or a 1x1 convolution and a norm where stride or channels change. `use_cudnn` is accepted and
    changes nothing: one fused path serves every device, dtype and layout.
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
    ) -> None:
        super().__init__()
        if groups != 1 or dilation != 1 or norm_func is not None:
            raise RuntimeError(
                f"groups={groups}, dilation={dilation}, norm_func={norm_func}: only 1, 1 and None (frozen batch norms) "
                "are supported"
            )
        if stride < 1:
            raise ValueError(f"stride={stride}: at least 1 is needed")
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
        """The weights of the convolutions, that of the shortcut last."""
        weights = [self.conv1.weight, self.conv2.weight, self.conv3.weight]
        return weights if self.downsample is None else [*weights, self.downsample[0].weight]

    def _norms(self) -> list[Any]:
        norms = [self.bn1, self.bn2, self.bn3]
        return norms if self.downsample is None else [*norms, self.downsample[1]]

    def _scales_and_biases(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        if self.w_scale is None or self.w_bias is None:
            return scales_and_biases(_buffers(self._norms()))
        weight, scale = next(self.bn1.buffers()), self.w_scale[0]
        if (weight.device, weight.dtype) != (scale.device, scale.dtype):
            raise RuntimeError(
                f"scales were computed in {scale.dtype} on {scale.device}, the norms are now in {weight.dtype} on "
                f"{weight.device}; call get_scale_bias_callable() again"
            )
        return self.w_scale, self.w_bias

    def get_scale_bias_callable(self) -> Callable[[], None]:
        """Computes scales and biases once, and returns what renews them in place.

        From now on `forward` takes them as they are, so that a captured graph reads the same memory.
        """
        norms = self._norms()
        pairs = [norm.get_scale_bias(self.explicit_nhwc) for norm in norms]
        kept = self.w_scale, self.w_bias = tuple([pair[place] for pair in pairs] for place in range(2))

        def renew() -> None:
            for memories, values in zip(kept, scales_and_biases(_buffers(norms)), strict=True):
                torch._foreach_copy_([memory.view(-1) for memory in memories], values)

        return renew

    def _check(self, x: Tensor) -> None:
        check_floats(x=x)
        channels = self.conv1.in_channels
        if x.dim() != 4 or x.shape[-1 if self.explicit_nhwc else 1] != channels:
            layout = "[N, H, W, C]" if self.explicit_nhwc else "[N, C, H, W]"
            raise ValueError(f"x has shape {list(x.shape)}, expected {layout} with {channels} channels")

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        scales, biases = self._scales_and_biases()
        weights = self.w_conv
        if is_eager(x):
            return _bottleneck(self.explicit_nhwc, self.stride, scales, biases, x, *weights)
        images, *weights = (_channels_second(each, self.explicit_nhwc) for each in (x, *weights))
        y = bottleneck_reference(images, weights, scales, biases, self.stride)
        return y.movedim(1, -1) if self.explicit_nhwc else y


class SpatialBottleneck(Bottleneck):
    """A Bottleneck of images whose rows are divided among ranks, from top to bottom: equal to the undivided one.

    `spatial_parallel_args` are (group size, rank in the group, communicator, halo exchanger, method, use_delay_kernel).
    Methods 1 and 3 compute the 3x3 convolution while rows are on their way and its outer rows after that, method 2
    waits and computes it once; results are alike. Weight gradients are those of this rank's rows: sum them over ranks.
    The communicator and use_delay_kernel are accepted and not needed.
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
        sizes = (in_channels, bottleneck_channels, out_channels, stride, groups, dilation)
        super().__init__(*sizes, norm_func, use_cudnn, explicit_nhwc)
        self.spatial_parallel_args = (1, 0, None, None, 0, False)
        if spatial_parallel_args is not None:
            size, rank, _, exchanger, method, _ = spatial_parallel_args
            if not 0 <= rank < size:
                raise ValueError(f"spatial_parallel_args: rank {rank} is not one of a group of {size}")
            if size > 1 and (exchanger is None or method not in (1, 2, 3)):
                raise ValueError(
                    f"spatial_parallel_args: {size} ranks need a halo exchanger and method 1, 2 or 3, got {exchanger} "
                    f"and {method}"
                )
            self.spatial_parallel_args = spatial_parallel_args

    def forward(self, x: Tensor) -> Tensor:
        if self.spatial_parallel_args[0] == 1:
            return super().forward(x)
        self._check(x)
        options = (*self.spatial_parallel_args, self.explicit_nhwc, self.stride, *self._scales_and_biases(), None, None)
        return SpatialBottleneckFunction.apply(*options, x, *self.w_conv)
