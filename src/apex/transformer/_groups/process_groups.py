"""Process groups from lists of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .layout import MESH_DIMENSIONS
from .nccl_network import new_process_group

_MESH_KINDS = {"pp": "pipeline", "dp": "data", "cp": "context", "tp": "tensor"}


@dataclass
class Groups:
    """The groups that this process is in, by kind, with their global ranks, and those that are ours to destroy."""

    by_kind: dict[str, Any] = field(default_factory=dict)
    ranks: dict[str, list[int]] = field(default_factory=dict)
    made: list[Any] = field(default_factory=list)


def make_groups(
    kinds: dict[str, list[list[int]]], backend: str | None, p2p_backend: str | None, device_mesh: Any
) -> Groups:
    """Makes every group, in the same order in all processes; those that a DeviceMesh has are taken from it.

    Kinds with the same ranks share a group, but for pipelines: their messages would wait for others' collectives.
    """
    me = dist.get_rank()
    groups = Groups()
    shared: dict[tuple, Any] = {}
    given = {} if device_mesh is None else {_MESH_KINDS[name]: name for name in device_mesh.mesh_dim_names}
    for kind, lists in kinds.items():
        messages = kind == "pipeline"
        for ranks in lists:
            key = (messages, *ranks)
            if kind not in given and key not in shared:
                shared[key] = new_process_group(ranks, (p2p_backend or backend) if messages else backend)
                if me in ranks:
                    groups.made.append(shared[key])
            if me in ranks:
                groups.by_kind[kind] = device_mesh.get_group(given[kind]) if kind in given else shared[key]
                groups.ranks[kind] = ranks
    return groups


def device_mesh_of(mesh: Tensor, groups: Groups) -> Any:
    """A DeviceMesh of the ranks [pp, dp, cp, tp] on the groups that exist; without "cp" where that has size 1."""
    from torch.distributed.device_mesh import DeviceMesh

    names = tuple(name for name in MESH_DIMENSIONS if name != "cp" or mesh.shape[2] > 1)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    ranks = mesh if "cp" in names else mesh.squeeze(2)
    found = [groups.by_kind[_MESH_KINDS[name]] for name in names]
    return DeviceMesh.from_group(found, device, mesh=ranks, mesh_dim_names=names)
