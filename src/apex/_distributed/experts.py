"""Experts: parameters that differ between processes whose other parameters are equal.

A parameter is an expert if its attribute `allreduce` is False, as in Megatron. Code that treats processes as replicas
of each other skips experts or refuses them. `apex.transformer.finalize_model_grads` reduces their gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


def is_expert(parameter: Tensor) -> bool:
    """Return True if a parameter is marked as an expert by `allreduce = False`."""
    return not getattr(parameter, "allreduce", True)


def refuse_experts(parameters: Iterable[Tensor], who: str, instead: str) -> None:
    """Raise a ValueError if there are several processes and a parameter is an expert.

    `instead` names an alternative.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    for index, parameter in enumerate(parameters):
        if is_expert(parameter):
            raise ValueError(
                f"parameter {index} of shape {tuple(parameter.shape)} is an expert (allreduce=False), of which other "
                f"processes hold different ones; {who} would mix them. {instead}"
            )


def hide_experts_from_ddp(model: nn.Module) -> None:
    """Make torch's DistributedDataParallel ignore the experts of this model when it wraps the model."""
    # PyTorch compares names of `named_parameters()` in some places, and in others a module's path plus a parameter's
    # name. They differ for the model's own parameters, and if a wrapper renames parameters.
    names = [name for name, parameter in model.named_parameters() if is_expert(parameter)]
    for path, module in model.named_modules():
        own = module.named_parameters(recurse=False)
        names += [f"{path}.{name}" for name, parameter in own if is_expert(parameter)]
    if names:
        ignored = dict.fromkeys((*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *names))
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(ignored))


class RouterLossScale:
    """The factor of the losses of routers in a backward pass, which is the factor of the main loss.

    `explicit` is the factor that a schedule or a user has set. Without it the factor is `loss_scale()` times the number
    of context-parallel ranks. The compiler reads attributes of an instance.
    """

    explicit: Tensor | None = None
    loss_scale: Callable[[], Tensor] | None = None

    def value(self, context_ranks: int) -> Any:
        """Return the factor, a tensor or a number.

        Gradients are divided by `context_ranks`, and the loss of a router is a sum over their parts of a sequence.
        """
        if self.explicit is not None:
            return self.explicit
        return context_ranks if self.loss_scale is None else self.loss_scale() * context_ranks


router_loss_scale = RouterLossScale()


@contextlib.contextmanager
def scaled_router_losses(loss_scale: Callable[[], Tensor] | None) -> Iterator[None]:
    """Multiply router losses by `loss_scale()`, the main loss's scale, in backward passes inside a `with` block.

    If `loss_scale` is None, the factor of the enclosing block stays in use.
    """
    before = router_loss_scale.loss_scale
    router_loss_scale.loss_scale = loss_scale or before
    try:
        yield
    finally:
        router_loss_scale.loss_scale = before
