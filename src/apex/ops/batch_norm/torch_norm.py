"""A whole batch norm by PyTorch's operators, which autograd knows."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .spec import BatchNormSpec, BatchStatistics


class NativePlan:
    """A norm that PyTorch's operator takes as it is, and what follows it: what is left to do for tensors of one kind.

    `order` is that of dimensions in which channels are second, where they are last.
    """

    def __init__(self, spec: BatchNormSpec, order: tuple[int, ...] | None) -> None:
        self._training, self._eps, self._relu = spec.training, spec.eps, spec.relu
        self._order, self._back = order, None if order is None else (0, *range(2, len(order)), 1)

    def run(
        self,
        input: Tensor,
        z: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        wanted: bool,
    ) -> tuple[Tensor, BatchStatistics | None]:
        """The output, and in training, where they are `wanted`, the statistics of the batch."""
        values = input if self._order is None else input.permute(self._order)
        flags = (self._training, momentum, self._eps, torch._C._get_cudnn_enabled())
        found = None
        if wanted and self._training:
            output, found = _with_statistics(values, weight, bias, running_mean, running_var, flags)
        else:
            output = torch.batch_norm(values, weight, bias, running_mean, running_var, *flags)
        # In place: no derivative of a batch norm asks for its output.
        if z is not None:
            output = output.add_(z if self._order is None else z.permute(self._order))
        if self._relu:
            output = output.relu_()
        return output if self._back is None else output.permute(self._back), found


def native_plan(
    input: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    spec: BatchNormSpec,
) -> NativePlan | None:
    """The plan, where PyTorch's operator takes all tensors as they are, computes in float32 and rounds once."""
    wide, images = torch.promote_types(input.dtype, torch.float32), input.dim() == 4
    halves = input.dtype != wide
    if (
        not (spec.channel_dim == 1 or images)
        or not keeps_float32(input if spec.channel_dim == 1 else input.movedim(-1, 1), spec.training)
        or (z is not None and (halves or z.dtype != input.dtype))
        or (halves and (weight is None or bias is None))
        or not all(_cast(each, wide) is each for each in (weight, bias, running_mean, running_var))
    ):
        return None
    return NativePlan(spec, None if spec.channel_dim == 1 else (0, 3, 1, 2))


def _with_statistics(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    flags: tuple[bool, float, float, bool],
) -> tuple[Tensor, BatchStatistics]:
    """What torch.batch_norm calls, which also tells the statistics of the batch."""
    found = torch._batch_norm_impl_index(values, weight, bias, running_mean, running_var, *flags)
    return found[0], BatchStatistics(found[1].detach(), found[2].detach(), True)


def keeps_float32(values: Tensor, training: bool) -> bool:
    """Whether PyTorch's batch norm of [N, C, ...] computes all of its gradients in float32, if they are wanted.

    On a GPU it does for channels-last images and where cuDNN takes them, which is in training and not for contiguous
    bfloat16; anywhere else it rounds to half precision between the steps of the backward pass. On a CPU it does so
    unless input and gradient are contiguous: whoever may want gradients there must give it float32.
    """
    if values.element_size() > 2 or not values.is_cuda:
        return True
    if values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last):
        return True
    return training and values.dtype == torch.float16 and values.dim() in (4, 5) and torch.backends.cudnn.enabled


def _rounds_within(values: Tensor, training: bool) -> bool:
    """Whether half-precision gradients of [N, C, ...] would be rounded within the backward pass, or might be."""
    return values.is_cpu or not keeps_float32(values, training)


def by_reference(
    input: Tensor,
    z: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
) -> tuple[Tensor, BatchStatistics | None]:
    """Inputs with at most one value per channel, which PyTorch's operator refuses or answers with NaN."""
    if spec.training:
        mean, variance = reference.statistics(input, spec)
        found = BatchStatistics(mean.detach(), variance.detach(), False)
        if running_mean is not None and running_var is not None and input.numel():
            reference.update_running(running_mean, running_var, *found[:2], 1, spec.momentum)
        return reference.apply(input, z, mean, variance, weight, bias, spec), found
    assert running_mean is not None  # checked
    assert running_var is not None
    return reference.apply(input, z, running_mean, running_var, weight, bias, spec), None


def native_norm(
    input: Tensor,
    z: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    spec: BatchNormSpec,
    wanted: bool,
) -> tuple[Tensor, BatchStatistics | None]:
    """PyTorch's operators, which take parameters in float32 beside any input, and in its dtype otherwise."""
    wide = torch.promote_types(input.dtype, torch.float32)
    values = input if spec.channel_dim == 1 else input.movedim(-1, 1)
    if input.dtype != wide and (z is not None or (torch.is_grad_enabled() and _rounds_within(values, spec.training))):
        plain = spec._replace(relu=False)  # rounded once, behind the sum
        output, found = native_norm(input.to(wide), z, running_mean, running_var, weight, bias, plain, wanted)
        output = output.to(input.dtype)
        return output.relu_() if spec.relu else output, found
    weight, bias = _cast(weight, wide), _cast(bias, wide)
    mean, variance = _cast(running_mean, wide), _cast(running_var, wide)
    if input.dtype != wide:  # without parameters to tell, statistics would be rounded to the dtype of the input
        weight = values.new_ones(values.shape[1], dtype=wide) if weight is None else weight
        bias = values.new_zeros(values.shape[1], dtype=wide) if bias is None else bias
    flags = (spec.training, spec.momentum, spec.eps, torch.backends.cudnn.enabled)
    found = None
    if wanted:
        output, found = _with_statistics(values, weight, bias, mean, variance, flags)
    else:
        output = torch.batch_norm(values, weight, bias, mean, variance, *flags)
    if spec.training:
        for running, updated in ((running_mean, mean), (running_var, variance)):
            if running is not None and updated is not None and updated is not running:
                running.copy_(updated)
    # In place: no derivative of a batch norm asks for its output.
    if z is not None:
        output = output.add_((z if spec.channel_dim == 1 else z.movedim(-1, 1)).to(output.dtype))
    output = output.relu_() if spec.relu else output
    return output if spec.channel_dim == 1 else output.movedim(1, -1), found


def _cast(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """In `dtype` and contiguous: PyTorch's backward pass on a CPU reads what lies beside a strided weight, too."""
    if parameter is None or (parameter.dtype == dtype and parameter.is_contiguous()):
        return parameter
    return parameter.to(dtype).contiguous()
