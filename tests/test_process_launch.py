"""`apex.launch` and its forms: what they read, what they connect, what they say when something is missing."""

from __future__ import annotations

import random
import socket
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import apex
from apex import _env, _process_launch


@pytest.fixture(autouse=True)
def disconnected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NPROCS"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


def test_parser_needs_no_arguments() -> None:
    arguments = apex.get_default_parser().parse_args([])
    names = {"config", "host", "port", "world_size", "rank", "local_rank"}
    assert {name: getattr(arguments, name) for name in names} == dict.fromkeys(names)
    assert arguments.backend == "nccl"
    given = apex.get_default_parser().parse_args(["--port", "29", "--world_size", "4", "--rank", "3"])
    assert (given.port, given.world_size, given.rank) == (29, 4, 3)


def test_launch_connects_and_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    apex.launch(0, 1, "localhost", free_port(), seed=7)
    assert "gloo" in dist.get_backend()
    drawn = random.random(), torch.rand(2).tolist()
    apex.launch(0, 1, "localhost", 1, seed=7, verbose=False)  # connected already: seeds only
    assert (random.random(), torch.rand(2).tolist()) == drawn


def test_launch_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": free_port()}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    apex.launch_from_torch(config={}, backend="gloo", verbose=False)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")


@pytest.mark.parametrize(
    ("local_rank", "count", "visible", "shares"),
    [(1, 2, None, False), (3, 2, None, True), (3, 2, "0,1", True), (1, 1, None, True), (1, 1, "1", False)],
)
def test_processes_that_share_a_device_are_warned(
    local_rank: int, count: int, visible: str | None, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for name in _env._VISIBLE_DEVICES:
        monkeypatch.delenv(name, raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apex.launch(local_rank, 4, "localhost", 1, local_rank=local_rank, verbose=False)
    monkeypatch.undo()
    assert chosen == [local_rank % count]
    messages = [str(warning.message) for warning in caught]
    expected = f"it shares number {local_rank % count} with another process. Start at most {count} processes"
    assert [expected in message for message in messages] == [True] * shares


@pytest.mark.parametrize(
    ("arguments", "backend"), [(("gloo",), "gloo"), (("./config.py", "mpi"), "mpi"), (({}, "mpi"), "mpi"), ((), "nccl")]
)
def test_first_argument_may_be_the_backend(
    arguments: tuple[Any, ...], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colossal-AI dropped `config`: scripts of its newer releases pass the backend first."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(_process_launch, "_start", lambda *arguments: calls.append(arguments))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    apex.launch_from_torch(*arguments)
    assert [call[3] for call in calls] == [backend]


LAUNCHERS: dict[str, tuple[Callable[..., None], tuple[Any, ...], str]] = {
    "torchrun": (apex.launch_from_torch, (), "RANK, LOCAL_RANK"),
    "Slurm": (apex.launch_from_slurm, ("localhost", 1), "SLURM_PROCID"),
    "Open MPI": (apex.launch_from_openmpi, ("localhost", 1), "OMPI_COMM_WORLD_RANK"),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_missing_launcher_variables_are_named(name: str) -> None:
    launch, arguments, missing = LAUNCHERS[name]
    with pytest.raises(RuntimeError, match=f"{missing}.* not started by {name}"):
        launch(*arguments)


@pytest.mark.parametrize(
    ("launch", "variables"),
    [
        (apex.launch_from_slurm, {"SLURM_PROCID": "3", "SLURM_NPROCS": "8", "SLURM_LOCALID": "1"}),
        (
            apex.launch_from_openmpi,
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        ),
    ],
)
def test_numbers_of_other_launchers(
    launch: Callable[..., None], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(_process_launch, "_start", lambda *arguments: calls.append(arguments))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    launch("::1", 29500, seed=5, verbose=False)
    assert calls == [("tcp://[::1]:29500", 3, 8, "nccl", 1, 5, False)]


def test_rank_is_checked() -> None:
    with pytest.raises(ValueError, match="rank=2 must be at least 0 and less than world_size=2"):
        apex.launch(2, 2, "localhost", 1)
