"""Upstream's compiled module of this name: LAMB with the gradients' norm given as a number."""

from __future__ import annotations

from torch import Tensor

from apex.ops.multi_tensor.op import TensorLists, clip_factor, expect, in_slots, number
from apex.ops.multi_tensor.op import lamb as _lamb


def lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: float,
    max_grad_norm: float,
) -> None:
    """[gradients, parameters, first moments, second moments]; mode 0 has decay in the gradient, 1 decoupled.

    As `amp_C.multi_tensor_lamb` without NVLAMB.
    """
    expect(tensor_lists, 4)
    hyper = {
        "lr": number(lr),
        "beta1": beta1,
        "beta2": beta2,
        "eps": epsilon,
        "weight_decay": weight_decay,
        "step": number(step),
        "bias_correction": bool(bias_correction),
        "grad_averaging": bool(grad_averaging),
    }
    _lamb(
        in_slots(tensor_lists, 1, 0, 2, 3),
        hyper,
        decoupled=bool(mode),
        adapts=weight_decay != 0,
        grad_scale=clip_factor(global_grad_norm, max_grad_norm),
    )
