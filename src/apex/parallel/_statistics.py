"""What the processes of a batch norm tell each other: a few values per channel, once forward and once backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.batch_norm.reference import combine


class Joined(NamedTuple):
    """Mean and biased variance of every channel of what all processes have, and how many values that are, [1]."""

    mean: Tensor
    variance: Tensor
    values: Tensor


def process_count(group: dist.ProcessGroup | None) -> int:
    """Processes of a group, all there are where it is None; 0 where processes are not connected."""
    if not dist.is_available() or not dist.is_initialized():
        return 0
    processes = dist.get_world_size(group)
    if processes < 1:
        raise ValueError(f"process_group does not contain this process, rank {dist.get_rank()}")
    return processes


def join_statistics(mean: Tensor, variance: Tensor, count: int, group: dist.ProcessGroup | None) -> Joined:
    """Statistics of all processes from those of each over its `count` values, which may be none.

    One `all_gather`, and no waiting for the device: counts stay there.
    """
    number = mean.new_full((1,), count)
    processes = process_count(group)
    if not processes:
        return Joined(mean, variance, number)
    packet = torch.cat((mean, variance, number))
    packets = packet.new_empty(processes * packet.numel())
    # The name that PyTorch 2.13 gave it, or the one before.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(packets, packet, group=group)
    means, variances, numbers = packets.view(processes, -1).split((mean.numel(), variance.numel(), 1), 1)
    mean, variance = combine(means, variances, numbers[:, 0])
    return Joined(mean, variance, numbers.sum(0))


def move_running(running_mean: Tensor, running_var: Tensor, batch: Joined, momentum: float) -> None:
    """Moves running statistics towards those of a batch, if it has any values; the variance is the unbiased one."""
    share = momentum * batch.values.clamp(max=1)
    unbiased = batch.variance * (batch.values / (batch.values - 1).clamp(min=1))
    for running, value in ((running_mean, batch.mean), (running_var, unbiased)):
        running.copy_(running.to(value.dtype).lerp(value, share))


def mean_sums(plain: Tensor, along: Tensor, values: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Sums over all processes, each of which knows its own, divided by the number of values. One `all_reduce`."""
    if process_count(group):
        sums = torch.cat((plain, along))
        dist.all_reduce(sums, group=group)
        plain, along = sums.split((plain.numel(), along.numel()))
    inverse = values.clamp(min=1).reciprocal()
    return plain * inverse, along * inverse
