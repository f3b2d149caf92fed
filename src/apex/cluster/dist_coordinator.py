"""DistCoordinator: questions about this process's place, and actions of one process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from .. import _env
from .._distributed.collectives import gather_objects

__all__ = ["DistCoordinator"]


class DistCoordinator:
    """The place of this process among all; there is one object. It needs an initialised torch.distributed."""

    _instance: DistCoordinator | None = None

    def __new__(cls) -> DistCoordinator:
        connected = dist.is_available() and dist.is_initialized()
        assert connected, (
            "torch.distributed is not initialised: call apex.launch_from_torch() in a script that `apex run` starts"
        )
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    @property
    def rank(self) -> int:
        """The number of this process."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return dist.get_world_size()

    @property
    def local_rank(self) -> int:
        """The number of this process on its machine, from LOCAL_RANK; -1 if no launcher has set it."""
        local = _env.optional_integer("LOCAL_RANK")
        return -1 if local is None else local

    _rank, _world_size, _local_rank = rank, world_size, local_rank  # names that scripts read

    def is_master(self, process_group: Any = None) -> bool:
        """Return whether this process is the first of a group (None: of all)."""
        return dist.get_rank(process_group) == 0

    def is_node_master(self) -> bool:
        """Return whether this process is the first on its machine."""
        assert self.local_rank >= 0, "the variable LOCAL_RANK is not set: start the script by `apex run`"
        return self.local_rank == 0

    def is_last_process(self, process_group: Any = None) -> bool:
        """Return whether this process is the last of a group (None: of all)."""
        return dist.get_rank(process_group) == dist.get_world_size(process_group) - 1

    def print_on_master(self, msg: str, process_group: Any = None) -> None:
        """Print a message in the first process of a group."""
        if self.is_master(process_group):
            print(msg)

    def print_on_node_master(self, msg: str) -> None:
        """Print a message in the first process of each machine."""
        if self.is_node_master():
            print(msg)

    @contextlib.contextmanager
    def priority_execution(self, executor_rank: int = 0, process_group: Any = None) -> Iterator[None]:
        """Run the block in process `executor_rank` first, then in the others.

        If the first one raises an error, the others raise a RuntimeError instead of running the block.
        """
        description = f"waiting for rank {executor_rank}, which runs a block first"
        if self.rank != executor_rank:
            reasons = [reason for reason in gather_objects(None, description, process_group) if reason is not None]
            if reasons:
                raise RuntimeError(f"rank {executor_rank} failed in a block that it ran first: {reasons[0]}")
            yield
            return
        failure: str | None = "it left the block"
        try:
            yield
            failure = None
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            gather_objects(failure, description, process_group)

    def block_all(self, process_group: Any = None) -> None:
        """Wait for all processes of a group."""
        dist.barrier(process_group)

    def destroy(self, process_group: Any = None) -> None:
        """Destroy a process group (None: all of them)."""
        dist.destroy_process_group(process_group)

    def on_master_only(self, process_group: Any = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that runs a function in the first process of a group only; others return None."""
        is_master = self.is_master(process_group)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def run(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs) if is_master else None

            return run

        return decorate
