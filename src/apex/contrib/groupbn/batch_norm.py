"""BatchNorm2d_NHWC: batch norm of [N, H, W, C], plus an addend, then ReLU, in one pass behind the statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ...ops._checks import check_floats
from ...ops._library import once_differentiable
from ...ops.batch_norm import (
    BatchNormSpec,
    BatchStatistics,
    average_factor,
    batch_norm_with_statistics,
    gradients,
    normalise,
)
from ...ops.batch_norm.checks import check
from ...parallel._consecutive_groups import consecutive_group
from ...parallel._joined_norm import GroupBatchNormFunction, joined_forward, joined_gradients, norm_of


def check_if_rocm_pytorch() -> bool:
    """Whether this PyTorch was built for AMD GPUs."""
    return torch.version.hip is not None


IS_ROCM_PYTORCH = check_if_rocm_pytorch()


def check_and_convert_channels_last(tensor: Tensor, torch_channels_last: bool) -> Tensor:
    """The tensor, in PyTorch's channels-last format if that is asked for."""
    return tensor.contiguous(memory_format=torch.channels_last) if torch_channels_last else tensor


def _forward(ctx: Any, x, z, s, b, rm, riv, mini_m, mini_riv, mom, epsilon, fuse_relu, is_train, rest) -> Tensor:
    """`rest` begins with `torch_channels_last` where the caller knows ROCm's list of arguments."""
    channels_last, bn_group = (rest[0], rest[1]) if len(rest) == 12 else (False, rest[0])
    group = consecutive_group("bn_group", bn_group)
    spec = BatchNormSpec(epsilon, mom, is_train, fuse_relu, 1 if channels_last else -1)
    x = check_and_convert_channels_last(x, channels_last)
    ctx.norm = norm_of(x, s, b, spec) if is_train else None
    if is_train:
        y, mean, variance = joined_forward(x, z, s, b, rm, riv, spec, group, ctx.norm)
        mini_m.copy_(mean)
        mini_riv.copy_((variance + epsilon).rsqrt())
    else:
        mean, variance = rm, riv
        y = normalise(x, z, mean, variance, s, b, spec)
    ctx.save_for_backward(x, None if z is None else y, mean, variance, s, b)
    ctx.spec, ctx.has_z, ctx.group = spec, z is not None, group
    return y


def _backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    x, y, mean, variance, s, b = ctx.saved_tensors
    tensors = (grad_y, x, y, mean, variance, s, b, ctx.spec)
    if ctx.group is None or not ctx.spec.training:
        return gradients(*tensors, ctx.has_z)
    found = joined_gradients(*tensors, ctx.group, ctx.norm, ctx.has_z)
    return found.input, found.z, *found.group_means(ctx.group.size())


def group_batch_norm(
    x: Tensor,
    z: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, BatchStatistics | None]:
    """A norm over the processes of `group`, or where it is None over this one; in training with its statistics."""
    if group is None:
        return batch_norm_with_statistics(x, z, running_mean, running_var, weight, bias, spec)
    check(x, running_mean, running_var, weight, bias, z, spec)
    output, mean, variance = GroupBatchNormFunction.apply(x, z, weight, bias, running_mean, running_var, spec, group)
    return output, BatchStatistics(mean, variance, False)


class bn_NHWC_impl(torch.autograd.Function):
    """Batch norm and ReLU, with upstream's arguments; those behind `bn_group` have no effect."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, x, s, b, rm, riv, mini_m, mini_riv, ret_cta, mom, epsilon, fuse_relu, is_train, *rest
    ):
        return _forward(ctx, x, None, s, b, rm, riv, mini_m, mini_riv, mom, epsilon, fuse_relu, is_train, rest)

    @staticmethod
    @once_differentiable
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
    @once_differentiable
    def backward(ctx, grad_y):  # type: ignore[override]
        return *_backward(ctx, grad_y), *(None,) * (len(ctx.needs_input_grad) - 4)


class BatchNorm2d_NHWC(_BatchNorm):
    """Batch norm of [N, H, W, C], plus `z` where it is given, then ReLU with `fuse_relu`, which an addend needs.

    With `torch_channels_last` inputs are [N, C, H, W] in PyTorch's channels-last format, into which others are brought.
    `bn_group` is the number of processes, of consecutive ranks, that share their statistics in training; all processes
    must make the norm, and gradients of its parameters are averages over the group. How kernels are launched and on
    which stream, they find out themselves: `max_cta_per_sm`, `cta_launch_margin` and `multi_stream` are kept and have
    no effect. `minibatch_mean` and `minibatch_riv` are the last batch's mean and one over its standard deviation.
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
        """Mean of every channel of the last batch in training; zeros before it."""
        assert self.running_mean is not None  # always tracked
        return torch.zeros_like(self.running_mean) if self._batch is None else self._batch.mean

    @property
    def minibatch_riv(self) -> Tensor:
        """One over the standard deviation of every channel of the last batch in training; ones before it."""
        assert self.running_var is not None
        return torch.ones_like(self.running_var) if self._batch is None else self._batch.inverse_deviation(self.eps)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        check_floats(x=x)
        if z is not None:
            check_floats(z=z)
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
        group = consecutive_group("bn_group", self.bn_group) if training else None
        output, batch = group_batch_norm(x, z, self.running_mean, self.running_var, self.weight, self.bias, spec, group)
        if batch is not None:
            self._batch = batch
        if training and self.momentum is None and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return output
