"""FusedMixedPrecisionLamb under upstream's module name."""

from .fused_lamb import FusedMixedPrecisionLamb as FusedMixedPrecisionLamb
