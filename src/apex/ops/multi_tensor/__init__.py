"""Ops over lists of tensors: one launch for all of them.

`TritonLists` and `TorchLists` (made by `make_lists`) apply an update rule of `rules`; `op` has functions of lists.
"""

from .grouping import Lists, make_lists
from .op import axpby, clip, clipped_before, l2norm, lamb_step, mask, max_norm, scale, update_scale_hysteresis, zero
from .rule import Rule
