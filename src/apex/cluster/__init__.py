"""Colossal-AI's view of the processes of a script: who is first, and groups along the axes of a grid."""

from .dist_coordinator import DistCoordinator
from .process_group_mesh import ProcessGroupMesh

__all__ = ["DistCoordinator", "ProcessGroupMesh"]
