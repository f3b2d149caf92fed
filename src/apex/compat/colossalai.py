"""Imports of `colossalai` that load apex instead, for packages that must not be edited.

    from apex.compat import colossalai
    colossalai.install()

`python -m apex.compat.colossalai script.py` calls `install()` and runs a script; `apex run --colossalai` does both in
every process.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from .._refused import refuse

__all__ = ["install"]

_NAME = "colossalai"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder whose modules of `colossalai` are the modules of apex at the same path."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".")[0] != _NAME:
            return None
        counterpart = _counterpart(fullname)
        if importlib.util.find_spec(counterpart) is None:
            refuse(fullname.removeprefix(f"{_NAME}."))
            raise ModuleNotFoundError(
                f"{fullname} has no counterpart in apex: there is no module {counterpart}.", name=fullname
            )
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes the module that is in sys.modules afterwards.
        sys.modules[module.__name__] = importlib.import_module(_counterpart(module.__name__))


def _counterpart(fullname: str) -> str:
    return f"apex{fullname.removeprefix(_NAME)}"


def install(replace: bool = False) -> None:
    """Make imports of `colossalai` load the modules of apex, in this process and from now on.

    Raise a RuntimeError if the real package is installed or imported, unless `replace` is set. Package metadata
    does not change: no distribution called colossalai is added.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if not replace and importlib.util.find_spec(_NAME) is not None:
        raise RuntimeError(
            "the package colossalai is installed; call apex.compat.colossalai.install(replace=True) to use apex in its "
            "place, or remove it"
        )
    for name in [name for name in sys.modules if name.split(".")[0] == _NAME]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())


def _main(arguments: list[str]) -> None:
    """Run a script, or a module after `--module`, with its arguments."""
    install()
    is_module = arguments[:1] == ["--module"]
    sys.argv = arguments[is_module:]
    if not sys.argv:
        sys.exit("usage: python -m apex.compat.colossalai [--module] SCRIPT [ARGUMENTS]")
    sys.path[0] = str(Path.cwd() if is_module else Path(sys.argv[0]).resolve().parent)
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _main(sys.argv[1:])
