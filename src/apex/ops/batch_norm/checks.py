"""Whether the arguments of a batch norm fit each other."""

from __future__ import annotations

from torch import Tensor

from .._checks import check_per_channel
from .spec import BatchNormSpec


def check(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    spec: BatchNormSpec,
) -> None:
    """Raises for arguments that do not fit each other."""
    if spec.channel_dim not in (1, -1):
        raise ValueError(f"channel_dim={spec.channel_dim} is not known; 1 for [N, C, ...] and -1 for [N, ..., C] are")
    if input.dim() < 2:
        raise ValueError(
            f"input has shape {list(input.shape)}; images and channels, at least two dimensions, are needed"
        )
    if not input.is_floating_point():
        raise TypeError(f"batch_norm needs a floating-point input, got {input.dtype}")
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var must be given together, or neither of them")
    if running_mean is None and not spec.training:
        raise ValueError("running_mean and running_var are needed where training is False")
    per_channel = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    check_per_channel(input, input.shape[spec.channel_dim], **per_channel)
    if z is not None:
        if z.shape != input.shape:
            raise ValueError(f"z has shape {list(z.shape)}, the input {list(input.shape)}")
        if z.device != input.device:
            raise ValueError(f"z is on {z.device}, the input on {input.device}")
        if not z.is_floating_point():
            raise TypeError(f"z must be floating-point, got {z.dtype}")
