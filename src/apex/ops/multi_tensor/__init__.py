"""Ops over lists of tensors: one launch for all of them.

`TritonLists` and `TorchLists` apply an update rule of `rules`; `dispatch` chooses between them. `op` has functions of
whole lists.
"""

from .dispatch import Lists, make_lists
from .list_updates import lamb_step, update_scale_hysteresis
from .op import axpby, clip, clipped_before, l2norm, mask, max_norm, scale, zero
from .rule import Rule
