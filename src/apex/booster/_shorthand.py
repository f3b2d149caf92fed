"""`apex.boost`: one call for the fastest training step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._distributed.shards import is_sharded
from ..amp._amp_state import HALF
from ..ops._host import HOST
from ._precision import CastModel
from ._stages import Stages
from .booster import Booster, _check_trainable
from .mixed_precision import BF16MixedPrecision, FP8MixedPrecision, MixedPrecision
from .wrappers import is_replicated


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

    The call moves the model to the accelerator, fuses it (`apex.fuse`) and its optimizer, and sets the precision. With
    "bf16" the model computes as under `torch.autocast`, and its weights and outputs are float32. "fp8" multiplies
    float8 matrices in large linear layers, too. The other names and None mean the same as in `apex.Booster`. The first
    calls of a step are measured, and later ones run in the quickest way: as they are, captured in a CUDA graph, or
    compiled and captured. `step.report()` lists each stage with its effect, or the reason why it was not applied.
    Set `optimizer.measures_norm = True` if `optimizer.get_grad_norm()` is wanted in steps that do not clip gradients.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got a {type(model).__name__}: boost(model, optimizer)")
    if optimizer is None:
        raise TypeError("optimizer must be the model's optimizer, got None; Booster(...).boost(model) takes none")
    _check_trainable(model, optimizer)
    if mixed_precision in ("bf16", "fp8"):
        mixed_precision = _precision(mixed_precision, model, optimizer, device)
    booster = Booster(device, mixed_precision, fuse="auto", compile="auto", capture="auto")
    model, boosted, *_ = booster.boost(model, optimizer)
    boosted.measures_norm = False
    if isinstance(model, CastModel):
        model.cast_outputs(torch.float32)  # autocast ends before the loss, which needs float32
    return model, boosted, booster.step


def _precision(name: str, model: nn.Module, optimizer: Any, device: Any) -> MixedPrecision:
    """Return what "bf16" or "fp8" means for a model and its optimizer."""
    options: dict[str, Any] = {}
    if getattr(optimizer, "stochastic_rounding", False) or getattr(optimizer, "master_bits", None) is not None:
        options["opt_level"] = "O5"  # options for the updates of bfloat16 weights
    else:
        _widen_trained_weights(model)
        # Copies make steps quicker on accelerators. Between processes, float32 gradients are exchanged.
        copies = _runs_on_accelerator(device) and not is_replicated(model) and not dist.is_initialized()
        options["weight_copies"] = copies
    if name == "bf16":
        return BF16MixedPrecision(**options)
    head = _head(model)
    return FP8MixedPrecision(choose=lambda name, layer: layer is not head, **options)


@torch.no_grad()
def _widen_trained_weights(model: nn.Module) -> None:
    """Make half-precision weights that are trained float32, as checkpoints loaded in bfloat16 have them.

    Updates of less than 1/512 of a bfloat16 weight would be lost. Frozen weights stay as they are.
    """
    for param in model.parameters():
        if param.requires_grad and param.dtype in HALF and not is_sharded(param):
            gradient, param.grad = param.grad, None
            param.data = param.data.float()
            param.grad = None if gradient is None else gradient.float()


def _runs_on_accelerator(device: Any) -> bool:
    """Return whether boost puts models on an accelerator."""
    return torch.accelerator.is_available() and (device is None or torch.device(device).type != HOST.type)


def _head(model: nn.Module) -> nn.Module | None:
    """Return the output layer, whose rounding would go straight into the loss: the last linear layer."""
    find = getattr(model, "get_output_embeddings", None)
    named = find() if callable(find) else None
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return named or (layers[-1] if layers else None)
