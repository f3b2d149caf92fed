"""FusedSGD as in upstream's first versions: `step` takes gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from ...ops.multi_tensor import rules
from ...ops.multi_tensor.list_updates import number, update
from ...optimizers._checks import check_nesterov, check_options
from ...optimizers.fused_sgd import momentum_dtype
from ._explicit_grads import ExplicitGradsOptimizer, Member

_NAMES = ("params", "grads", "momentum_buffer", "", "", "output_params")


class FusedSGD(ExplicitGradsOptimizer):
    """SGD with momentum, dampening, Nesterov's momentum and weight decay, as in `torch.optim.SGD`.

    With `wd_after_momentum` the decay is added to the update instead of the gradient. `materialize_master_grads` has no
    effect.
    """

    _counts_steps = False
    _may_lack = frozenset({"momentum_buffer"})
    # The reason in the error of amp.initialize, which refuses this class.
    _refuses_amp = "apex.optimizers.FusedSGD is"

    def __init__(
        self,
        params: Any,
        lr: float = required,  # type: ignore[assignment]
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
    ) -> None:
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        check_options(defaults)
        check_nesterov(defaults)
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        super().__init__(params, defaults)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def get_momentums(self, params: Iterable[Tensor]) -> tuple[list[Tensor], bool]:
        """Return the momentum buffers, created if missing, and whether the last one was missing."""
        buffers, fresh = [], True
        for param in params:
            state = self.state[param]
            fresh = state.get("momentum_buffer") is None
            if fresh:
                state["momentum_buffer"] = torch.zeros_like(param, dtype=momentum_dtype(param))
            buffers.append(state["momentum_buffer"])
        return buffers, fresh

    def _from_amp(self, *arguments: Any) -> tuple[Any, ...]:
        if hasattr(self, "_amp_stash"):
            raise RuntimeError("apex.contrib.optimizers.FusedSGD is not for amp; apex.optimizers.FusedSGD is")
        return *arguments[:3], None  # norms are not used

    def _update(self, group: dict[str, Any], members: list[Member], scale: float | Tensor, norm: Any) -> None:
        factor = 1 / number(scale)
        alike: dict[Any, list[Member]] = {}
        for member in members:
            first = self.state[member.param].get("momentum_buffer") is None
            alike.setdefault((first, member.output is None), []).append(member)
        for (first, alone), chosen in alike.items():
            params, gradients, outputs = (list(column) for column in zip(*chosen, strict=True))
            copies = None if alone else outputs
            hyper = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
            if group["momentum"] == 0:
                slots = [params, gradients, None, None, None, copies]
                update(rules.PLAIN_SGD, (slots, _NAMES), hyper, grad_scale=factor)
                continue
            hyper |= {"momentum": group["momentum"], "dampening": group["dampening"], "first": first}
            buffers = self.get_momentums(params)[0]
            slots = [params, gradients, buffers, None, None, copies]
            flags = rules.sgd_flags(group["nesterov"], self.wd_after_momentum, buffers)
            update(rules.SGD, (slots, _NAMES), hyper, flags, grad_scale=factor)
