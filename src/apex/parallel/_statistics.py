"""What the processes of a batch norm tell each other: a packet of a few values per channel, once in each direction.

Packets are those of `apex.ops.batch_norm`. A group that is None here is a process by itself, which tells nobody.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from .._failures import explained


def process_count(group: dist.ProcessGroup | None) -> int:
    """Processes of a group, all there are where it is None; 0 where processes are not connected."""
    if not dist.is_available() or not dist.is_initialized():
        return 0
    processes = dist.get_world_size(group)
    if processes < 1:
        raise ValueError(f"process_group does not contain this process, rank {dist.get_rank()}")
    return processes


def connected(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group, that of all processes where none is given; None where processes are not connected."""
    if group is None:
        return dist.group.WORLD if dist.is_available() else None
    return group if process_count(group) else None


def gathered(packet: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The packets of all processes, [P, 2C + 1] in the order of ranks. One `all_gather`, which nothing waits for."""
    if group is None:
        return packet[None]
    packets = packet.new_empty(group.size() * packet.numel())
    # The name that PyTorch 2.13 gave it, or the one before.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with explained("gathering the statistics of a batch norm over processes"):
        gather(packets, packet, group=group)
    return packets.view(-1, packet.numel())


def summed(packet: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The packet itself, after it became the sum of those of all processes. One `all_reduce`."""
    if group is not None:
        with explained("adding up what a batch norm over processes needs for its gradients"):
            dist.all_reduce(packet, group=group)
    return packet
