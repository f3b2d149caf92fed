"""FusedLARS under upstream's module name."""

from .fused_sgd import FusedLARS as FusedLARS
