"""Upstream's compiled module of this name: passes and optimizer steps over lists of tensors.

Docstrings name the expected `tensor_lists` in brackets. `chunk_size` is accepted and not used. `noop_flag` is a tensor
of one number. Some functions do nothing if it is set; functions that check for infinite and NaN values set it to 1.
Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from apex.ops import multi_tensor
from apex.ops.multi_tensor import rules
from apex.ops.multi_tensor.dispatch import check
from apex.ops.multi_tensor.list_updates import (
    TensorLists,
    adam_hyper,
    average_norms,
    clip_factor,
    expect,
    expect_flag,
    in_slots,
    lamb,
    number,
    per_tensor,
    update,
)
from apex.ops.multi_tensor.list_updates import update_scale_hysteresis as update_scale_hysteresis


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float | Tensor) -> None:
    """Compute output = scale * input for [inputs, outputs]; an input that is not finite sets the flag."""
    expect(tensor_lists, 2)
    inputs, outputs = tensor_lists
    names = ("tensor_lists[1]", "tensor_lists[0]")
    multi_tensor.scale(inputs, outputs, scale, overflow=expect_flag(noop_flag), names=names)


def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, a: float, b: float, arg_to_check: int
) -> None:
    """Compute output = a * x + b * y for [x, y, outputs]; a non-finite x (0), y (1) or either (-1) sets the flag."""
    expect(tensor_lists, 3)
    if arg_to_check not in (-1, 0, 1):
        raise ValueError(f"arg_to_check={arg_to_check} is not -1 (both), 0 (the first list) or 1 (the second)")
    x, y, outputs = tensor_lists
    names = ("tensor_lists[2]", "tensor_lists[0]", "tensor_lists[1]")
    checks = ("x", "y", "xy")[arg_to_check]
    multi_tensor.axpby(x, y, outputs, a, b, overflow=expect_flag(noop_flag), checks=checks, names=names)


def _norm(
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    per_tensor: bool | None,
    *,
    outputs: Sequence[Tensor] | None = None,
    factor: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    if not tensor_lists[0]:
        nothing = torch.zeros(1, dtype=torch.float32, device=expect_flag(noop_flag).device)
        return nothing, nothing[:0]
    return multi_tensor.l2norm(
        tensor_lists[0],
        per_tensor=bool(per_tensor),
        outputs=outputs,
        factor=factor,
        of_inputs=outputs is not None,
        overflow=expect_flag(noop_flag),
        names=("tensor_lists[1]", "tensor_lists[0]"),
    )


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor_python: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return the norm of all tensors of [inputs], [1], and if requested the norm of each, [tensors] (else empty).

    Here and in the other norms, a norm that is not finite sets the flag.
    """
    expect(tensor_lists, 1)
    return _norm(noop_flag, tensor_lists, per_tensor_python)


multi_tensor_l2norm_mp = multi_tensor_l2norm  # it accepts mixed dtypes too


def multi_tensor_l2norm_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float, per_tensor_python: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Compute output = scale * input for [inputs, outputs], and return the norms of the unscaled inputs."""
    expect(tensor_lists, 2)
    return _norm(noop_flag, tensor_lists, per_tensor_python, outputs=tensor_lists[1], factor=scale)


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    inv_scale: Tensor,
    per_tensor_python: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norms of inv_scale * input for [inputs]; the inputs are not changed."""
    expect(tensor_lists, 1)
    return _norm(noop_flag, tensor_lists, per_tensor_python, factor=inv_scale)


def multi_tensor_sgd(
    chunk_size, noop_flag, tensor_lists, wd, momentum, dampening, lr, nesterov, first_run, wd_after_momentum, scale
) -> None:
    """Perform SGD on [gradients, parameters, momentum (, half-precision copies)], with gradients times `scale`.

    Does nothing if the flag is set. Without momentum, the momentum list is not touched.
    """
    expect(tensor_lists, 3, 4)
    copy = 3 if len(tensor_lists) == 4 else None
    hyper = {"lr": number(lr), "weight_decay": wd}
    if momentum == 0:
        named = in_slots(tensor_lists, 1, 0, None, None, None, copy)
        update(rules.PLAIN_SGD, named, hyper, noop=expect_flag(noop_flag), grad_scale=scale)
        return
    hyper |= {"momentum": momentum, "dampening": dampening, "first": bool(first_run)}
    named = in_slots(tensor_lists, 1, 0, 2, None, None, copy)
    flags = rules.sgd_flags(nesterov, wd_after_momentum, tensor_lists[2])
    update(rules.SGD, named, hyper, flags, noop=expect_flag(noop_flag), grad_scale=scale)


def multi_tensor_adam(
    chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay
) -> None:
    """Perform Adam on [gradients, parameters, first moments, second moments].

    Mode 0 adds weight decay to the gradient, mode 1 decouples it. The flag is ignored.
    """
    expect(tensor_lists, 4)
    hyper = adam_hyper(lr, beta1, beta2, epsilon, step, bias_correction, weight_decay, decoupled=bool(mode))
    update(rules.ADAM, in_slots(tensor_lists, 1, 0, 2, 3), hyper, (bool(mode), False))


def _adam_capturable(
    noop_flag, named, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay, inv_scale
) -> None:
    hyper = adam_hyper(lr, beta1, beta2, epsilon, step, bias_correction, weight_decay, decoupled=bool(mode))
    noop = expect_flag(noop_flag)
    update(rules.ADAM_UNSCALING, named, hyper, (bool(mode), False), noop=noop, grad_scale=inv_scale)


def multi_tensor_adam_capturable(
    chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay, inv_scale
) -> None:
    """Perform `multi_tensor_adam` with numbers on the device; the gradients stay multiplied by `inv_scale`.

    Does nothing if the flag is set.
    """
    expect(tensor_lists, 4)
    named = in_slots(tensor_lists, 1, 0, 2, 3)
    _adam_capturable(noop_flag, named, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay, inv_scale)


def multi_tensor_adam_capturable_master(
    chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay, inv_scale
) -> None:
    """Perform `multi_tensor_adam_capturable` on a fifth list, [master weights], and copy them to the parameters."""
    expect(tensor_lists, 5)
    named = in_slots(tensor_lists, 4, 0, 2, 3, None, 1)
    _adam_capturable(noop_flag, named, lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay, inv_scale)


def multi_tensor_adagrad(chunk_size, noop_flag, tensor_lists, lr, epsilon, mode, weight_decay) -> None:
    """Perform Adagrad on [gradients, parameters, sums of squares]; mode 0 adds decay to gradients, 1 decouples it."""
    expect(tensor_lists, 3)
    hyper = {"lr": number(lr), "eps": epsilon, "weight_decay": weight_decay, "decoupled": bool(mode)}
    update(rules.ADAGRAD, in_slots(tensor_lists, 1, 0, 2), hyper, (bool(mode),))


def multi_tensor_novograd(
    chunk_size, noop_flag, tensor_lists, grad_norms, lr, beta1, beta2, epsilon, step, bias_correction, weight_decay,
    grad_averaging, mode, norm_type,
) -> None:  # fmt: skip
    """Perform NovoGrad on [gradients, parameters, moments]; mode 0 has norm and decay inside the moment, 1 outside.

    `grad_norms` [tensors] is the moving average of gradient norms (norm_type 2: of their squares) and is updated. A
    norm that is not finite sets the flag.
    """
    expect(tensor_lists, 3)
    flag = expect_flag(noop_flag)
    if norm_type not in (0, 2):
        raise ValueError(f"norm_type={norm_type} is neither 2 (L2) nor 0 (largest absolute value)")
    more = {"grad_averaging": bool(grad_averaging), "inside": mode == 0}
    hyper = adam_hyper(lr, beta1, beta2, epsilon, step, bias_correction, weight_decay, **more)
    named = in_slots(tensor_lists, 1, 0, 2)
    check(*named)  # raises before norms change
    average_norms(tensor_lists[0], grad_norms, beta2, maximum=norm_type == 0, overflow=flag, name="grad_norms")
    whole = per_tensor(tensor_lists[0], grad_norms=grad_norms)
    update(rules.NOVOGRAD, named, hyper, (mode == 0, False), whole=whole)


def multi_tensor_lamb(
    chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, bias_correction, weight_decay, grad_averaging,
    mode, global_grad_norm, max_grad_norm, use_nvlamb_python=None,
) -> None:  # fmt: skip
    """Perform LAMB on [gradients, parameters, first moments, second moments].

    Mode 0 adds weight decay to the gradient, mode 1 decouples it. Gradients are divided by global_grad_norm /
    max_grad_norm if that is above 1. Without decay, only NVLAMB scales the step by the parameter's norm. The flag is
    ignored. If moments are in half precision, gradients are overwritten.
    """
    expect(tensor_lists, 4)
    averages = bool(grad_averaging)
    hyper = adam_hyper(lr, beta1, beta2, epsilon, step, bias_correction, weight_decay, grad_averaging=averages)
    lamb(
        in_slots(tensor_lists, 1, 0, 2, 3),
        hyper,
        decoupled=bool(mode),
        adapts=bool(use_nvlamb_python) or weight_decay != 0,
        grad_scale=clip_factor(global_grad_norm, max_grad_norm),
    )


def multi_tensor_lamb_mp(
    chunk_size, noop_flag, tensor_lists, lr, beta1, beta2, epsilon, step, bias_correction, weight_decay, grad_averaging,
    mode, global_grad_norm, max_grad_norm, use_nvlamb_python, found_inf, inv_scale,
) -> None:  # fmt: skip
    """Perform `multi_tensor_lamb` with numbers on the device and an optional fifth list, [half-precision copies].

    Gradients are multiplied by `inv_scale` too. Does nothing if the flag or `found_inf` is set.
    """
    expect(tensor_lists, 4, 5)
    averages = bool(grad_averaging)
    hyper = adam_hyper(lr, beta1, beta2, epsilon, step, bias_correction, weight_decay, grad_averaging=averages)
    noop = expect_flag(noop_flag).to(torch.float32).reshape(1) + expect_flag(found_inf, "found_inf").reshape(1)
    lamb(
        in_slots(tensor_lists, 1, 0, 2, 3, None, 4 if len(tensor_lists) == 5 else None),
        hyper,
        decoupled=bool(mode),
        adapts=bool(use_nvlamb_python) or weight_decay != 0,
        noop=noop,
        grad_scale=clip_factor(global_grad_norm, max_grad_norm) * inv_scale.reshape(()),
    )


def multi_tensor_lamb_stage1_cuda(
    chunk_size, noop_flag, tensor_lists, per_tensor_decay, step, beta1, beta2, epsilon, global_grad_norm,
    max_global_grad_norm,
) -> None:  # fmt: skip
    """Compute LAMB's updates for [gradients, parameters, first moments, second moments, updates].

    `updates` is written; `step` counts from 0.
    """
    expect(tensor_lists, 5)
    hyper = {"beta1": beta1, "beta2": beta2, "beta3": 1 - beta1, "eps": epsilon, "step": number(step) + 1}
    update(
        rules.LAMB_UPDATE,
        in_slots(tensor_lists, 1, 0, 2, 3, 4),
        hyper,
        (True,),
        grad_scale=clip_factor(global_grad_norm, max_global_grad_norm),
        whole=per_tensor(tensor_lists[0], per_tensor_decay=per_tensor_decay),
    )


def multi_tensor_lamb_stage2_cuda(
    chunk_size, noop_flag, tensor_lists, per_tensor_param_norm, per_tensor_update_norm, lr, weight_decay,
    use_nvlamb_python=None,
) -> None:  # fmt: skip
    """Apply LAMB's updates to [parameters, updates] with the given norms of both: the second half of the step."""
    expect(tensor_lists, 2)
    norms = per_tensor(
        tensor_lists[0], per_tensor_param_norm=per_tensor_param_norm, per_tensor_update_norm=per_tensor_update_norm
    )
    whole = norms if use_nvlamb_python or weight_decay != 0 else torch.zeros_like(norms)
    update(rules.LAMB_WEIGHTS, in_slots(tensor_lists, 0, 1), {"lr": number(lr)}, whole=whole)


def multi_tensor_lars(
    chunk_size, noop_flag, tensor_lists, grad_norms, param_norms, lr, trust_coefficient, epsilon, weight_decay,
    momentum, dampening, nesterov, first_run, wd_after_momentum, scale, is_skipped,
) -> None:  # fmt: skip
    """Perform LARS on [gradients, parameters, momentum (, half-precision copies)], with gradients times `scale`.

    The learning rate depends on the norms unless `is_skipped`. Does nothing if the flag is set.
    """
    expect(tensor_lists, 3, 4)
    hyper = {
        "lr": number(lr),
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "trust_coefficient": trust_coefficient,
        "eps": epsilon,
        "first": bool(first_run),
    }
    whole = None
    if not is_skipped:
        whole = per_tensor(tensor_lists[0], param_norms=param_norms, grad_norms=grad_norms).square()
    update(
        rules.LARS,
        in_slots(tensor_lists, 1, 0, 2, None, None, 3 if len(tensor_lists) == 4 else None),
        hyper,
        (bool(nesterov), bool(wd_after_momentum), not is_skipped),
        noop=expect_flag(noop_flag),
        grad_scale=scale,
        whole=whole,
    )
