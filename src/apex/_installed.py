"""Versions of installed distributions, found without importing them."""

from __future__ import annotations

import importlib.metadata

TRITON_DISTRIBUTIONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows")


def installed_version(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed, or None."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
