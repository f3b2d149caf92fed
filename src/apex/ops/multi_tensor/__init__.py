"""Ops over lists of tensors: one launch for all of them.

`TritonLists` and `TorchLists` (made by `make_lists`) apply an update rule of `rules`; `op` has functions of whole
lists.
"""

from .list_updates import lamb_step, update_scale_hysteresis
from .op import Lists, axpby, clip, clipped_before, l2norm, make_lists, mask, max_norm, scale, zero
from .rule import Rule
