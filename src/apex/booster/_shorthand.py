"""`apex.boost`: one call for the fastest training step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ._precision import CastModel
from ._stages import Stages
from .booster import Booster
from .mixed_precision import BF16MixedPrecision, FP8MixedPrecision, MixedPrecision


def boost(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mixed_precision: MixedPrecision | str | None = "bf16",
    *,
    device: str | torch.device | None = None,
) -> tuple[Any, Any, Stages]:
    """Return a model, its optimizer and a decorator of training steps, prepared for the shortest steps.

        model, optimizer, step = apex.boost(model, optimizer, mixed_precision="bf16")

        @step
        def train_step(inputs, targets):
            loss = loss_function(model(inputs), targets)
            optimizer.zero_grad()
            optimizer.backward(loss)
            optimizer.step()
            return loss

    The call moves the model to the accelerator, fuses it (`apex.fuse`) and its optimizer, and sets the precision:
    "bf16" and "fp8" have bfloat16 weights with float32 masters in the optimizer; the other names and None mean the same
    as in `apex.Booster`. The first calls of a step are measured, and later ones run in the quickest way: as they are,
    captured in a CUDA graph, or compiled and captured. `step.report()` lists each stage with its effect, or the reason
    why it was not applied.
    Set `optimizer.measures_norm = True` if `optimizer.get_grad_norm()` is wanted in steps that do not clip gradients.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got a {type(model).__name__}: boost(model, optimizer)")
    if optimizer is None:
        raise TypeError("optimizer must be the model's optimizer, got None; Booster(...).boost(model) takes none")
    if mixed_precision == "bf16":
        mixed_precision = BF16MixedPrecision("O5")
    elif mixed_precision == "fp8":
        head = _head(model)
        mixed_precision = FP8MixedPrecision(opt_level="O5", choose=lambda name, layer: layer is not head)
    booster = Booster(device, mixed_precision, fuse="auto", compile="auto", capture="auto")
    model, boosted, *_ = booster.boost(model, optimizer)
    boosted.measures_norm = False
    if isinstance(model, CastModel):
        model.cast_outputs(torch.float32)  # autocast ends before the loss, which needs float32
    return model, boosted, booster.step


def _head(model: nn.Module) -> nn.Module | None:
    """Return the output layer, whose rounding would go straight into the loss: the last linear layer."""
    find = getattr(model, "get_output_embeddings", None)
    named = find() if callable(find) else None
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return named or (layers[-1] if layers else None)
