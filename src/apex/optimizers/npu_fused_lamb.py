"""NpuFusedLamb: `Lamb` under its name on Ascend devices."""

from .lamb import Lamb


class NpuFusedLamb(Lamb):
    """`apex.optimizers.Lamb`, whose `use_global_grad_norm` clips gradients by their norm over all parameters."""
