"""Connection of the processes of a script: `apex.launch`, and variants for torchrun, Slurm and Open MPI."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
import torch.distributed as dist

from . import _env
from ._random import seed_host
from .logging import get_dist_logger
from .ops._host import HOST

_NCCL = "nccl"


def get_default_parser() -> argparse.ArgumentParser:
    """Return a parser for the arguments of the launch functions; none of them is required."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=str, help="path to a configuration file")
    parser.add_argument("--host", type=str, help="the address of the first process")
    parser.add_argument("--port", type=int, help="a free port there")
    parser.add_argument("--world_size", type=int, help="the number of processes")
    parser.add_argument("--rank", type=int, help="the number of this process")
    parser.add_argument("--local_rank", type=int, help="its number on this machine")
    parser.add_argument("--backend", type=str, default=_NCCL, help="the backend of torch.distributed")
    return parser


def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str = _NCCL,
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
    config: Any = None,
) -> None:
    """Connect this process, number `rank` of `world_size`, to the others; all meet at `host` and `port`.

    Selects accelerator `local_rank` of this machine, or `rank` modulo their number, and seeds the random number
    generators alike in all processes. "nccl" means the default backend of the accelerator, Gloo without one. `config`
    is ignored. If torch.distributed is already initialised, its process group is used.
    """
    address = f"[{host}]" if ":" in host else host
    _start(f"tcp://{address}:{port}", rank, world_size, backend, local_rank, seed, verbose)


def launch_from_torch(config: Any = None, backend: str = _NCCL, seed: int = 1024, verbose: bool = True) -> None:
    """Call `launch` in a process that torchrun or `apex run` has started.

    The first argument was a configuration, which is ignored, and is the backend in newer scripts: if `config` is the
    name of a backend of torch.distributed, it is the backend.
    """
    if isinstance(config, str) and config.lower() in dist.Backend.backend_list:
        backend = config.lower()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    rank, local_rank, world_size = map(int, _env.launcher_variables("torchrun", *names)[:3])
    _start("env://", rank, world_size, backend, local_rank, seed, verbose)


def launch_from_slurm(
    host: str, port: int, backend: str = _NCCL, seed: int = 1024, verbose: bool = True, config: Any = None
) -> None:
    """Call `launch` in a process that `srun` has started."""
    rank, world_size = map(int, _env.launcher_variables("Slurm", "SLURM_PROCID", "SLURM_NPROCS"))
    launch(rank, world_size, host, port, backend, _env.optional_integer("SLURM_LOCALID"), seed, verbose)


def launch_from_openmpi(
    host: str, port: int, backend: str = _NCCL, seed: int = 1024, verbose: bool = True, config: Any = None
) -> None:
    """Call `launch` in a process that Open MPI's `mpirun` has started."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE")
    rank, local_rank, world_size = map(int, _env.launcher_variables("Open MPI", *names))
    launch(rank, world_size, host, port, backend, local_rank, seed, verbose)


def _start(
    meeting: str, rank: int, world_size: int, backend: str, local_rank: int | None, seed: int, verbose: bool
) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} must be at least 0 and less than world_size={world_size}")
    if torch.accelerator.is_available():
        count = max(1, torch.accelerator.device_count())
        index = rank if local_rank is None else local_rank
        # A launcher may give each process a device of its own, the only one that it sees.
        may_be_own = count == 1 and _env.devices_are_chosen()
        if local_rank is not None and local_rank >= count and not may_be_own:
            warnings.warn(
                f"rank {rank} is process {local_rank} of its machine, which has {count} accelerators: it shares number "
                f"{index % count} with another process. Start at most {count} processes on this machine",
                stacklevel=3,
            )
        torch.accelerator.set_device_index(index % count)
    if not dist.is_initialized():
        if backend == _NCCL:
            accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            backend = dist.get_default_backend_for_device(accelerator or HOST)
        dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world_size)
    seed_host(seed)
    if verbose:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "no accelerator"
        get_dist_logger().info(
            f"{world_size} processes are connected by {dist.get_backend()}, with {device}", ranks=[0]
        )
