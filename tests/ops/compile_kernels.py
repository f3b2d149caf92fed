"""Compiles every registered kernel, in the launch configurations it would really get, for a GPU that is not here.

    python -m tests.ops.compile_kernels sm_80 sm_90 sm_100
    python -m tests.ops.compile_kernels sm_80 --all

The GPUs of THOROUGH get every launch; their relatives, without `--all`, one launch of every kernel and update rule,
because all of them would take three minutes more of a test run.
Run as a process of its own because Triton's interpreter, which other tests use, is chosen when triton is imported.
Prints one JSON document: what was compiled for each, and what failed.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import apex.ops
from apex.ops import _device, _launch

KIB = 1024


@dataclass(frozen=True)
class Target:
    """A GPU to compile for; `facts.shared_memory` is what one program may use there."""

    gpu: GPUTarget
    facts: _device.DeviceFacts


def _target(backend: str, architecture: Any, warp_size: int, multiprocessors: int, shared_kib: int) -> Target:
    facts = _device.DeviceFacts(str(architecture), backend, multiprocessors, warp_size, shared_kib * KIB)
    return Target(GPUTarget(backend, architecture, warp_size), facts)


TARGETS = {
    "sm_80": _target("cuda", 80, 32, 108, 163),  # A100
    "sm_90": _target("cuda", 90, 32, 132, 227),  # H100, H200
    "sm_100": _target("cuda", 100, 32, 148, 227),  # B200
    "gfx90a": _target("hip", "gfx90a", 64, 104, 64),  # MI210, MI250
    "gfx942": _target("hip", "gfx942", 64, 304, 64),  # MI300
}

THOROUGH = ("sm_90", "gfx942")

# Kernels that launch rules choose for some GPUs only.
NOT_CHOSEN = {"cuda": {"sum_groups"}, "hip": {"apply_and_reduce", "norm_backward_held"}}

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


def compile_launch(launch: _launch.Launch, target: Target) -> Any:
    """Compiles one recorded launch, specialised as Triton would specialise it at run time."""
    bound = launch.bound
    function = bound.kernel.function
    names = function.arg_names
    values = (*launch.tensors, *bound.numbers, *bound.constants)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list] = {}
    first_constant = len(launch.tensors) + len(bound.numbers)
    for position, (name, value) in enumerate(zip(names, values, strict=True)):
        if position >= first_constant or value is None or (isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": bound.num_warps, "num_stages": bound.num_stages}
    return triton.compile(source, target=target.gpu, options=options)


def record_all(target: Target) -> list[_launch.Launch]:
    """The launches of every family's `tests.ops.<family>.launch_cases.record()`, planned for `target`."""
    launches: list[_launch.Launch] = []
    for module in pkgutil.iter_modules(apex.ops.__path__):
        folder = Path(apex.ops.__path__[0]) / module.name
        if not any(folder.glob("kernels*.py")):
            continue
        cases = importlib.import_module(f"tests.ops.{module.name}.launch_cases")
        with _device.pretend(target.facts), _launch.recording() as collected:
            cases.record()
        launches.extend(collected)
    return launches


def _kind(bound: _launch.BoundLaunch) -> tuple[Any, ...]:
    """The kernel, and the update rule where the kernel is made for one, by its name: Triton wraps it for every list."""
    rules = [constant.fn for constant in bound.constants if hasattr(constant, "fn")]
    return (bound.kernel.name, *(f"{rule.__module__}.{rule.__qualname__}" for rule in rules))


def compile_all(target: Target, every: bool) -> dict[str, Any]:
    """Compiles the launches that differ in what Triton makes a kernel of; without `every`, one of each kind."""
    compiled: dict[str, int] = {}
    failures: list[str] = []
    seen = set()
    for launch in record_all(target):
        bound = launch.bound
        dtypes = tuple(None if tensor is None else tensor.dtype for tensor in launch.tensors)
        what = f"{bound.kernel.name} {bound.constants} {bound.numbers} {dtypes} {bound.num_warps} warps"
        key = (bound.kernel.name, bound.constants, dtypes, bound.num_warps, bound.num_stages) if every else _kind(bound)
        if key in seen:
            continue
        seen.add(key)
        try:
            shared = compile_launch(launch, target).metadata.shared
        except Exception as error:
            failures.append(f"{what}: {type(error).__name__}: {str(error)[-500:]}")
            continue
        compiled[bound.kernel.name] = compiled.get(bound.kernel.name, 0) + 1
        if shared > target.facts.shared_memory:
            failures.append(f"{what}: needs {shared} bytes of shared memory, {target.facts.shared_memory} are there")
    unreached = sorted(set(_launch.KERNELS) - set(compiled) - NOT_CHOSEN.get(target.gpu.backend, set()))
    return {"compiled": compiled, "failures": failures, "unreached": unreached}


def main(arguments: list[str]) -> None:
    every = "--all" in arguments
    names = [argument for argument in arguments if argument != "--all"]
    json.dump({name: compile_all(TARGETS[name], every or name in THOROUGH) for name in names}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
