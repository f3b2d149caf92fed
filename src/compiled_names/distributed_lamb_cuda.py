"""Upstream's compiled module of this name: LAMB in two halves, with hyperparameters per tensor.

Both functions do nothing if the flag is set.
"""

from __future__ import annotations

import torch

from apex.ops.multi_tensor import rules
from apex.ops.multi_tensor.list_updates import expect, expect_flag, in_slots, number, per_tensor, read_once, update
from apex.ops.multi_tensor.packed_floats import to_bytes


def multi_tensor_lamb_compute_update_term(
    chunk_size, noop_flag, tensor_lists, per_tensor_beta1, per_tensor_beta2, per_tensor_beta3,
    per_tensor_bias_correction, step, per_tensor_epsilon, mode, per_tensor_decay, global_scale, global_grad_norm,
    max_grad_norm,
) -> None:  # fmt: skip
    """Compute LAMB's updates for [gradients, parameters, first moments, second moments, updates]; writes `updates`.

    Gradients are divided by `global_scale`, and scaled down if their norm over it exceeds a positive `max_grad_norm`.
    Mode 0 adds weight decay to the gradient, mode 1 decouples it. The host reads betas, corrections and epsilons, once.
    """
    expect(tensor_lists, 5)
    noop = expect_flag(noop_flag)
    columns = {
        "per_tensor_beta1": per_tensor_beta1,
        "per_tensor_beta2": per_tensor_beta2,
        "per_tensor_beta3": per_tensor_beta3,
        "per_tensor_epsilon": per_tensor_epsilon,
        "per_tensor_bias_correction": per_tensor_bias_correction,
    }
    for name, values in columns.items():
        per_tensor(tensor_lists[0], **{name: values})
    decay = per_tensor(tensor_lists[0], per_tensor_decay=per_tensor_decay)
    factor = 1 / global_scale.detach().double().reshape(())
    if max_grad_norm > 0:
        factor = factor * torch.clamp(max_grad_norm / (global_grad_norm.detach().reshape(()) * factor + 1e-6), max=1.0)
    alike: dict[tuple[float, ...], list[int]] = {}
    for index, row in enumerate(zip(*map(read_once, columns.values()), strict=True)):
        alike.setdefault(row, []).append(index)
    for (beta1, beta2, beta3, eps, corrects), indices in alike.items():
        chosen = [[tensors[index] for index in indices] for tensors in tensor_lists]
        hyper = {
            "beta1": beta1,
            "beta2": beta2,
            "beta3": beta3,
            "eps": eps,
            "step": number(step),
            "bias_correction": bool(corrects),
        }
        update(
            rules.LAMB_UPDATE,
            in_slots(chosen, 1, 0, 2, 3, 4),
            hyper,
            (bool(mode),),
            noop=noop,
            grad_scale=factor,
            whole=decay if len(alike) == 1 else decay[torch.tensor(indices, dtype=torch.int64, device=decay.device)],
        )


@torch.no_grad()
def multi_tensor_lamb_update_weights(
    chunk_size, noop_flag, tensor_lists, per_tensor_param_norm, per_tensor_update_norm, update_norm_offset,
    learning_rate, per_tensor_decay, global_grad_norm, use_nvlamb,
) -> None:  # fmt: skip
    """Apply updates to [updates, parameters, copies of the parameters]; copies may be bytes, as 8-bit floats.

    The norm of update i is `per_tensor_update_norm[update_norm_offset[i]]`. Without NVLAMB, tensors without decay take
    the update unscaled. `global_grad_norm` is ignored.
    """
    expect(tensor_lists, 3)
    noop = expect_flag(noop_flag)
    updates, params, copies = tensor_lists
    norms = per_tensor(
        updates,
        per_tensor_param_norm=per_tensor_param_norm,
        per_tensor_update_norm=per_tensor_update_norm.reshape(-1)[update_norm_offset.reshape(-1)],
    )
    if not use_nvlamb:
        norms = norms * (per_tensor(updates, per_tensor_decay=per_tensor_decay) != 0)
    in_bytes = bool(copies) and copies[0].dtype == torch.uint8
    named = in_slots(tensor_lists, 1, 0, None, None, None, None if in_bytes else 2)
    update(rules.LAMB_WEIGHTS, named, {"lr": number(learning_rate)}, noop=noop, whole=norms)
    if in_bytes:
        for param, copy in zip(params, copies, strict=True):
            rounded = to_bytes(param.detach()).view(copy.shape)
            copy.copy_(torch.where(noop.reshape(()) != 0, copy, rounded))
