"""The entries of the zoo by library, and the exceptions from its bars."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Sequence

from .cases import Entry

# Modules with a list `ENTRIES`. Importing one imports the library.
LIBRARIES = {
    "handwritten": "tests.zoo.handwritten",
    "transformers": "tests.zoo.transformers_models",
    "timm": "tests.zoo.timm_models",
    "torchvision": "tests.zoo.torchvision_models",
    "diffusers": "tests.zoo.diffusers_models",
}

# Why a model may miss a bar, by its key.
EXCEPTIONS: dict[str, str] = {}

# Why a model raises an error in a precision, by its key and the precision.
RAISES = {
    ("handwritten/heat equation", "fp8"): "float8 products have no second derivative",
    ("handwritten/Fourier operator", "fp16"): "torch.amp.GradScaler takes no complex gradients",
}


def entries(library: str) -> list[Entry]:
    """Return the entries of a library; raises ImportError if it is not installed."""
    return list(importlib.import_module(LIBRARIES[library]).ENTRIES)


def find(key: str) -> Entry:
    """Return the entry of a key as in "handwritten/DiT"."""
    return next(entry for entry in entries(key.split("/")[0]) if entry.key == key)


def chosen(libraries: Sequence[str], patterns: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the keys of entries whose name or key matches a pattern, and why libraries are absent, by library.

    A pattern is as in the shell: "BERT*"; no pattern chooses all.
    """
    keys: list[str] = []
    absent: dict[str, str] = {}
    for library in libraries:
        try:
            found = entries(library)
        except ImportError as error:
            absent[library] = str(error)
            continue
        for entry in found:
            names = (entry.name.lower(), entry.key.lower())
            if not patterns or any(fnmatch.fnmatch(name, p.lower()) for p in patterns for name in names):
                keys.append(entry.key)
    return keys, absent
