"""Gradient checkpointing: layers recompute their forward pass in the backward pass instead of storing activations."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ...transformer.pipeline_parallel._cut import CutSequential
from ...transformer.tensor_parallel.random import get_cuda_rng_tracker


@dataclass
class GradientCheckpointConfig:
    """A share of layers to checkpoint: the first int(ratio * layers) of the model, or of each stage."""

    gradient_checkpointing_ratio: float = 0.0


@dataclass
class PipelineGradientCheckpointConfig(GradientCheckpointConfig):
    """A number of layers to checkpoint for each stage of a pipeline; it overrides the ratio.

    All chunks of all ranks count as stages, in the order of the forward pass.
    """

    num_ckpt_layers_per_stage: list[int] | None = None


def check_config(config: Any, stages: int) -> None:
    """Raise unless `config` is None or a valid configuration for this number of stages."""
    if config is None:
        return
    if not hasattr(config, "gradient_checkpointing_ratio"):
        raise TypeError(
            f"gradient_checkpoint_config={config!r} must be a GradientCheckpointConfig of apex.booster.plugin or None"
        )
    counts = getattr(config, "num_ckpt_layers_per_stage", None)
    if counts is not None:
        if len(counts) != stages or any(count < 0 for count in counts):
            raise ValueError(
                f"gradient_checkpoint_config: num_ckpt_layers_per_stage={counts} must have a number for each of "
                f"{stages} stages, none of them negative"
            )
    elif not 0 <= (config.gradient_checkpointing_ratio or 0.0) <= 1:
        raise ValueError(
            "gradient_checkpoint_config: gradient_checkpointing_ratio="
            f"{config.gradient_checkpointing_ratio} must be from 0 to 1"
        )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model's longest ModuleList, or the children of a Sequential without a ModuleList."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists and isinstance(model, (CutSequential, nn.Sequential)):
        return list(model.children())
    return list(max(lists, key=len, default=()))  # type: ignore[arg-type]


def chosen_layers(model: nn.Module, config: Any, stage: int) -> list[nn.Module]:
    """Return the layers of a model, or of pipeline stage number `stage`, that `config` asks to checkpoint."""
    if config is None:
        return []
    layers = layers_of(model)
    counts, ratio = getattr(config, "num_ckpt_layers_per_stage", None), config.gradient_checkpointing_ratio or 0.0
    count = int(ratio * len(layers)) if counts is None else counts[stage]
    if count > len(layers):
        raise ValueError(
            f"gradient_checkpoint_config: num_ckpt_layers_per_stage={counts}, but stage {stage} has {len(layers)} "
            "layers in its longest ModuleList"
        )
    if counts is None and ratio and not count:
        warnings.warn(
            f"gradient_checkpointing_ratio={ratio} checkpoints nothing: the longest ModuleList of the model has "
            f"{len(layers)} layers",
            stacklevel=2,
        )
    return layers[:count]


def checkpoint_layers(layers: list[nn.Module]) -> None:
    """Make layers recompute their forward pass in the backward pass."""
    for layer in layers:
        if any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(layer).__mro__):
            # A Hugging Face layer skips its key-value cache itself, which may not be filled twice.
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, checkpointed  # type: ignore[assignment]
        else:
            # A partial of a bound method: a deep copy of the layer calls the copy.
            layer.forward = functools.partial(checkpointed, layer.forward)


def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function under checkpointing; the backward pass recomputes it with the same random numbers."""
    return checkpoint(function, *args, use_reentrant=False, context_fn=_contexts, **kwargs)


def _contexts() -> tuple[Any, Any]:
    """Return the contexts of the forward pass and of its recomputation, for torch.utils.checkpoint."""
    return contextlib.nullcontext(), _SavedRandomStates()


class _SavedRandomStates:
    """A context that restores the tensor-parallel random states of the time when it was made.

    torch.utils.checkpoint restores only PyTorch's own generators.
    """

    def __init__(self) -> None:
        self._tracker = get_cuda_rng_tracker()
        self._saved = self._tracker.get_states()

    def __enter__(self) -> None:
        self._current, self._tracker.states_ = self._tracker.states_, dict(self._saved)

    def __exit__(self, *error: Any) -> None:
        self._tracker.states_ = self._current
