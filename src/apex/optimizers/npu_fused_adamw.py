"""NpuFusedAdamW under its module name on Ascend devices."""

from .npu_fused_adam import NpuFusedAdamW as NpuFusedAdamW
