"""`python -m tests.support.bare`: imports all test modules as pytest does on a GPU machine where nothing was installed.

Of the packages of this machine, the process finds PyTorch, Triton, NumPy, pytest and what these need. A GPU is
pretended: `torch.cuda` answers questions about it, and has nothing else.
"""

from __future__ import annotations

import contextlib
import sys
from importlib import metadata
from importlib.machinery import PathFinder
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

THERE = ("torch", "triton", "numpy", "pytest")


def closure(names: tuple[str, ...]) -> set[str]:
    """Return the distributions of these names and all that they need, as far as they are installed."""
    found: set[str] = set()
    waiting = [*names]
    while waiting:
        name = normal(waiting.pop())
        if name in found:
            continue
        with contextlib.suppress(metadata.PackageNotFoundError):
            needed = map(Requirement, metadata.requires(name) or [])
            waiting += [each.name for each in needed if not each.marker or each.marker.evaluate({"extra": ""})]
            found.add(name)
    return found


def normal(distribution: str) -> str:
    return distribution.lower().replace("_", "-")


def hide_packages() -> None:
    """Let no package be found that others installed."""
    there = closure(THERE) | {"apex"}
    packages = metadata.packages_distributions().items()
    hidden = {package for package, owners in packages if there.isdisjoint(map(normal, owners))}
    for name in [name for name in sys.modules if name.partition(".")[0] in hidden]:
        del sys.modules[name]
    find: Any = PathFinder.find_spec

    def find_spec(cls: type, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in hidden else find(name, path, target)

    PathFinder.find_spec = classmethod(find_spec)  # type: ignore[method-assign, assignment]


def pretend_a_gpu() -> None:
    properties: Any = type("Properties", (), {"name": "pretended", "major": 9, "minor": 0, "warp_size": 32})
    properties.multi_processor_count, properties.shared_memory_per_block_optin = 132, 227 << 10
    for name, answer in {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
    }.items():
        setattr(torch.cuda, name, lambda *_, answer=answer: answer)


class ImportsAlone:
    """A plugin of pytest with which test modules have no tests: to make them takes longest."""

    @staticmethod
    def pytest_pycollect_makeitem() -> list[pytest.Item]:
        return []


def main() -> int:
    hide_packages()
    pretend_a_gpu()
    options = ["-m", "gpu", "tests", "--collect-only", "-q", "-p", "no:cacheprovider"]
    return int(pytest.main(options, plugins=[ImportsAlone()]))


if __name__ == "__main__":
    sys.exit(main())
