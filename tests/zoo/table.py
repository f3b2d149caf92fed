"""The entries of the zoo by library, and the exceptions from its bars."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Sequence

from .cases import Entry

# Modules with a list `ENTRIES`. Importing one imports the library.
LIBRARIES = {
    "handwritten": "tests.zoo.handwritten",
}

# Why a model may miss a bar, by its key.
EXCEPTIONS: dict[str, str] = {}

# Hand-written models that miss a bar of "bf16", or raise in "fp8" or "fp16", because of known faults.
FAULTS = frozenset(
    {
        "handwritten/CRF",
        "handwritten/CTC",
        "handwritten/DiT",
        "handwritten/FNet",
        "handwritten/Fourier operator",
        "handwritten/GPT, tied",
        "handwritten/GRU with attention",
        "handwritten/VAE, methods called",
        "handwritten/VQ-VAE",
        "handwritten/contrastive",
        "handwritten/detection",
        "handwritten/diffusion U-Net",
        "handwritten/flow",
        "handwritten/gradient penalty",
        "handwritten/heat equation",
        "handwritten/mixture of experts",
        "handwritten/noise in forward",
        "handwritten/noise like activations",
        "handwritten/positions to 5000",
        "handwritten/radiance field",
        "handwritten/recommender",
        "handwritten/region without autocast",
        "handwritten/segmentation",
        "handwritten/self-distillation",
        "handwritten/state space",
        "handwritten/time embedding",
        "handwritten/time embedding, float times",
        "handwritten/uncertainty weights",
        "handwritten/zeros in forward",
    }
)


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
