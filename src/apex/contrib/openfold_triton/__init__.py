"""Attention, layer norm and optimizer of OpenFold: any shape, any device."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

from .fused_adam_swa import FusedAdamSWA
from .layer_norm import LayerNormSmallShapeOptImpl
from .mha import AttnBiasJIT, AttnNoBiasJIT, AttnTri, CanSchTriMHA

__all__ = [
    "AttnBiasJIT",
    "AttnNoBiasJIT",
    "AttnTri",
    "CanSchTriMHA",
    "FusedAdamSWA",
    "LayerNormSmallShapeOptImpl",
    "sync_triton_auto_tune_cache_across_gpus",
]

logger = logging.getLogger("apex.contrib.openfold_triton")

# Kernels that are tuned at run time, which clients fill with results of earlier runs: there are none.
_tuneable_triton_kernels: OrderedDict[str, Any] = OrderedDict()


def sync_triton_auto_tune_cache_across_gpus(strict: bool = True, verbose: bool = False) -> None:
    """Does nothing: launches follow from shapes by fixed rules, so every rank makes the same ones without tuning."""
    if verbose:
        logger.info("kernels are not tuned at run time: there is nothing to send to other ranks")
