"""The garbage collector, in tests of code that collects garbage or looks through all objects many times."""

from __future__ import annotations

import gc
import importlib


def freeze() -> None:
    """Let later collections skip all objects that exist now, among them PyTorch's compiler; each takes 0.2 s less."""
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()
