"""BatchNorm2d_NHWC: batch norm of [N, H, W, C]; normalisation, addend and ReLU take one pass after the statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ...ops._checks import check_floats
from ...ops._library import once_differentiable
from ...ops.batch_norm import (
    BatchNormSpec,
    BatchStatistics,
    Channels,
    average_factor,
    batch_norm_with_statistics,
    check_values,
    forward,
    save,
    saved_gradients,
)
from ...parallel._statistics import compare_first, consecutive_exchange, consecutive_group


def check_if_rocm_pytorch() -> bool:
    """Return whether this PyTorch was built for AMD GPUs."""
    return torch.version.hip is not None


IS_ROCM_PYTORCH = check_if_rocm_pytorch()


def check_and_convert_channels_last(tensor: Tensor, torch_channels_last: bool) -> Tensor:
    """Return the tensor, converted to PyTorch's channels-last format if `torch_channels_last`."""
    return tensor.contiguous(memory_format=torch.channels_last) if torch_channels_last else tensor


def _forward(ctx: Any, x, z, s, b, rm, riv, mini_m, mini_riv, mom, epsilon, fuse_relu, is_train, rest) -> Tensor:
    """Run the forward pass; `rest` starts with `torch_channels_last` if the caller uses ROCm's argument list."""
    channels_last, bn_group = (rest[0], rest[1]) if len(rest) == 12 else (False, rest[0])
    exchange = consecutive_exchange("bn_group", bn_group)
    exchange = exchange if is_train else None
    spec = BatchNormSpec(epsilon, mom, is_train, fuse_relu, 1 if channels_last else -1)
    x = check_and_convert_channels_last(x, channels_last)
    y, channels = forward(x, z, Channels(rm, riv, s, b), spec, exchange)
    if is_train:
        mini_m.copy_(channels.mean)
        mini_riv.copy_((channels.variance + epsilon).rsqrt())
    save(ctx, x, z, y, channels, spec, exchange)
    return y


class bn_NHWC_impl(torch.autograd.Function):
    """The autograd node of batch norm and ReLU with upstream's arguments; those after `bn_group` have no effect."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, x, s, b, rm, riv, mini_m, mini_riv, ret_cta, mom, epsilon, fuse_relu, is_train, *rest
    ):
        return _forward(ctx, x, None, s, b, rm, riv, mini_m, mini_riv, mom, epsilon, fuse_relu, is_train, rest)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):  # type: ignore[override]
        wants_x, wants_scale, wants_bias, *rest = ctx.needs_input_grad
        dx, _, dscale, dbias = saved_gradients(ctx, grad_y, (wants_x, False, wants_scale, wants_bias))
        return dx, dscale, dbias, *(None,) * len(rest)


class bn_addrelu_NHWC_impl(torch.autograd.Function):
    """The autograd node of batch norm, addend and ReLU with upstream's arguments.

    The arguments after `bn_group` have no effect.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, x, z, s, b, rm, riv, mini_m, mini_riv, grid_dim_y, ret_cta, mom, epsilon, is_train, *rest
    ):
        return _forward(ctx, x, z, s, b, rm, riv, mini_m, mini_riv, mom, epsilon, True, is_train, rest)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y):  # type: ignore[override]
        return *saved_gradients(ctx, grad_y, ctx.needs_input_grad[:4]), *(None,) * (len(ctx.needs_input_grad) - 4)


class BatchNorm2d_NHWC(_BatchNorm):
    """Batch norm of [N, H, W, C], plus an optional addend `z`, then ReLU if `fuse_relu`, which an addend requires.

    With `torch_channels_last`, inputs are [N, C, H, W] and are converted to PyTorch's channels-last format if needed.
    `bn_group` is the number of processes, of consecutive ranks, that share their statistics in training. All processes
    must construct the module, and gradients of its parameters are averages over the group. `max_cta_per_sm`,
    `cta_launch_margin` and `multi_stream` are accepted and have no effect: the kernels choose their launch and stream.
    `minibatch_mean` and `minibatch_riv` are the last batch's mean and one over its standard deviation.
    """

    def __init__(
        self,
        num_features: int,
        fuse_relu: bool = False,
        bn_group: int = 1,
        max_cta_per_sm: int = 2,
        cta_launch_margin: int = 12,
        multi_stream: bool = False,
        torch_channels_last: bool = False,
    ) -> None:
        if isinstance(max_cta_per_sm, bool):
            raise TypeError(
                f"max_cta_per_sm={max_cta_per_sm} is a bool; torch_channels_last, which is in this place in ROCm's "
                "variant, must be given by name"
            )
        if max_cta_per_sm < 1:
            raise ValueError(f"max_cta_per_sm={max_cta_per_sm} must be at least 1")
        consecutive_group("bn_group", bn_group)
        super().__init__(num_features)
        self.fuse_relu = fuse_relu
        self.bn_group = bn_group
        self.max_cta_per_sm = max_cta_per_sm
        self.cta_launch_margin = cta_launch_margin
        self.multi_stream = multi_stream
        self.torch_channels_last = torch_channels_last
        self._batch: BatchStatistics | None = None

    @property
    def minibatch_mean(self) -> Tensor:
        """Return each channel's mean in the last training batch; zeros before the first one."""
        assert self.running_mean is not None  # always tracked
        return torch.zeros_like(self.running_mean) if self._batch is None else self._batch.asked().mean

    @property
    def minibatch_riv(self) -> Tensor:
        """Return one over each channel's standard deviation in the last training batch; ones before the first one."""
        assert self.running_var is not None
        if self._batch is None:
            return torch.ones_like(self.running_var)
        return self._batch.asked().inverse_deviation(self.eps)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            check_floats(x=x)
        if z is not None and (not isinstance(z, Tensor) or not z.is_floating_point()):
            check_floats(z=z)
        if x.dim() != 4:
            raise ValueError(f"x has shape {list(x.shape)}; images, four dimensions, are needed")
        if z is not None and not self.fuse_relu:
            raise ValueError("an addend z needs fuse_relu=True")
        training, momentum, channels_last = self.training, self.momentum, self.torch_channels_last
        if momentum is None and training:
            momentum = average_factor(None, self.num_batches_tracked)
        if channels_last:
            x = check_and_convert_channels_last(x, True)
            z = None if z is None else check_and_convert_channels_last(z, True)
        spec = BatchNormSpec(self.eps, momentum or 0.0, training, self.fuse_relu, 1 if channels_last else -1)
        exchange = consecutive_exchange("bn_group", self.bn_group) if training else None
        if exchange is None and training:
            check_values(x, x.shape[spec.channel_dim])
        if exchange is not None and not torch.compiler.is_compiling():
            compare_first(self, exchange, x.shape[spec.channel_dim], x)
        parameters, buffers = self._parameters, self._buffers  # `self.weight` would take a microsecond longer
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if weight is None or bias is None:  # `weight` or `bias` may be something other than a parameter
            weight, bias = self.weight, self.bias
        running = Channels(buffers["running_mean"], buffers["running_var"], weight, bias)
        output, batch = batch_norm_with_statistics(x, z, running, spec, exchange)
        if batch is not None:
            if torch.compiler.is_compiling():
                self._batch = batch  # Dynamo of PyTorch 2.6 cannot trace an assignment to `__dict__`
            else:
                self.__dict__["_batch"] = batch  # saves nn.Module's check for submodules
        if training and self.momentum is None and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return output
