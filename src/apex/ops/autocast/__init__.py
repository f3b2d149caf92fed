"""Autocast: its state on a thread, and kernels on its dispatch keys for rules of apex that differ from PyTorch's."""

from .rule_kernels import RuleKernels
from .threads import casts_off, device_types, modes_here, restored_by, set_casts
