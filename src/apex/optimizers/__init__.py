"""Fused optimizers: each step is one pass over all parameters, or as few passes as the algorithm allows."""

from ..fp16_utils import FP16_Optimizer
from .fused_adagrad import FusedAdagrad
from .fused_adam import FusedAdam
from .fused_ademamix import FusedAdEMAMix
from .fused_lamb import FusedLAMB
from .fused_lars import FusedLARS
from .fused_lion import FusedLion
from .fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from .fused_muon import FusedMuon
from .fused_muon import muon_groups as muon_groups
from .fused_novograd import FusedNovoGrad
from .fused_radam import FusedNAdam, FusedRAdam
from .fused_schedule_free import FusedScheduleFreeAdamW
from .fused_sgd import FusedSGD
from .lamb import Lamb
from .npu_fused_adadelta import NpuFusedAdadelta
from .npu_fused_adam import NpuFusedAdam
from .npu_fused_adamp import NpuFusedAdamP
from .npu_fused_adamw import NpuFusedAdamW
from .npu_fused_bert_adam import NpuFusedBertAdam
from .npu_fused_lamb import NpuFusedLamb
from .npu_fused_rmsprop import NpuFusedRMSprop
from .npu_fused_rmsprop_tf import NpuFusedRMSpropTF
from .npu_fused_sgd import NpuFusedSGD
from .offloaded import OffloadedOptimizer

__all__ = [
    "FP16_Optimizer",
    "FusedAdEMAMix",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedLARS",
    "FusedLion",
    "FusedMixedPrecisionLamb",
    "FusedMuon",
    "FusedNAdam",
    "FusedNovoGrad",
    "FusedRAdam",
    "FusedSGD",
    "FusedScheduleFreeAdamW",
    "Lamb",
    "NpuFusedAdadelta",
    "NpuFusedAdam",
    "NpuFusedAdamP",
    "NpuFusedAdamW",
    "NpuFusedBertAdam",
    "NpuFusedLamb",
    "NpuFusedRMSprop",
    "NpuFusedRMSpropTF",
    "NpuFusedSGD",
    "OffloadedOptimizer",
]
