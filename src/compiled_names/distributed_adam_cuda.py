"""Upstream's compiled module of this name: Adam on shards, with a copy of the parameters in another dtype.

`grad_scale` [1] multiplies the gradients. Mode 0 adds weight decay to the gradient, mode 1 decouples it.
"""

from __future__ import annotations

import torch

from apex.ops.multi_tensor import packed_floats, rules
from apex.ops.multi_tensor.list_updates import adam_hyper, expect, expect_flag, in_slots, update


def _step(named, noop, grad_scale, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay) -> None:
    hyper = adam_hyper(lr, beta1, beta2, eps, step, bias_correction, weight_decay, decoupled=bool(mode))
    update(rules.ADAM, named, hyper, (bool(mode), False), noop=noop, grad_scale=grad_scale)


def multi_tensor_fused_adam(
    chunk_size, noop_flag, tensor_lists, grad_scale, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
) -> None:
    """Perform Adam on [parameters, first moments, second moments, gradients, copies]; the flag is ignored."""
    expect(tensor_lists, 5)
    named = in_slots(tensor_lists, 0, 3, 1, 2, None, 4)
    _step(named, None, grad_scale, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)


def multi_tensor_fused_adam_capturable(
    chunk_size, noop_flag, tensor_lists, grad_scale, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
) -> None:
    """Perform `multi_tensor_fused_adam` with numbers on the device; do nothing if the flag is set."""
    expect(tensor_lists, 5)
    named = in_slots(tensor_lists, 0, 3, 1, 2, None, 4)
    noop = expect_flag(noop_flag)
    _step(named, noop, grad_scale, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)


@torch.no_grad()
def multi_tensor_fused_adam_with_param_remainders(
    chunk_size, noop_flag, tensor_lists, grad_scale, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
) -> None:
    """Perform Adam on [parameters, remainders, first moments, second moments, gradients, new parameters].

    The flag is ignored. Parameters are bfloat16 and remainders the int16 that complete them to float32:
    `apex.ops.multi_tensor.packed_floats`.
    """
    expect(tensor_lists, 6)
    params, lower, first, second, gradients, outputs = tensor_lists
    packed_floats.check_remainders(params, lower, outputs, ("tensor_lists[0]", "tensor_lists[1]", "tensor_lists[5]"))
    masters = list(map(packed_floats.join_remainders, params, lower))
    named = (masters, gradients, first, second), [f"tensor_lists[{index}]" for index in (0, 4, 2, 3)]
    _step(named, None, grad_scale, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)
    for master, output, remainder in zip(masters, outputs, lower, strict=True):
        packed_floats.split_remainders(master, output, remainder)
