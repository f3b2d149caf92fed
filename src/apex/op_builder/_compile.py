"""Compilation of an extension by torch.utils.cpp_extension, cached by sources, flags and versions; short errors."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .._atomic import locked_file
from .._env import extensions_folder

# gcc and clang: "file:1:2: error: ..."; nvcc: "file(1): error: ..."; MSVC: "file(1): error C2065: ..."; linkers.
_ERROR = re.compile(r"(?:\berror\b[^\n]*:|undefined reference|cannot find -l|not found:|: No such file)")
_NINJA = re.compile(r"^(?:\[\d+/\d+\]|FAILED:|ninja:|\S*(?:c\+\+|g\+\+|nvcc|hipcc|cl)(?:\.exe)? )")
_LINES_SHOWN = 12


def first_error(output: str) -> str:
    """Return the first error in a compiler's output, with the lines that explain it; without one, the last lines."""
    lines = [line for line in output.splitlines() if line.strip() and not _NINJA.match(line)]
    for number, line in enumerate(lines):
        if _ERROR.search(line):
            rest = lines[number + 1 : number + _LINES_SHOWN]
            ends = [index for index, later in enumerate(rest) if _ERROR.search(later) or ": warning:" in later]
            return "\n".join([line, *rest[: ends[0] if ends else None]])
    return "\n".join(lines[-_LINES_SHOWN:])


def key_of(sources: Sequence[str], flags: Mapping[str, Any]) -> str:
    """Return a hash of 16 digits of everything an extension depends on: sources, flags, PyTorch, Python, compilers."""
    from torch.utils import cpp_extension

    name = cpp_extension.get_cxx_compiler()
    if shutil.which(name) is None:
        raise RuntimeError(f"there is no C++ compiler {name!r}; install one (such as g++) or set CXX")
    compiler = subprocess.run([name, "--version"], capture_output=True, text=True, check=True).stdout
    versions = [torch.__version__, torch.version.cuda, torch.version.hip, sys.version, platform.machine()]
    digest = hashlib.sha256(json.dumps([versions, compiler, cpp_extension.CUDA_HOME, flags]).encode())
    for source in sources:
        digest.update(source.encode() + b"\0" + Path(source).read_bytes())
    return digest.hexdigest()[:16]


def compile_extension(name: str, sources: Sequence[str], flags: Mapping[str, Any], verbose: bool) -> ModuleType:
    """Compile `sources`, unless this or another process has done so before, and return the module."""
    from torch.utils import cpp_extension

    missing = [source for source in sources if not Path(source).is_file()]
    if missing:
        raise FileNotFoundError(f"{name}: there is no source {missing[0]}; relative paths begin at the builder's file")
    if not cpp_extension.is_ninja_available():
        raise RuntimeError(f"{name} cannot be compiled: ninja is not installed; pip install ninja")
    folder = extensions_folder() / f"{name}-{key_of(sources, flags)}"
    folder.mkdir(parents=True, exist_ok=True)
    if verbose:
        print(f"{name}: compiling in {folder}, unless that was done before", flush=True)
    with locked_file(folder / "apex.lock"):
        # PyTorch waits for this file forever, and a killed process leaves it behind. Our lock is released then.
        (folder / "lock").unlink(missing_ok=True)
        try:
            # Not verbose: only then does PyTorch's error contain the compiler's output.
            return cpp_extension.load(name, list(sources), build_directory=str(folder), verbose=False, **flags)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            log = folder / "build.log"
            log.unlink(missing_ok=True)  # writing would follow a link
            log.write_text(str(error))
            raise RuntimeError(
                f"{name} could not be compiled. The first error:\n\n{first_error(str(error))}\n\n"
                f"Everything that the compiler printed is in {log}"
            ) from None
