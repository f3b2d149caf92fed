"""Environment variables: the only module that reads or sets them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

Implementation = Literal["auto", "triton", "torch"]
_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def requested_implementation() -> Implementation:
    """Return the value of `APEX_IMPL`: `auto` (default), `triton` or `torch`."""
    value = os.environ.get("APEX_IMPL", "auto").strip().lower() or "auto"
    if value not in get_args(Implementation):
        raise ValueError(f"APEX_IMPL={value!r} is not known; use one of {', '.join(get_args(Implementation))}")
    return value  # type: ignore[return-value]


def triton_interpreter_requested() -> bool:
    """Return whether `TRITON_INTERPRET` asks Triton to run its kernels in Python, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "yes", "on", "y")


def is_one(name: str) -> bool:
    """Return whether the variable `name` is set to 1."""
    return os.environ.get(name) == "1"


def no_color() -> bool:
    """Return whether `NO_COLOR` asks for plain output."""
    return bool(os.environ.get("NO_COLOR"))


def torchrun_numbers() -> tuple[int, int] | None:
    """Return this process's rank and the number of processes if torchrun started it, else None."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def error_file() -> Path | None:
    """Return the file that torchrun reads the error of this process from, or None."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return None if not path else Path(path)


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank and the number of processes that a launcher set; 0 and 1 without a launcher."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def meeting_point() -> str:
    """Return the address and port of the rendezvous of all processes; localhost:6000 without a launcher."""
    return f"{os.environ.get('MASTER_ADDR', 'localhost')}:{os.environ.get('MASTER_PORT', '6000')}"


def master_address() -> str | None:
    """Return the address of the machine of rank 0 that a launcher set, or None."""
    return os.environ.get("MASTER_ADDR")


def without_devices() -> dict[str, str]:
    """Return the environment for a process that uses no GPU and one thread."""
    return {**os.environ, **dict.fromkeys(_VISIBLE_DEVICES, ""), "OMP_NUM_THREADS": "1"}


def devices_are_chosen() -> bool:
    """Return whether the environment says which of the machine's GPUs this process sees."""
    return any(name in os.environ for name in _VISIBLE_DEVICES)


def processes_on_machine() -> int | None:
    """Return the number of processes that torchrun started on this machine, or None."""
    number = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(number) if number.isdecimal() else None


def gpus_per_infiniband_block() -> int | None:
    """Return the number of neighbouring ranks that InfiniBand connects, `NUM_GPUS_PER_IB_BLOCK`, or None."""
    number = os.environ.get("NUM_GPUS_PER_IB_BLOCK")
    if number is not None and not (number.isdecimal() and int(number)):
        raise ValueError(f"NUM_GPUS_PER_IB_BLOCK must be a positive integer, got {number!r}")
    return None if number is None else int(number)


def nccl_socket_interfaces() -> str | None:
    """Return the network interfaces in `NCCL_SOCKET_IFNAME`, or None."""
    return os.environ.get("NCCL_SOCKET_IFNAME")


def nccl_network() -> str | None:
    """Return the network in `NCCL_NET`, or None."""
    return os.environ.get("NCCL_NET")


def set_nccl_network(name: str | None) -> None:
    """Set `NCCL_NET`, which NCCL reads when a communicator is made; None removes the variable."""
    if name is None:
        os.environ.pop("NCCL_NET", None)
    else:
        os.environ["NCCL_NET"] = name


def is_on(name: str, default: str) -> bool:
    """Return whether the variable `name`, or `default` if `name` is not set, has a value other than off or 0."""
    return os.environ.get(name, os.environ.get(default, "")).strip().lower() not in ("", "0", "off", "false", "no")


def triton_cache() -> Path:
    """Return the folder of Triton's compiled kernels: `TRITON_CACHE_DIR`, or a folder in the user's home."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


@contextlib.contextmanager
def changed(name: str, value: str) -> Iterator[None]:
    """Set the variable `name` inside the block, also for processes started there, and restore it afterwards."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def extensions_folder() -> Path:
    """Return the folder of compiled extensions: `TORCH_EXTENSIONS_DIR`, or a folder in the user's cache."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or _user_cache() / "apex_extensions")


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def tuned_launches() -> Path | None:
    """Return the path of the table of tuned launches that `APEX_TUNED` names, or None if it is unset or `off`."""
    named = os.environ.get("APEX_TUNED", "").strip()
    return None if named.lower() in ("", "off") else Path(named)


def cuda_architectures() -> str:
    """Return the GPU architectures in `TORCH_CUDA_ARCH_LIST`, "" if it is not set."""
    return os.environ.get("TORCH_CUDA_ARCH_LIST", "")


def nvcc_threads() -> int:
    """Return `APEX_NVCC_THREADS`, or the number of cores, at most 8."""
    number = os.environ.get("APEX_NVCC_THREADS", "")
    return int(number) if number.isdecimal() and int(number) else min(os.cpu_count() or 1, 8)


def set_nccl_allocator_variables() -> None:
    """Set the variables that NCCL's memory pools need: enable NVLink SHARP, do not register every allocation."""
    os.environ["NCCL_NVLS_ENABLE"] = "1"
    os.environ["TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"] = "0"


def launcher_variables(launcher: str, *names: str) -> list[str]:
    """Return the values of variables that a launcher sets; raise a RuntimeError that names missing ones."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"{', '.join(missing)} is not in the environment: the script was not started by {launcher}; start it with "
            "`apex run --nproc-per-node N script.py`, or call the launch function of the launcher that you use"
        )
    return [os.environ[name] for name in names]


def optional_integer(name: str) -> int | None:
    """Return the variable `name` as an integer, or None if it is not set or no number."""
    number = os.environ.get(name, "")
    return int(number) if number.isdecimal() else None
