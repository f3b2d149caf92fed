"""Builders of extensions: apex's own, which need no compiler, and base classes for other extensions."""

from __future__ import annotations

import sys
from types import ModuleType

from .all_ops import ALL_OPS, BUILDERS, BuilderUtils
from .builder import (
    CPUOpBuilder,
    CUDAMismatchException,
    CUDAOpBuilder,
    MissingCUDAException,
    OpBuilder,
    get_default_compute_capabilities,
    lazy_attributes,
)

__apex__ = True

__all__ = [
    "ALL_OPS",
    "BuilderUtils",
    "CPUOpBuilder",
    "CUDAMismatchException",
    "CUDAOpBuilder",
    "MissingCUDAException",
    "OpBuilder",
    "get_default_compute_capabilities",
    "lazy_attributes",
    *sorted(BUILDERS),
]


# Each builder can also be imported from its own module, like from its file in the original.
for _name, _builder in BUILDERS.items():
    _module = sys.modules.setdefault(_builder.__module__, ModuleType(_builder.__module__))
    setattr(_module, _name, _builder)
globals().update(BUILDERS)
