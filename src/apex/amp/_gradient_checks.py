"""Checks before a step that the gradients which the user sees are those that the step reads."""

from __future__ import annotations

import warnings

from .._distributed import unreduced
from ._master_params import AmpOptimizerState
from .scaler import names_of_parameters


def check_reduced(stashes: list[AmpOptimizerState]) -> None:
    """Raise an error for gradients that would be unscaled, and put aside, before processes have averaged them."""
    if unreduced.WRAPPERS and any(unreduced.holds_any(stash.model_params) for stash in stashes):
        raise RuntimeError(
            "amp.scale_loss would unscale gradients of a backward pass inside of DistributedDataParallel.no_sync(), "
            "and the next pass would not average them: give delay_unscale=True to passes inside of no_sync()"
        )


def check_gradients(stash: AmpOptimizerState) -> None:
    """Raise an error if gradients are scaled, if masters lack gradients of the model, or if combined ones moved."""
    if stash.params_have_scaled_gradients:
        raise RuntimeError(
            "optimizer.step() finds gradients that are still scaled, because of delay_unscale=True: let the last "
            "amp.scale_loss before a step be without it"
        )
    if stash.combined is not None and stash.combined.check:
        moved = stash.combined.outside()
        if moved:
            names = names_of_parameters()
            called = [names.get(id(param), f"a parameter of shape {tuple(param.shape)}") for param in moved]
            raise RuntimeError(
                f"the gradients of {len(moved)} parameter(s) are not in the combined buffer any more: "
                f"{', '.join(called[:5])}. Change gradients in place (param.grad.mul_(...)) instead of replacing them, "
                "or call amp.initialize without check_combined_tensors to have them copied back"
            )
    masters = stash.all_fp32_from_fp16_params
    if stash.optimizer_unscales or any(master.grad is not None for master in masters):
        return
    if any(param.grad is not None for param in stash.all_fp16_params):
        raise RuntimeError(
            "optimizer.step() finds gradients on the model's half-precision parameters but none on their float32 "
            "masters: call backward inside `with amp.scale_loss(loss, optimizer) as scaled_loss` before every step"
        )


def warn_of_changes(stash: AmpOptimizerState) -> None:
    """Warn once if gradients of the model changed since they were copied to the masters, which a step does not see.

    One gradient suffices, because clipping changes all of them.
    """
    if stash.copied_grad is None or stash.warned_of_changes:
        return
    gradient, version = stash.copied_grad
    if gradient._version != version:
        stash.warned_of_changes = True
        warnings.warn(
            "gradients of model.parameters() have changed since amp.scale_loss ended, and the step does not see it: it "
            "reads the float32 gradients of the master weights. To clip these, call "
            "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)",
            stacklevel=3,  # the call of the optimizer's step
        )
