"""The one place that reads environment variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

Implementation = Literal["auto", "triton", "torch"]


def requested_implementation() -> Implementation:
    """What `APEX_IMPL` asks for: `auto` (default), `triton` or `torch`."""
    value = os.environ.get("APEX_IMPL", "auto").strip().lower() or "auto"
    if value not in get_args(Implementation):
        raise ValueError(f"APEX_IMPL={value!r} is not known; use one of {', '.join(get_args(Implementation))}")
    return value  # type: ignore[return-value]


def triton_interpreter_requested() -> bool:
    """Whether `TRITON_INTERPRET` asks Triton to run its kernels in Python, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "").strip().lower() in ("1", "true", "yes", "on", "y")


def is_one(name: str) -> bool:
    """Whether the variable `name` is set to 1."""
    return os.environ.get(name) == "1"


def no_color() -> bool:
    """Whether `NO_COLOR` asks for plain output."""
    return bool(os.environ.get("NO_COLOR"))


def torchrun_numbers() -> tuple[int, int] | None:
    """This process's rank and the number of processes, if torchrun started it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def rank_and_world_size() -> tuple[int, int]:
    """What the launcher says; one process without a launcher."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def meeting_point() -> str:
    """The address and port where processes meet; port 6000 of this machine without a launcher."""
    return f"{os.environ.get('MASTER_ADDR', 'localhost')}:{os.environ.get('MASTER_PORT', '6000')}"


def processes_on_machine() -> int | None:
    """How many processes torchrun started on this machine, if it did."""
    number = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(number) if number.isdecimal() else None


def gpus_per_infiniband_block() -> int | None:
    """How many neighbouring ranks InfiniBand connects, if `NUM_GPUS_PER_IB_BLOCK` says so."""
    number = os.environ.get("NUM_GPUS_PER_IB_BLOCK")
    if number is not None and not (number.isdecimal() and int(number)):
        raise ValueError(f"NUM_GPUS_PER_IB_BLOCK must be a positive integer, got {number!r}")
    return None if number is None else int(number)


def nccl_socket_interfaces() -> str | None:
    """The network interfaces that `NCCL_SOCKET_IFNAME` names."""
    return os.environ.get("NCCL_SOCKET_IFNAME")


def nccl_network() -> str | None:
    """The network that `NCCL_NET` names."""
    return os.environ.get("NCCL_NET")


def set_nccl_network(name: str | None) -> None:
    """Sets `NCCL_NET`, which NCCL reads when a communicator is made; None removes it."""
    if name is None:
        os.environ.pop("NCCL_NET", None)
    else:
        os.environ["NCCL_NET"] = name


def is_on(name: str, default: str) -> bool:
    """Whether the variable `name`, or the variable `default` where it is not set, says yes."""
    return os.environ.get(name, os.environ.get(default, "")).strip().lower() not in ("", "0", "off", "false", "no")


def triton_cache() -> Path:
    """Where Triton keeps what it compiled: `TRITON_CACHE_DIR`, else a folder of the user's home."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


@contextlib.contextmanager
def changed(name: str, value: str) -> Iterator[None]:
    """The variable `name` has another value inside, also for processes that are started."""
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
    """Where compiled extensions are kept: `TORCH_EXTENSIONS_DIR`, else a folder of the user's."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "apex_extensions")


def tuned_launches() -> Path | None:
    """Return the path of the table of tuned launches that `APEX_TUNED` names, or None if it is unset or `off`."""
    named = os.environ.get("APEX_TUNED", "").strip()
    return None if named.lower() in ("", "off") else Path(named)


def cuda_architectures() -> str:
    """The GPUs that `TORCH_CUDA_ARCH_LIST` names."""
    return os.environ.get("TORCH_CUDA_ARCH_LIST", "")


def nvcc_threads() -> int:
    """What `APEX_NVCC_THREADS` says, else a thread for each core, 8 at most."""
    number = os.environ.get("APEX_NVCC_THREADS", "")
    return int(number) if number.isdecimal() and int(number) else min(os.cpu_count() or 1, 8)


def set_nccl_allocator_variables() -> None:
    """NVLink SHARP on, and no registration of every allocation: what pools of NCCL's memory need."""
    os.environ["NCCL_NVLS_ENABLE"] = "1"
    os.environ["TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"] = "0"


def launcher_variables(launcher: str, *names: str) -> list[str]:
    """What a launcher has put into the environment; a RuntimeError that names what is missing."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"{', '.join(missing)} is not in the environment: the script was not started by {launcher}; start it with "
            "`apex run --nproc-per-node N script.py`, or call the launch function of the launcher that you use"
        )
    return [os.environ[name] for name in names]


def optional_integer(name: str) -> int | None:
    """The variable `name` as a number, if it is set."""
    number = os.environ.get(name, "")
    return int(number) if number.isdecimal() else None
