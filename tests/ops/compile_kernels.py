"""Compiles every registered kernel, in the launch configurations it would really get, for GPUs that are not here.

    python -m tests.ops.compile_kernels [--every-launch | --every-branch] sm_90 sm_80 sm_100

`--every-launch` compiles every launch for every GPU. `--every-branch` also reads every launch whose absent tensors and
flags differ, down to Triton's first form (TTIR): each release of Triton refuses other Python. Without them only the
launches of `cover` are compiled, each kernel for the GPUs of `gpus_of`.

Launches go down to the assembly of GPUs: this shows what Triton or LLVM cannot lower there, and programs that need
more shared memory than there is. One launch of every kernel is also optimised by LLVM and made a binary (by ptxas, or
LLVM's assembler and linker) for one GPU, with float8 for one of each vendor, with `--every-launch` for each. Both
depend on the instructions of a kernel rather than on its block sizes, neither refuses a kernel for its size, and for
all launches they would take minutes more.

A launch without a matrix product is laid out (TTIR and TTGIR) for the first of a vendor's GPUs and lowered from there
for the others. Compared in a sample of 35 such launches: Triton makes the same LLVM code of this as of a layout for the
very GPU. It is lowered for another GPU only if it has an operation, with its types and attributes, that no launch
before had there, since the layout alone decides about memory and widths of access. For AMD, whose assembly is not
looked at, a launch without such an operation ends as LLVM code. Together that is a minute and a half less of CPU time.

Run as a process of its own because Triton's interpreter, which other tests use, is chosen when triton is imported.
Prints one JSON document: what was compiled for each GPU, and what failed. stderr names every launch before it is
compiled, so that a crash of a compiler has a place.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import inspect
import json
import math
import os
import pkgutil
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import Language
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

import apex.ops
from apex.ops import _compile_ahead, _device, _launch, _library
from apex.ops._examples import Call, Example, Make, Random, all_examples
from apex.ops._launch_arguments import Described


class Target:
    """A GPU to compile for; `facts.shared_memory` is what one program may use there."""

    def __init__(self, gpu: _compile_ahead.GPU) -> None:
        self.gpu, self.facts = gpu.target, gpu.facts

    @functools.cached_property
    def backend(self) -> Any:
        return make_backend(self.gpu)

    @property
    def attribute(self) -> str:
        """How a module says that it is laid out for this GPU."""
        return f'"{self.gpu.backend}:{self.gpu.arch}"'


TARGETS = {name: Target(gpu) for name, gpu in _compile_ahead.GPUS.items()}

# Kernels that launch rules choose for some GPUs only.
NOT_CHOSEN = {"hip": {"norm_backward_held"}}
# GPUs without float8, where nothing launches these kernels.
NO_FLOAT8 = {"sm_80", "gfx90a"}
FLOAT8_KERNELS = {"float8_cast", "float8_cast_blocks", "float8_block_product"}

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.float8_e4m3fnuz: "*fp8e4b8",
    torch.float8_e5m2fnuz: "*fp8e5b16",
}


def source_of(launch: _launch.Launch) -> ASTSource:
    """One recorded launch, specialised as Triton would specialise it at run time."""
    prepared = launch.prepared
    function = prepared.kernel.function
    names = function.arg_names
    numbers = (*prepared.sizes, *launch.floats)
    values = (*launch.tensors, *numbers, *prepared.constants)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list] = {}
    first_constant = len(launch.tensors) + len(numbers)
    for position, (name, value) in enumerate(zip(names, values, strict=True)):
        if position >= first_constant or value is None or (isinstance(value, int) and value == 1):
            signature[name] = "constexpr"
            constants[name] = value
        elif isinstance(value, Described):
            signature[name] = f"tensordesc<{_POINTERS[value.dtype][1:]}{list(value.block)}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(position,)] = [["tt.divisibility", 16]]
    return ASTSource(function, signature=signature, constexprs=constants, attrs=attributes)


def _parse(text: str, context: Any) -> Any:
    """The module that `text` is; Triton reads modules from files only."""
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(text)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    return module


class Program:
    """One launch on its way to the GPUs of one vendor."""

    def __init__(self, launch: _launch.Launch) -> None:
        self.launch = launch
        self.names: dict[str, None] = {}  # of the GPUs that get this launch, in order
        self.layout: tuple[str, Target] | None = None  # the TTGIR that serves all GPUs, and the one it was made for
        self.operations: frozenset[str] = frozenset()  # of the last layout
        self.lowered: tuple[int, str] = (0, "")  # shared memory and assembly, for that GPU

    def compile(self, target: Target, whole: bool, seen: set[str]) -> None:
        """Finds the shared memory that a program needs on `target`, and its assembly; if `whole` also makes a binary.

        `seen` are the operations of launches before.
        """
        prepared, backend = self.launch.prepared, target.backend
        options = backend.parse_options({"num_warps": prepared.num_warps, "num_stages": prepared.num_stages})
        if not whole:  # reading and linking a vendor's functions is a tenth of the time; programs made whole have them
            object.__setattr__(options, "extern_libs", ())
        metadata: dict[str, Any] = {"target": target.gpu, **options.__dict__}
        stages: dict[str, Any] = {}
        backend.add_stages(stages, options, Language.TRITON)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        if self.layout is None:
            given = options, backend.get_codegen_implementation(options), backend.get_module_map(), context
            module = source_of(self.launch).make_ir(target.gpu, *given)
            module = stages["ttir"](module, metadata)
            has_product = "tt.dot" in str(module)
            module = stages["ttgir"](module, metadata)
            self.layout = None if has_product else (str(module), target)
            self.operations = operations_of(str(module))
        else:
            text, origin = self.layout
            module = _parse(text.replace(origin.attribute, target.attribute), context)
        amd = target.gpu.backend == "hip"
        assembled = whole or not amd or not self.operations <= seen
        # Triton 3.9's LLVM aborts on unoptimised code of batch_norm_apply for AMD, which no user's launch ever has.
        os.environ["DISABLE_LLVM_OPT"] = "0" if whole or (amd and assembled) else "1"
        lower, assemble, binary = (stage for name, stage in stages.items() if name not in ("ttir", "ttgir"))
        module = lower(module, metadata)
        if assembled:
            module = assemble(module, metadata)
        if whole:
            binary(module, metadata)
        self.lowered = metadata["shared"], str(module)

    def known_bytes(self) -> int:
        """Return the bytes of a row that one access may take: 16, what divides its length, or a thread's share."""
        prepared = self.launch.prepared
        names = prepared.kernel.function.arg_names
        constants = dict(zip(names[len(names) - len(prepared.constants) :], prepared.constants, strict=True))
        elements = constants.get("ALIGN", 1)
        if "BLOCK" in constants:
            tile = constants["BLOCK"] * constants.get("ROWS", 1)
            elements = min(elements, max(1, tile // (32 * prepared.num_warps)))
        return min(16, elements * self.launch.tensors[0].element_size())


# Names of values, places in files, sizes of tensors, the numbers behind names of layouts, and numbers that are no part
# of a word.
_NUMBERS = re.compile(r"%\w+(?:[#:]\d+)?|loc\(.*\)|\b(?:\d+x)+|(?<=#)([a-z]+)\d+|(?<!\w)-?\d[\d.]*(?:e[-+]\d+)?")


def operations_of(module: str) -> frozenset[str]:
    """The lines of a module without names of values and numbers: operations with their types and attributes.

    Of functions, loops and branches only their kind: what they pass on is in the lines of the operations.
    """
    lines = (_NUMBERS.sub(lambda found: found[1] or "", line).strip() for line in module.splitlines())
    return frozenset(re.sub(r"^(.*?\b(?:tt\.func|scf\.\w+|cf\.\w+)).*", r"\1", line) for line in lines)


def widest_access(assembly: str) -> int:
    """Bytes of the widest access to global memory in PTX."""
    vectors = re.findall(r"(?:ld|st)\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", assembly)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?, 0x(\w+)", assembly)
    return max([int(count or 1) * int(bits) // 8 for count, bits in vectors] + [int(size, 16) for size in copies])


def record_all(target: Target) -> list[_launch.Launch]:
    """Return the launches of every family, planned for `target`.

    They are those of its examples, and of `tests.ops.<family>.launch_cases.record()` if there is one.
    """
    launches: list[_launch.Launch] = []
    examples = all_examples()
    for module in pkgutil.iter_modules(apex.ops.__path__):
        folder = Path(apex.ops.__path__[0]) / module.name
        if not any(folder.glob("kernels*.py")):
            continue
        cases = f"tests.ops.{module.name}.launch_cases"
        with _device.pretend(target.facts), _launch.record_launches() as collected:
            for example in examples.get(module.name, ()):
                record_example(example)
            if module.name not in examples or importlib.util.find_spec(cases) is not None:
                importlib.import_module(cases).record()
        launches.extend(collected)
    return launches


def record_example(example: Example) -> None:
    """Plan both passes of an example: at its first small sizes, those of benchmarks, and drawn ones."""
    calls = [(row.dtype, row.sizes) for row in example.listed if row.device == "cuda"]
    calls.append((torch.float32, example.small[0]))
    if example.draw is not None:
        random = Random(example.name, 1 << 26)
        calls.append((random.dtype(), example.draw(random)))
    with _library.implementation("triton"):
        for dtype, sizes in calls:
            Call(example, sizes, Make(dtype, torch.device("meta"))).results()


PRECISIONS = ("ieee", "tf32", "tf32x3")


def cover(launches: list[_launch.Launch], thorough: set[str]) -> list[_launch.Launch]:
    """Return launches of every kernel in which each combination of types occurs that an update rule's state has.

    Each float8 type occurs, too, and each precision of products in one kernel. Of the `thorough` kernels each
    precision, each activation, each update rule, and each size of the first tensor's elements occurs. The launches have
    the largest blocks that there are, and the smallest of a kernel comes first.
    """
    found: set[tuple[str, object]] = set()
    taken: list[_launch.Launch] = []
    for launch in sorted(launches, key=block_size, reverse=True):
        kernel, constants, dtypes, _, _ = _compile_ahead.program(launch)
        whole = kernel in thorough
        names = [constant for constant in constants if isinstance(constant, str)]
        states = [constant for constant in constants if isinstance(constant, tuple) and not whole]
        of_kernel = [
            None,
            *(name for name in names if name not in PRECISIONS and whole),
            *(dtype for dtype in dtypes if str(dtype).startswith("torch.float8")),
            *(str(dtype) for dtype in (states[0] if states else ()) if isinstance(dtype, tl.dtype)),
            *([dtypes[0].itemsize] if whole else []),
        ]
        wanted = {(kernel, each) for each in of_kernel}
        wanted |= {(kernel if whole else "", name) for name in names if name in PRECISIONS}
        if not wanted <= found:
            taken.append(launch)
            found |= wanted
    return taken[::-1]


def block_size(launch: _launch.Launch) -> int:
    """Return the number of elements of a program's blocks, times the stages of its loops."""
    constants = [each for each in launch.prepared.constants if isinstance(each, int) and each > 0]
    return launch.prepared.num_stages * math.prod(constants)


def one_of_each_branch(launches: list[_launch.Launch]) -> list[_launch.Launch]:
    """Return a launch of every kernel with each set of absent tensors, flags and names: each way through its source."""
    found: dict[tuple[Any, ...], _launch.Launch] = {}
    for launch in launches:
        kernel, constants, dtypes, _, _ = _compile_ahead.program(launch)
        flags = [constant if isinstance(constant, (bool, str)) else None for constant in constants]
        found.setdefault((kernel, *(dtype is None for dtype in dtypes), *flags), launch)
    return list(found.values())


def read_all(name: str) -> dict[str, Any]:
    """Make TTIR of a launch of each branch of each kernel for one GPU, and return how many there were and failures."""
    target, failures = TARGETS[name], []
    launches = one_of_each_branch(record_all(target))
    for launch in launches:
        context = ir.context()
        ir.load_dialects(context)
        target.backend.load_dialects(context)
        options = target.backend.parse_options({"num_warps": launch.prepared.num_warps})
        implementations = target.backend.get_codegen_implementation(options), target.backend.get_module_map()
        try:
            source_of(launch).make_ir(target.gpu, options, *implementations, context)
        except Exception as error:
            what = f"{_compile_ahead.program(launch)}: {type(error).__name__}"
            failures.append(f"{what}: {str(error)[-500:]}")
    return {"read": len(launches), "failures": failures}


def gpus_of(kernel: str, names: list[str]) -> list[str]:
    """Return the GPUs of `names` for which a kernel is compiled; for the first one it is compiled thoroughly.

    Without a matrix product and float8 it is the first GPU of one vendor, the vendors in turn; else a GPU of each
    vendor, its GPUs in turn.
    """
    turn, vendors = sorted(_launch.KERNELS).index(kernel), dict[str, list[str]]()
    for name in names:
        if kernel in kernels_of(name):
            vendors.setdefault(TARGETS[name].gpu.backend, []).append(name)
    gpus = list(vendors.values())
    gpus = gpus[turn % len(gpus) :] + gpus[: turn % len(gpus)] if gpus else []
    if kernel in FLOAT8_KERNELS or has_product(kernel):
        return [some[turn // 2 % len(some)] for some in gpus]
    return [some[0] for some in gpus[:1]]


def has_product(kernel: str) -> bool:
    """Return whether a kernel multiplies matrices, for which each GPU has other instructions."""
    function = _launch.KERNELS[kernel].function
    return "PRECISION" in function.arg_names or "tl.dot" in inspect.getsource(function.fn)


def kernels_of(name: str) -> set[str]:
    """Return the kernels that launch rules choose on a GPU."""
    kernels = set(_launch.KERNELS) - NOT_CHOSEN.get(TARGETS[name].gpu.backend, set())
    return kernels - FLOAT8_KERNELS if name in NO_FLOAT8 else kernels


def compile_all(names: list[str], every_launch: bool = False) -> dict[str, dict[str, Any]]:
    """Compiles the different launches of each of the GPUs `names`: some of each, or every one of them."""
    gc.freeze()  # what was imported stays, and need not be searched for garbage
    gc.set_threshold(50_000, 20, 20)
    programs: dict[tuple[Any, ...], Program] = {}
    launches = {name: record_all(TARGETS[name]) for name in names}  # which imports every kernel
    expected = {name: kernels_of(name) for name in names}
    thorough = expected
    if not every_launch:
        gpus = {kernel: gpus_of(kernel, names) for kernel in _launch.KERNELS}
        expected = {name: {kernel for kernel, some in gpus.items() if name in some} for name in names}
        thorough = {name: {kernel for kernel, some in gpus.items() if some[:1] == [name]} for name in names}
    for name in names:
        chosen = [launch for launch in launches[name] if launch.prepared.kernel.name in expected[name]]
        for launch in chosen if every_launch else cover(chosen, thorough[name]):
            key = TARGETS[name].gpu.backend, *_compile_ahead.program(launch)
            programs.setdefault(key, Program(launch)).names[name] = None
    reports: dict[str, dict[str, Any]] = {name: {"compiled": {}, "failures": []} for name in names}
    seen: dict[str, set[str]] = {name: set() for name in names}
    for program in programs.values():
        for name in program.names:
            kernel = program.launch.prepared.kernel.name
            as_binary = kernel in thorough[name] or kernel in FLOAT8_KERNELS
            _add_to_report(reports[name], program, TARGETS[name], seen[name], as_binary)
        program.layout = None
    for name, report in reports.items():
        report["unreached"] = sorted(expected[name] - set(report["compiled"]))
    return reports


def _add_to_report(report: dict[str, Any], program: Program, target: Target, seen: set[str], as_binary: bool) -> None:
    compiled, available = report["compiled"], target.facts.shared_memory
    kernel = program.launch.prepared.kernel.name
    what = f"{_compile_ahead.program(program.launch)} {program.launch.prepared.sizes} {program.launch.floats}"
    print(target.attribute, what, file=sys.stderr, flush=True)
    try:
        if program.layout is None or kernel not in compiled or not program.operations <= seen:
            program.compile(target, as_binary and kernel not in compiled, seen)
        shared, assembly = program.lowered
    except Exception as error:
        report["failures"].append(f"{what}: {type(error).__name__}: {str(error)[-500:]}")
        return
    seen |= program.operations
    compiled[kernel] = compiled.get(kernel, 0) + 1
    if shared > available:
        report["failures"].append(f"{what}: needs {shared} bytes of shared memory, {available} are there")
    if target.gpu.backend == "cuda" and widest_access(assembly) < program.known_bytes():
        report["failures"].append(
            f"{what}: accesses {widest_access(assembly)} bytes at once of {program.known_bytes()}"
        )


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # where Triton prints what ptxas refuses
        every_launch = "--every-launch" in sys.argv
        names = [name for name in sys.argv[1:] if name in TARGETS]
        reports = compile_all(names, every_launch)
        if "--every-branch" in sys.argv:
            reports[names[0]]["failures"] += read_all(names[0])["failures"]
    json.dump(reports, sys.stdout)
