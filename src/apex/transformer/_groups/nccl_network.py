"""Choice of NCCL's network for a group: InfiniBand within a block of machines, sockets between blocks.

NCCL reads its environment when it creates a group's communicator. Each group below is therefore created and used once
under its own setting. `NUM_GPUS_PER_IB_BLOCK` is the number of neighbouring ranks that InfiniBand connects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ... import _env
from ..._arguments import Index, checked
from ..._distributed.groups import make_group


def set_nccl_ib_envs() -> None:
    """Make NCCL use InfiniBand for communicators created from now on."""
    _env.set_nccl_network("IB")


def set_nccl_socket_envs() -> None:
    """Make NCCL use sockets for communicators created from now on."""
    if not _env.nccl_socket_interfaces():
        raise RuntimeError("NCCL_SOCKET_IFNAME was not set: it names the network interfaces of NCCL's sockets")
    _env.set_nccl_network("Socket")


def init_nccl_net(group: Any) -> None:
    """Create the group's communicator under the current environment, by a first all-reduce."""
    dist.all_reduce(torch.zeros(1, dtype=torch.float32, device="cuda"), group=group)
    torch.cuda.synchronize()


@checked
def new_nccl_ib_group(ranks: Sequence[Index]) -> Any:
    """Return a new NCCL group that uses InfiniBand."""
    with _environment_restored():
        set_nccl_ib_envs()
        return _new_group_used_once(ranks)


@checked
def new_nccl_socket_group(ranks: Sequence[Index]) -> Any:
    """Return a new NCCL group that uses sockets."""
    with _environment_restored():
        set_nccl_socket_envs()
        return _new_group_used_once(ranks)


@checked
def new_process_group(ranks: Sequence[Index], backend: str | None) -> Any:
    """Return a new group with `backend` (default: the default group's), on a network that reaches all of its ranks."""
    block = _env.gpus_per_infiniband_block()
    if block is None or (backend or dist.get_backend()) != "nccl":
        return make_group(ranks, backend=backend)
    inside_one_block = len({rank // block for rank in ranks}) <= 1
    return new_nccl_ib_group(ranks) if inside_one_block else new_nccl_socket_group(ranks)


def _new_group_used_once(ranks: Sequence[Index]) -> Any:
    group = make_group(ranks, backend="nccl")
    if dist.get_rank() in ranks:
        init_nccl_net(group)
    return group


@contextlib.contextmanager
def _environment_restored() -> Iterator[None]:
    previous = _env.nccl_network()
    try:
        yield
    finally:
        _env.set_nccl_network(previous)
