"""NpuFusedRMSpropTF under its module name on Ascend devices."""

from .npu_fused_rmsprop import NpuFusedRMSpropTF as NpuFusedRMSpropTF
