"""NpuFusedAdamP under its module name on Ascend devices."""

from .npu_fused_adam import NpuFusedAdamP as NpuFusedAdamP
