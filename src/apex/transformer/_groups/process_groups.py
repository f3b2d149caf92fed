"""Creation of process groups from lists of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .layout import MESH_DIMENSIONS
from .nccl_network import new_process_group

_MESH_KINDS = {"pp": "pipeline", "dp": "data", "cp": "context", "tp": "tensor"}


@dataclass
class ModelParallelGroups:
    """The groups of this process by kind, their global ranks, and the list of groups to destroy at the end."""

    by_kind: dict[str, Any] = field(default_factory=dict)
    ranks: dict[str, list[int]] = field(default_factory=dict)
    made: list[Any] = field(default_factory=list)


def check_backend(name: str, backend: str | None) -> None:
    """Raise ValueError if PyTorch lacks a backend, given by the argument `name`; UCC is left to others to check."""
    for each in [] if backend is None else [part.rpartition(":")[2] for part in backend.split(",")]:
        if each != "ucc" and not dist.is_backend_available(each):
            known = ", ".join(dist.Backend.backend_list)
            raise ValueError(f"{name}={backend!r} is no backend that this PyTorch has; it knows {known}")


def make_groups(
    kinds: dict[str, list[list[int]]], backend: str | None, p2p_backend: str | None, device_mesh: Any
) -> ModelParallelGroups:
    """Create all groups, in the same order in all processes; groups that a DeviceMesh has are taken from it.

    Kinds with the same ranks share one group. Pipelines have groups of their own, because their messages would
    otherwise wait for collectives of other kinds.
    """
    me = dist.get_rank()
    groups = ModelParallelGroups()
    shared: dict[tuple, Any] = {}
    mesh_names = {} if device_mesh is None else {_MESH_KINDS[name]: name for name in device_mesh.mesh_dim_names}
    for kind, lists in kinds.items():
        is_pipeline = kind == "pipeline"
        for ranks in lists:
            key = (is_pipeline, *ranks)
            if kind not in mesh_names and key not in shared:
                shared[key] = new_process_group(ranks, (p2p_backend or backend) if is_pipeline else backend)
                if me in ranks:
                    groups.made.append(shared[key])
            if me in ranks:
                groups.by_kind[kind] = device_mesh.get_group(mesh_names[kind]) if kind in mesh_names else shared[key]
                groups.ranks[kind] = ranks
    return groups


def device_mesh_of(mesh: Tensor, groups: ModelParallelGroups) -> Any:
    """Return a DeviceMesh over the ranks [pp, dp, cp, tp] on the existing groups; "cp" is omitted if its size is 1."""
    from torch.distributed.device_mesh import DeviceMesh

    names = tuple(name for name in MESH_DIMENSIONS if name != "cp" or mesh.shape[2] > 1)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    ranks = mesh if "cp" in names else mesh.squeeze(2)
    mesh_groups = [groups.by_kind[_MESH_KINDS[name]] for name in names]
    return DeviceMesh.from_group(mesh_groups, device, mesh=ranks, mesh_dim_names=names)
