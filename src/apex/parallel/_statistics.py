"""What the processes of a batch norm tell each other: a packet of a few values per channel, once in each direction.

Packets are those of `apex.ops.batch_norm`. A group that is None here is a process by itself, which tells nobody.

Where nothing is compiled backends are called directly: by way of `torch.distributed.all_reduce` and the dispatcher the
host is busy for 50 us of the 275 that it takes for a backward pass.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._failures import OWN, unanswered

# What is said where other processes do not answer.
_GATHERING = "gathering the statistics of a batch norm over processes"
_ADDING = "adding up what a batch norm over processes needs for its gradients"


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
    values = packet.numel()
    packets = packet.new_empty(group.size() * values)  # flat, as Gloo wants it
    if torch.compiler.is_compiling():
        # The name that PyTorch 2.13 gave it, or the one before.
        (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(packets, packet, group=group)
        return packets.view(-1, values)
    try:
        work = _carrier(group, packet.device)._allgather_base(packets, packet, _at_once("AllgatherOptions"))
        if work is not None:
            work.wait()
    except OWN:
        raise
    except RuntimeError as error:
        raise unanswered(_GATHERING, error) from error
    return packets.view(-1, values)


def summed(packet: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The packet itself, after it became the sum of those of all processes. One `all_reduce`."""
    if group is None:
        return packet
    if torch.compiler.is_compiling():
        dist.all_reduce(packet, group=group)
        return packet
    try:
        work = _carrier(group, packet.device).allreduce([packet], _at_once("AllreduceOptions"))
        if work is not None:
            work.wait()
    except OWN:
        raise
    except RuntimeError as error:
        raise unanswered(_ADDING, error) from error
    return packet


def _carrier(group: Any, device: torch.device) -> Any:
    """What carries messages of a group from such a device; itself where it is all of one piece."""
    try:
        return group._get_backend(device)
    except (AttributeError, RuntimeError):
        return group


@functools.cache
def _at_once(kind: str) -> Any:
    """Options of a collective for the stream that the caller is on, without another one in between, if PyTorch can."""
    options = getattr(dist.distributed_c10d, kind)()
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options
