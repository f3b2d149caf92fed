"""Ahead-of-time compilation of kernels into Triton's cache, also for GPUs that this machine does not have."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import subprocess
import tempfile
import types
from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver

from .. import _env
from . import _library
from ._device import DeviceFacts, facts, pretend
from ._launch import SHARES_LAUNCHER, Launch, record_launches, shared_launcher
from ._launch_arguments import Described, as_argument


@dataclass(frozen=True)
class GPU:
    """A GPU to compile for: the target that Triton needs and the facts that launch rules read."""

    target: GPUTarget
    facts: DeviceFacts


def _gpu(backend: str, architecture: Any, warp_size: int, multiprocessors: int, shared_kib: int) -> GPU:
    capability = divmod(architecture, 10) if backend == "cuda" else (0, 0)
    known = DeviceFacts(
        str(architecture), backend, multiprocessors, warp_size, shared_kib * 1024, capability=capability
    )
    return GPU(GPUTarget(backend, architecture, warp_size), known)


GPUS = {
    "sm_80": _gpu("cuda", 80, 32, 108, 163),  # A100
    "sm_90": _gpu("cuda", 90, 32, 132, 227),  # H100, H200
    "sm_100": _gpu("cuda", 100, 32, 148, 227),  # B200
    "gfx90a": _gpu("hip", "gfx90a", 64, 104, 64),  # MI210, MI250
    "gfx942": _gpu("hip", "gfx942", 64, 304, 64),  # MI300
}


def gpu_here() -> dict[str, GPU]:
    """Return the current GPU of this machine by name, or an empty dict if there is no GPU."""
    if not torch.cuda.is_available():
        return {}
    here = facts(torch.device("cuda"))
    return {here.name: GPU(driver.active.get_current_target(), here)}


@contextlib.contextmanager
def planning(gpu: GPU, keep: bool = True) -> Iterator[MutableSequence[Launch]]:
    """Collect the launches that calls on tensors of the device "meta" would make on `gpu`, without computing anything.

    Accepts fake tensors too. If `keep` is false, launches are dropped at once, so that only their allocations matter.
    """
    # `implementation` clears the dispatch's cached answers about meta tensors on entry and on exit.
    with pretend(gpu.facts), _library.implementation(_library.requested), record_launches(keep) as launches:
        yield launches


def program(launch: Launch) -> tuple[Any, ...]:
    """Return the inputs of a compilation by Triton, except its facts about the integers (see `program_key`)."""
    prepared = launch.prepared
    tensors: tuple[Any, ...] = launch.tensors
    dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
    dtypes += tuple(tensor.block for tensor in tensors if isinstance(tensor, Described))
    # A function is represented by its name, because Triton wraps update rules anew for every list.
    names = ((each, getattr(each, "fn", None)) for each in prepared.constants)
    constants = tuple(each if fn is None else f"{fn.__module__}.{fn.__qualname__}" for each, fn in names)
    return prepared.kernel.name, constants, dtypes, prepared.num_warps, prepared.num_stages


def program_key(launch: Launch) -> tuple[Any, ...]:
    """Return a key that is equal for two launches exactly if they need the same compiled program."""
    # Triton specialises on whether an integer is 1, is a multiple of 16, or needs more than 32 bits; on the last alone
    # if the kernel says so. Kernels of the interpreter have no parameters.
    parameters = getattr(launch.prepared.kernel.function, "params", ())[len(launch.tensors) :]
    general = [parameter.do_not_specialize for parameter in parameters] or [False] * len(launch.prepared.sizes)
    sizes = tuple(
        (size >= 2**31,) if for_all else (size == 1, size % 16 == 0, size >= 2**31)
        for size, for_all in zip(launch.prepared.sizes, general, strict=False)
    )
    # On AMD GPUs Triton addresses tensors of less than 2 GiB in another way.
    large = tuple(tensor is not None and tensor.untyped_storage().size() >= 2**31 for tensor in launch.tensors)
    return (*program(launch), sizes, large)


def hash_triton() -> None:
    """Let Triton hash its own source files, which takes seconds, so that forked processes inherit the result."""
    for name in ("triton.runtime.cache", "triton.compiler.compiler"):
        getattr(importlib.import_module(name), "triton_key", lambda: None)()


def compile_launch(launch: Launch, gpu: GPU) -> Any:
    """Return Triton's compiled program, from Triton's cache if possible; otherwise compile it and fill the cache.

    Only for processes that launch nothing: this replaces Triton's driver by a stub that just names the target GPU. The
    cache key is the one of a real launch, although the tensors are on the device "meta".
    """
    prepared = launch.prepared
    arguments = (*map(as_argument, launch.tensors), *prepared.sizes, *launch.floats, *prepared.constants)
    driver.set_active(
        types.SimpleNamespace(
            get_current_device=lambda: gpu.target,  # a key of Triton's table of kernels in this process
            get_current_stream=lambda device: 0,
            get_current_target=lambda: gpu.target,
        )
    )
    options = {"num_warps": prepared.num_warps, "num_stages": prepared.num_stages}
    return prepared.kernel.function.run(*arguments, grid=prepared.grid, warmup=True, **options)


def entry_of(compiled: Any) -> str:
    """Return the name of the folder in Triton's cache that holds a compiled program."""
    return os.path.basename(get_cache_manager(compiled.hash).cache_dir)


def compile_launcher(compiled: Any) -> None:
    """Compile the C code with which Triton loads and, before 3.7, launches an NVIDIA kernel, into Triton's cache.

    Needs `linkable_driver`. Without a driver the compiled code cannot be loaded, but it is written to the cache.
    """
    from triton.backends.nvidia import driver as nvidia

    make_launcher = shared_launcher.make if SHARES_LAUNCHER else nvidia.CudaLauncher
    log = logging.getLogger("triton.runtime.build")  # warns of code in the cache that cannot be loaded
    before, log.level = log.level, logging.ERROR
    try:
        for make in (nvidia.CudaUtils, lambda: make_launcher(compiled.src, compiled.metadata)):
            with contextlib.suppress(ImportError, AttributeError):
                make()
    finally:
        log.level = before


@contextlib.contextmanager
def linkable_driver() -> Iterator[None]:
    """Provide an empty libcuda to link against if this machine has no NVIDIA driver; this needs a C compiler."""
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            library = f"{folder}/libcuda.so.1"
            options = ["-shared", "-x", "c", os.devnull, "-o", library, "-Wl,-soname,libcuda.so.1"]
            subprocess.run(["cc", *options], check=True, capture_output=True)
            os.symlink(library, f"{folder}/libcuda.so")
            stack.enter_context(_env.changed("TRITON_LIBCUDA_PATH", folder))
        yield
