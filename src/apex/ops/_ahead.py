"""Compiling kernels ahead of time, for GPUs that need not be here, into the cache that Triton reads at run time."""

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
from ._launch import Launch, recording


@dataclass(frozen=True)
class GPU:
    """A GPU to compile for: what Triton and what launch rules must know about it."""

    target: GPUTarget
    facts: DeviceFacts


def _gpu(backend: str, architecture: Any, warp_size: int, multiprocessors: int, shared_kib: int) -> GPU:
    known = DeviceFacts(str(architecture), backend, multiprocessors, warp_size, shared_kib * 1024)
    return GPU(GPUTarget(backend, architecture, warp_size), known)


GPUS = {
    "sm_80": _gpu("cuda", 80, 32, 108, 163),  # A100
    "sm_90": _gpu("cuda", 90, 32, 132, 227),  # H100, H200
    "sm_100": _gpu("cuda", 100, 32, 148, 227),  # B200
    "gfx90a": _gpu("hip", "gfx90a", 64, 104, 64),  # MI210, MI250
    "gfx942": _gpu("hip", "gfx942", 64, 304, 64),  # MI300
}


def gpu_here() -> dict[str, GPU]:
    """The current GPU of this machine, if there is one, by its name."""
    if not torch.cuda.is_available():
        return {}
    here = facts(torch.device("cuda"))
    return {here.name: GPU(driver.active.get_current_target(), here)}


@contextlib.contextmanager
def planning(gpu: GPU, keep: bool = True) -> Iterator[MutableSequence[Launch]]:
    """Collects the launches that calls on tensors of the device "meta" would make on `gpu`; nothing is computed.

    Fake tensors are taken as such, too. Without `keep` launches are made and forgotten, for what they allocate.
    """
    # The dispatch forgets its answers about such tensors when this begins and when it ends.
    with pretend(gpu.facts), _library.implementation(_library.requested), recording(keep) as launches:
        yield launches


def program(launch: Launch) -> tuple[Any, ...]:
    """What Triton compiles a program for, but for what it is told of the integers (`program_key` has that too)."""
    prepared = launch.prepared
    dtypes = tuple(None if tensor is None else tensor.dtype for tensor in launch.tensors)
    # Of a function its name, because Triton wraps update rules for every list anew.
    names = ((each, getattr(each, "fn", None)) for each in prepared.constants)
    constants = tuple(each if fn is None else f"{fn.__module__}.{fn.__qualname__}" for each, fn in names)
    return prepared.kernel.name, constants, dtypes, prepared.num_warps, prepared.num_stages


def program_key(launch: Launch) -> tuple[Any, ...]:
    """Two launches with the same key need the same program of Triton's."""
    # Whether an integer is 1, a multiple of 16, and has more than 32 bits.
    sizes = tuple((size == 1, size % 16 == 0, size >= 2**31) for size in launch.prepared.sizes)
    # On AMD GPUs tensors of less than 2 GiB are addressed in another way.
    large = tuple(tensor is not None and tensor.untyped_storage().size() >= 2**31 for tensor in launch.tensors)
    return (*program(launch), sizes, large)


def hash_triton() -> None:
    """Lets Triton hash its own files, which takes it seconds, so that forks of this process need not."""
    for name in ("triton.runtime.cache", "triton.compiler.compiler"):
        getattr(importlib.import_module(name), "triton_key", lambda: None)()


def compile_launch(launch: Launch, gpu: GPU) -> Any:
    """Triton's compiled program: out of its cache if it is there, else written to it.

    For processes that launch nothing: Triton gets a driver that says which GPU it is for and no more. The key in its
    cache comes from the arguments as at run time, with tensors of the device "meta" in place of a GPU's.
    """
    prepared = launch.prepared
    arguments = (*launch.tensors, *prepared.sizes, *launch.floats, *prepared.constants)
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
    """The name of the folder in Triton's cache that holds a program."""
    return os.path.basename(get_cache_manager(compiled.hash).cache_dir)


def compile_launcher(compiled: Any) -> None:
    """Compiles the C code by which Triton starts and, before 3.7, launches an NVIDIA kernel, into the same cache.

    Needs `linkable_driver`; where there is no driver the code cannot be loaded, but it is written.
    """
    from triton.backends.nvidia import driver as nvidia

    log = logging.getLogger("triton.runtime.build")  # warns of code in the cache that cannot be loaded
    before, log.level = log.level, logging.ERROR
    try:
        for make in (nvidia.CudaUtils, lambda: nvidia.CudaLauncher(compiled.src, compiled.metadata)):
            with contextlib.suppress(ImportError, AttributeError):
                make()
    finally:
        log.level = before


@contextlib.contextmanager
def linkable_driver() -> Iterator[None]:
    """An empty library to link to in place of NVIDIA's driver where there is none; needs a C compiler there."""
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            library = f"{folder}/libcuda.so.1"
            options = ["-shared", "-x", "c", os.devnull, "-o", library, "-Wl,-soname,libcuda.so.1"]
            subprocess.run(["cc", *options], check=True, capture_output=True)
            os.symlink(library, f"{folder}/libcuda.so")
            stack.enter_context(_env.changed("TRITON_LIBCUDA_PATH", folder))
        yield
