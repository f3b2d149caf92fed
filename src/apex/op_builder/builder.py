"""Builders of C++, CUDA and HIP extensions: a subclass names its sources, `load()` compiles and imports them."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import inspect
import re
import subprocess
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

from .. import _env
from ._compile import compile_extension


class MissingCUDAException(Exception):
    """The CUDA toolkit, needed for compilation, is missing."""


class CUDAMismatchException(Exception):
    """The CUDA toolkit's major version differs from the version that PyTorch was built with."""


def installed_cuda_version(name: str = "a CUDA extension") -> tuple[int, int]:
    """Return the version of nvcc."""
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None:
        raise MissingCUDAException(f"{name} needs nvcc; install the CUDA toolkit or set CUDA_HOME")
    output = subprocess.run([f"{CUDA_HOME}/bin/nvcc", "-V"], capture_output=True, text=True, check=True).stdout
    major, minor = re.findall(r"release (\d+)\.(\d+)", output)[0]
    return int(major), int(minor)


def assert_no_cuda_mismatch(name: str = "a CUDA extension") -> bool:
    """Return True if nvcc and PyTorch have the same major version, or `APEX_SKIP_CUDA_CHECK=1`; raise otherwise."""
    if torch.version.cuda is None:
        raise MissingCUDAException(f"PyTorch {torch.__version__} is a build without CUDA")
    major, minor = installed_cuda_version(name)
    if torch.version.cuda.split(".")[0] == str(major) or _env.is_one("APEX_SKIP_CUDA_CHECK"):
        return True
    raise CUDAMismatchException(
        f"{name}: nvcc is {major}.{minor}, PyTorch was made with CUDA {torch.version.cuda}; "
        "install the toolkit of PyTorch's version, or set APEX_SKIP_CUDA_CHECK=1"
    )


def get_default_compute_capabilities() -> str:
    """Return the default GPUs to compile for: the GPUs that this package's kernels support."""
    return "8.0;8.6;9.0" + (";10.0;12.0" if installed_cuda_version() >= (12, 8) else "")


class OpBuilder(ABC):
    """A description of one extension, for `load()`. Relative paths begin at the folder of the subclass's file."""

    BUILD_VAR = ""
    INCLUDE_FLAG = ""
    NAME = ""

    _loaded: ClassVar[dict[tuple[type, str], ModuleType]] = {}

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME
        self.error_log: str | None = None

    @abstractmethod
    def absolute_name(self) -> str:
        """Return the name under which an installed extension is imported, such as `package.name`."""

    @abstractmethod
    def sources(self) -> Sequence[str]:
        """Return the files to compile."""

    def include_paths(self) -> Sequence[str]:
        return []

    def cxx_args(self) -> list[str]:
        """Return the C++ compiler's flags; without a standard, because PyTorch adds the one its headers need."""
        return ["-O3"]

    def nvcc_args(self) -> list[str]:
        return []

    def extra_ldflags(self) -> list[str]:
        return []

    def libraries_args(self) -> list[str]:
        return []

    def hipify_extension(self) -> None:  # noqa: B027  an answer, not a gap
        """Do nothing: PyTorch translates CUDA sources for AMD GPUs when it compiles them."""

    @staticmethod
    def is_rocm_pytorch() -> bool:
        return torch.version.hip is not None

    @staticmethod
    def strip_empty_entries(args: Iterable[str]) -> list[str]:
        return [entry for entry in args if entry]

    def warning(self, msg: str) -> None:
        """Warn, and store the reason in `error_log`."""
        self.error_log = msg
        warnings.warn(f"{self.name}: {msg}", stacklevel=3)

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the extension can be compiled here; with `verbose` a warning says why not."""
        return True

    def has_function(
        self, funcname: str, libraries: Sequence[str], library_dirs: Sequence[str] | None = None, verbose: bool = False
    ) -> bool:
        """Return whether a C program that calls `funcname` links with these libraries; `verbose` shows why not."""
        options = [f"-L{path}" for path in library_dirs or ()] + [f"-l{library}" for library in libraries]
        program = f"char {funcname}(); int main() {{ return {funcname}(); }}"
        with tempfile.TemporaryDirectory() as folder:
            command = ["cc", "-w", "-x", "c", "-", "-o", f"{folder}/main", *options]
            return not subprocess.run(command, input=program, text=True, capture_output=not verbose).returncode

    def _paths(self, paths: Iterable[str]) -> list[str]:
        folder = Path(inspect.getfile(type(self))).resolve().parent
        return [str(folder / path) for path in self.strip_empty_entries(paths)]

    def _needs_gpu_compiler(self) -> bool:
        return any(source.endswith((".cu", ".hip")) for source in self.sources())

    def builder(self) -> Any:
        """Return a setuptools Extension, for packages that compile on installation; paths are as in `sources`."""
        from torch.utils.cpp_extension import CppExtension, CUDAExtension

        gpu = self._needs_gpu_compiler()
        flags = {"cxx": self.cxx_args(), **({"nvcc": self.nvcc_args()} if gpu else {})}
        return (CUDAExtension if gpu else CppExtension)(
            name=self.absolute_name(),
            sources=self.strip_empty_entries(self.sources()),
            include_dirs=self._paths(self.include_paths()),
            libraries=self.libraries_args(),
            extra_compile_args={compiler: self.strip_empty_entries(args) for compiler, args in flags.items()},
            extra_link_args=self.strip_empty_entries(self.extra_ldflags()),
        )

    def load(self, verbose: bool = True) -> ModuleType:
        """Return the module: loaded before, installed under `absolute_name()`, or compiled now (`jit_load`)."""
        key = (type(self), self.name)
        if key not in self._loaded:
            installed = self._is_installed()
            self._loaded[key] = importlib.import_module(self.absolute_name()) if installed else self.jit_load(verbose)
        return self._loaded[key]

    def _is_installed(self) -> bool:
        """Return whether `absolute_name()` is a compiled module, not a Python module of that name."""
        try:
            spec = importlib.util.find_spec(self.absolute_name())
        except ModuleNotFoundError:
            return False
        return spec is not None and str(spec.origin).endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))

    def jit_load(self, verbose: bool = True) -> ModuleType:
        """Compile the sources, unless done before with the same flags and versions, and import the module."""
        if not self.is_compatible(verbose=False):
            raise RuntimeError(f"{self.name} cannot be compiled here: {self.error_log or 'is_compatible() is False'}")
        gpu = self._needs_gpu_compiler()
        linked = [*self.extra_ldflags(), *(f"-l{library}" for library in self.libraries_args())]
        flags = {
            "extra_cflags": self.strip_empty_entries(self.cxx_args()),
            "extra_cuda_cflags": self.strip_empty_entries(self.nvcc_args()) if gpu else [],
            "extra_ldflags": self.strip_empty_entries(linked),
            "extra_include_paths": self._paths(self.include_paths()),
            "with_cuda": gpu,
        }
        return compile_extension(self.name, self._paths(self.sources()), flags, verbose)


class CUDAOpBuilder(OpBuilder):
    """An extension that may have CUDA or HIP sources."""

    INCLUDE_FLAG = "APEX_BUILD_CUDA_OPS"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether there is a GPU compiler that fits PyTorch, if a source needs one."""
        try:
            if self._needs_gpu_compiler() and not self.is_rocm_pytorch():
                assert_no_cuda_mismatch(self.name)
        except (MissingCUDAException, CUDAMismatchException) as error:
            self.error_log = str(error)
            if verbose:
                self.warning(str(error))
            return False
        return super().is_compatible(verbose)

    def nvcc_args(self) -> list[str]:
        """Return the flags of nvcc or hipcc; PyTorch chooses the GPUs to compile for (`TORCH_CUDA_ARCH_LIST`)."""
        vendor = "HIP" if self.is_rocm_pytorch() else "CUDA"
        args = [f"-U__{vendor}_NO_HALF{word}__" for word in ("_OPERATORS", "_CONVERSIONS", "2_OPERATORS")]
        if vendor == "CUDA":
            args.append(f"--threads={_env.nvcc_threads()}")
            args += ["--ptxas-options=-v"] if _env.is_one("APEX_DEBUG_CUDA_BUILD") else []
        return ["-O3", *args]

    def compute_capability_args(self, cross_compile_archs: str | None = None) -> list[str]:
        """Return nvcc's flags for `TORCH_CUDA_ARCH_LIST`, else for a list ("8.0;9.0+PTX"), else for default GPUs."""
        architectures = _env.cuda_architectures() or cross_compile_archs or get_default_compute_capabilities()
        flags = []
        for major, minor in self.filter_ccs(architectures.replace(" ", ";").strip(";").split(";")):
            number, ptx = f"{major}{minor.removesuffix('+PTX')}", minor.endswith("+PTX")
            flags += [f"-gencode=arch=compute_{number},code={kind}_{number}" for kind in ["sm"] + ["compute"] * ptx]
        return flags

    def filter_ccs(self, ccs: list[str]) -> list[list[str]]:
        """Return each compute capability as its two numbers; a subclass leaves out unsupported ones."""
        return [cc.split(".") for cc in ccs]

    def version_dependent_macros(self) -> list[str]:
        """Return macros of old PyTorch versions that apex's sources use."""
        return ["-DVERSION_GE_1_1", "-DVERSION_GE_1_3", "-DVERSION_GE_1_5"]

    def generator_args(self) -> list[str]:
        """Return no flags: the macro gave the path of a header before PyTorch 1.6."""
        return []

    def nccl_args(self) -> list[str]:
        return ["-lrccl" if self.is_rocm_pytorch() else "-lnccl"]

    def nccl_version(self) -> tuple[int, ...]:
        return tuple(torch.cuda.nccl.version()[:2])

    def torch_version(self) -> tuple[int, ...]:
        return tuple(int(part) for part in torch.__version__.split(".")[:2])


class CPUOpBuilder(CUDAOpBuilder):
    """An extension of C++ sources."""

    INCLUDE_FLAG = "APEX_BUILD_CPP_OPS"


def lazy_attributes(builder: type[OpBuilder]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a module that compiles `builder`'s extension at the first access."""

    def get_attribute(name: str) -> Any:
        if name.startswith("_"):  # tools that inspect modules must not start a compilation
            raise AttributeError(f"{builder.NAME} has no attribute {name!r}")
        try:
            module = builder().load(verbose=False)
        except Exception as error:
            raise ImportError(f"{builder.NAME} cannot be loaded: {error}", name=builder.NAME) from error
        return getattr(module, name)

    def list_attributes() -> list[str]:
        return dir(builder().load(verbose=False))

    return get_attribute, list_attributes
