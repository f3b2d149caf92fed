"""Autocast: how it is set on a thread, and kernels on its dispatch keys where apex's rules differ from PyTorch's."""

from .rule_kernels import RuleKernels
from .threads import casts_off, device_types, modes_here, restored_by, set_casts
