"""OpenFold's attention, layer norm and optimizer, for any shape and device."""

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

# Client code fills this with autotuning results of earlier runs. It stays empty: no kernel is tuned at run time.
_tuneable_triton_kernels: OrderedDict[str, Any] = OrderedDict()


def sync_triton_auto_tune_cache_across_gpus(strict: bool = True, verbose: bool = False) -> None:
    """Do nothing: launch parameters follow from shapes by fixed rules, so all ranks agree without tuning."""
    if verbose:
        logger.info("kernels are not tuned at run time: there is nothing to send to other ranks")
