"""BatchNorm2d_NHWC: batch norm of [N, H, W, C], plus an addend, then ReLU, in one pass behind the statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ...ops.batch_norm import (
    BatchNormSpec,
    BatchStatistics,
    average_factor,
    batch_norm_with_statistics,
    gradients,
    local_statistics,
    normalise,
)


def check_if_rocm_pytorch() -> bool:
    """Whether this PyTorch was built for AMD GPUs."""
    return torch.version.hip is not None


IS_ROCM_PYTORCH = check_if_rocm_pytorch()


def check_and_convert_channels_last(tensor: Tensor, torch_channels_last: bool) -> Tensor:
    """The tensor, in PyTorch's channels-last format if that is asked for."""
    return tensor.contiguous(memory_format=torch.channels_last) if torch_channels_last else tensor


def check_group(name: str, size: int) -> None:
    """Raises for groups of processes, which are not there yet."""
    if size < 1:
        raise ValueError(f"{name}={size} must be at least 1")
    if size > 1:
        raise NotImplementedError(
            f"{name}={size}: norms over groups of processes are not there yet; {name}=1, each process by itself, is"
        )


def _forward(ctx: Any, x, z, s, b, rm, riv, mini_m, mini_riv, mom, epsilon, fuse_relu, is_train, rest) -> Tensor:
    """`rest` begins with `torch_channels_last` where the caller knows ROCm's list of arguments."""
    channels_last, bn_group = (rest[0], rest[1]) if len(rest) == 12 else (False, rest[0])
    check_group("bn_group", bn_group)
    spec = BatchNormSpec(epsilon, mom, is_train, fuse_relu, 1 if channels_last else -1)
    x = check_and_convert_channels_last(x, channels_last)
    mean, variance = rm, riv
    if is_train:
        mean, variance = local_statistics(x, spec, rm, riv)
        mini_m.copy_(mean)
        mini_riv.copy_((variance + epsilon).rsqrt())
    y = normalise(x, z, mean, variance, s, b, spec)
    ctx.save_for_backward(x, None if z is None else y, mean, variance, s, b)
    ctx.spec, ctx.has_z = spec, z is not None
    return y


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    x, y, mean, variance, s, b = ctx.saved_tensors
    return gradients(grad_y, x, y, mean, variance, s, b, ctx.spec, ctx.has_z)


class bn_NHWC_impl(torch.autograd.Function):
    """Batch norm and ReLU, with upstream's arguments; those behind `bn_group` have no effect."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, x, s, b, rm, riv, mini_m, mini_riv, ret_cta, mom, epsilon, fuse_relu, is_train, *rest
    ):
        return _forward(ctx, x, None, s, b, rm, riv, mini_m, mini_riv, mom, epsilon, fuse_relu, is_train, rest)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y):  # type: ignore[override]
        dx, _, dscale, dbias = _backward(ctx, grad_y)
        return dx, dscale, dbias, *(None,) * (len(ctx.needs_input_grad) - 3)


class bn_addrelu_NHWC_impl(torch.autograd.Function):
    """Batch norm, addend and ReLU, with upstream's arguments; those behind `bn_group` have no effect."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, x, z, s, b, rm, riv, mini_m, mini_riv, grid_dim_y, ret_cta, mom, epsilon, is_train, *rest
    ):
        return _forward(ctx, x, z, s, b, rm, riv, mini_m, mini_riv, mom, epsilon, True, is_train, rest)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y):  # type: ignore[override]
        return *_backward(ctx, grad_y), *(None,) * (len(ctx.needs_input_grad) - 4)


class BatchNorm2d_NHWC(_BatchNorm):
    """Batch norm of [N, H, W, C], plus `z` where it is given, then ReLU with `fuse_relu`, which an addend needs.

    With `torch_channels_last` inputs are [N, C, H, W] in PyTorch's channels-last format, into which others are brought.
    `bn_group` is the number of processes that share their statistics; one so far. How kernels are launched and on which
    stream, they find out themselves: `max_cta_per_sm`, `cta_launch_margin` and `multi_stream` are kept and have no
    effect. `minibatch_mean` and `minibatch_riv` are the last batch's mean and one over its standard deviation.
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
        check_group("bn_group", bn_group)
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
        """Mean of every channel of the last batch in training; zeros before it."""
        assert self.running_mean is not None  # always tracked
        return torch.zeros_like(self.running_mean) if self._batch is None else self._batch.mean

    @property
    def minibatch_riv(self) -> Tensor:
        """One over the standard deviation of every channel of the last batch in training; ones before it."""
        assert self.running_var is not None
        return torch.ones_like(self.running_var) if self._batch is None else self._batch.inverse_deviation(self.eps)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        if x.dim() != 4:
            raise ValueError(f"x has shape {list(x.shape)}; images, four dimensions, are needed")
        if z is not None and not self.fuse_relu:
            raise ValueError("an addend z needs fuse_relu=True")
        training = self.training
        factor = average_factor(self.momentum, self.num_batches_tracked) if training else 0.0
        if self.torch_channels_last:
            x = check_and_convert_channels_last(x, True)
            z = None if z is None else check_and_convert_channels_last(z, True)
        spec = BatchNormSpec(self.eps, factor, training, self.fuse_relu, 1 if self.torch_channels_last else -1)
        output, batch = batch_norm_with_statistics(
            x, z, self.running_mean, self.running_var, self.weight, self.bias, spec
        )
        if batch is not None:
            self._batch = batch
        return output
