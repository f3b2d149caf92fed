"""Fused layer norm, RMS norm and instance norm."""

from .fused_layer_norm import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from .instance_norm import InstanceNorm3dNVFuser

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "InstanceNorm3dNVFuser", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]
