"""What the processes of a batch norm tell each other: a few values per channel, once forward and once backward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def process_count(group: dist.ProcessGroup | None) -> int:
    """Processes of a group, all there are where it is None; 0 where processes are not connected."""
    if not dist.is_available() or not dist.is_initialized():
        return 0
    processes = dist.get_world_size(group)
    if processes < 1:
        raise ValueError(f"process_group does not contain this process, rank {dist.get_rank()}")
    return processes


def gathered_statistics(mean: Tensor, variance: Tensor, count: int, group: dist.ProcessGroup | None) -> Tensor:
    """What each process found over its `count` values, which may be none: [P, means, squared deviations, count].

    One `all_gather`, and no waiting for the device: counts stay there.
    """
    packet = torch.cat((mean, variance * count, mean.new_full((1,), count)))
    processes = process_count(group)
    if not processes:
        return packet[None]
    packets = packet.new_empty(processes * packet.numel())
    # The name that PyTorch 2.13 gave it, or the one before.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(packets, packet, group=group)
    return packets.view(processes, -1)


def mean_sums(plain: Tensor, along: Tensor, values: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Sums over all processes, each of which knows its own, divided by the number of values. One `all_reduce`."""
    sums = torch.cat((plain, along))
    if process_count(group):
        dist.all_reduce(sums, group=group)
    mean_plain, mean_along = sums.div_(values.clamp(min=1)).split((plain.numel(), along.numel()))
    return mean_plain, mean_along
