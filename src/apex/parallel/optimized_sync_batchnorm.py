"""SyncBatchNorm: batch norm over the inputs of several processes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..ops._checks import check_floats
from ..ops.batch_norm import (
    BatchNormSpec,
    Channels,
    average_factor,
    batch_norm,
    batch_norm_with_statistics,
    check_values,
)
from ._statistics import GroupExchange, compare_first, new_consecutive_group, process_count


class SyncBatchNorm(_BatchNorm):
    """Batch norm of [N, C, ...] whose training statistics cover the inputs of all processes of a group.

    Takes the arguments of `torch.nn.BatchNorm2d` and three more. `process_group` is None for all processes.
    `channel_last` is for inputs [N, ..., C]; PyTorch's channels-last memory format needs no argument. `fuse_relu`
    applies ReLU after the norm and after the addend `z` of `forward`. Input sizes may differ between processes, and
    inputs may be empty. Statistics of half-precision inputs are float32.

    With running statistics in evaluation, in a group of one process, and without a process group it is an ordinary
    batch norm.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def _specify_process_group(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group

    def _specify_channel_last(self, channel_last: bool) -> None:
        self.channel_last = channel_last

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        if not isinstance(input, Tensor) or not input.is_floating_point():
            check_floats(input=input)
        if z is not None and (not isinstance(z, Tensor) or not z.is_floating_point()):
            check_floats(z=z)
        training, parameters, buffers = self.training, self._parameters, self._buffers
        # Reading `self.weight` would cost a microsecond more, like every access through a module's __getattr__.
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if weight is None or bias is None:  # parametrized modules keep them elsewhere
            weight, bias = self.weight, self.bias
        mean, variance = buffers["running_mean"], buffers["running_var"]
        # Without running statistics the batch's statistics are used in evaluation too.
        uses_batch = training or mean is None
        if training and not self.track_running_stats:
            mean = variance = None
        channel_dim = -1 if self.channel_last and input.dim() > 2 else 1
        channels = self.num_features
        if input.dim() < 2 or input.shape[channel_dim] != channels:
            raise ValueError(
                f"input has shape {list(input.shape)}, expected {channels} channels in dimension {channel_dim} and "
                "at least two dimensions"
            )
        batches = buffers["num_batches_tracked"] if training and self.track_running_stats else None
        momentum = average_factor(self.momentum, batches)
        group = self.process_group
        processes = process_count(group) if uses_batch else 1
        exchange = GroupExchange(dist.group.WORLD if group is None else group) if processes > 1 else None  # type: ignore[arg-type]
        if exchange is None and uses_batch:
            check_values(input, channels)
        eps, relu = self.eps, self.fuse_relu
        if exchange is None:
            arguments = (input, mean, variance, weight, bias, uses_batch, momentum, eps)
            output = batch_norm(*arguments, z=z, relu=relu, channel_dim=channel_dim)
        else:
            if not torch.compiler.is_compiling():
                compare_first(self, exchange, channels, input)
            spec = BatchNormSpec(eps, momentum, uses_batch, relu, channel_dim)
            running = Channels(mean, variance, weight, bias)
            output, _ = batch_norm_with_statistics(input, z, running, spec, exchange, wanted=False)
        if batches is not None:
            batches.add_(1)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """Return a copy with its own parameters and running statistics, in the same process group."""
        memo[id(self.process_group)] = self.process_group
        memo[id(self)] = duplicate = type(self).__new__(type(self))
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return duplicate

    def extra_repr(self) -> str:
        described = super().extra_repr()
        described += ", channel_last=True" if self.channel_last else ""
        return described + (", fuse_relu=True" if self.fuse_relu else "")


def convert_syncbn_model(
    module: torch.nn.Module, process_group: dist.ProcessGroup | None = None, channel_last: bool = False
) -> torch.nn.Module:
    """Replace every batch norm of a model, of any number of dimensions, by a SyncBatchNorm.

    Parameters and running statistics are the same tensors as before, so an existing optimizer stays valid. Sharing is
    preserved: a norm used twice becomes one SyncBatchNorm used twice. The model is changed in place, unless it is a
    batch norm itself.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, not {type(module).__name__}")
    for name, each in module.named_modules():
        is_lazy = isinstance(each, torch.nn.modules.lazy.LazyModuleMixin) and isinstance(each, _BatchNorm)
        if is_lazy and each.has_uninitialized_params():
            place = f"{name}: " if name else ""
            raise ValueError(f"{place}{each} does not know its channels yet; pass it an input before it is converted")
    return _converted(module, process_group, channel_last, {})


def _converted(
    module: torch.nn.Module,
    process_group: dist.ProcessGroup | None,
    channel_last: bool,
    done: dict[torch.nn.Module, torch.nn.Module],
) -> torch.nn.Module:
    if module in done:
        return done[module]
    done[module] = result = _converted_norm(module, process_group, channel_last)
    for name, child in module._modules.items():
        if child is not None:
            converted = _converted(child, process_group, channel_last, done)
            if converted is not child or result is not module:
                result.add_module(name, converted)
    return result


def _converted_norm(
    module: torch.nn.Module, process_group: dist.ProcessGroup | None, channel_last: bool
) -> torch.nn.Module:
    if not isinstance(module, _BatchNorm):
        return module
    settings = (module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
    fuse_relu = bool(getattr(module, "fuse_relu", False))
    norm = SyncBatchNorm(*settings, process_group, channel_last, fuse_relu)
    for name, parameter in module._parameters.items():
        norm.register_parameter(name, parameter)
    for name, buffer in module._buffers.items():
        norm.register_buffer(name, buffer)
    return norm.train(module.training)


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Return this process's group if all processes are cut into groups of `group_size` consecutive ranks.

    0 stands for all processes, and returns None. All processes must call this function.
    """
    if group_size == 0:
        return None
    processes = dist.get_world_size()
    if group_size < 0 or processes % group_size:
        raise ValueError(f"group_size={group_size} must be 0 or divide the number of processes, {processes}")
    return new_consecutive_group(group_size, processes)
