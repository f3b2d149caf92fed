"""FusedRAdam and FusedNAdam: `torch.optim`'s RAdam and NAdam in one pass over all parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops import _graph_numbers
from ..ops._host import HOST
from ..ops.multi_tensor import rules
from ._base import FusedOptimizer, LossScaling, Options, adam_hyperparameters
from ._buckets import Group, UpdateBucket
from ._parameter_steps import ParameterSteps


class FusedRAdam(ParameterSteps):
    """RAdam with the arguments and numbers of `torch.optim.RAdam`; their state dicts are interchangeable.

    Without `decoupled_weight_decay`, decay is added to the gradient. `FusedOptimizer` describes the keyword options.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults: dict[str, Any] = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults | {"decoupled_weight_decay": decoupled_weight_decay}, **options)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return ("exp_avg", "exp_avg_sq")

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        decoupled = bool(group["decoupled_weight_decay"])
        hyper = adam_hyperparameters(group, step, decoupled=decoupled)
        del hyper["bias_correction"]
        bucket.lists.apply(rules.RADAM, hyper, (decoupled,), seed=seed, **scaling.arguments)


class Momentum(NamedTuple):
    """NAdam's step count, the momentum factors of this step and the next, and the product of all up to this step."""

    step: Any
    factor: Any
    next_factor: Any
    product: Any


class FusedNAdam(FusedOptimizer):
    """NAdam with the arguments and numbers of `torch.optim.NAdam`; their state dicts are interchangeable.

    `group["mu_product"]` is the product of the momentum factors of all steps. Without `decoupled_weight_decay`, decay
    is added to the gradient. `FusedOptimizer` describes the keyword options.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults: dict[str, Any] = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        defaults |= dict(momentum_decay=momentum_decay, decoupled_weight_decay=decoupled_weight_decay)
        super().__init__(params, defaults, **options)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return ("exp_avg", "exp_avg_sq")

    def _next_step(self, index: int, group: dict[str, Any], device: torch.device, scaling: LossScaling) -> Any:
        """Count a step; return the count, and the momentum factors, whose product a skipped step does not change."""
        step = super()._next_step(index, group, device, scaling)
        capture = _graph_numbers.current
        numbers = group if capture is None else capture.group(self, index)
        beta1, decay = numbers["betas"][0], numbers["momentum_decay"]
        factor, next_factor = (beta1 * (1 - 0.5 * 0.96 ** (count * decay)) for count in (step, step + 1))
        product = group.get("mu_product", 1.0)
        if isinstance(step, Tensor) or capture is not None or isinstance(product, Tensor):
            if not isinstance(product, Tensor):
                product = torch.full((), product, dtype=torch.float64, device=device)
            group["mu_product"] = product
            now = product * (factor.on(device) if isinstance(factor, _graph_numbers.Number) else factor)
            kept = None if scaling.found_inf is None else scaling.found_inf.to(device).reshape(()) != 0
            product.copy_(now if kept is None else torch.where(kept, product, now))
            product = now
        else:
            product = group["mu_product"] = product * factor
        return Momentum(step, factor, next_factor, product)

    def _update(
        self, group: Group, bucket: UpdateBucket, step: Momentum, scaling: LossScaling, seed: int | None
    ) -> None:
        decoupled = bool(group["decoupled_weight_decay"])
        hyper = adam_hyperparameters(group, step.step, decoupled=decoupled)
        del hyper["bias_correction"]
        hyper |= {"momentum": step.factor, "next_momentum": step.next_factor, "product": step.product}
        bucket.lists.apply(rules.NADAM, hyper, (decoupled,), seed=seed, **scaling.arguments)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the product of momentum factors for each parameter, as `torch.optim.NAdam` has it."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            product = torch.full((), float(group.get("mu_product", 1.0)), dtype=torch.float32, device=HOST)
            for key in group["params"]:
                if key in saved["state"]:
                    saved["state"][key] = {**saved["state"][key], "mu_product": product.clone()}
        return saved

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of `torch.optim.NAdam`."""
        super()._load(state_dict)
        for group in self.param_groups:
            products = [self.state[param].pop("mu_product", None) for param in group["params"] if param in self.state]
            known = [float(product) for product in products if product is not None]
            if "mu_product" not in group and known:
                group["mu_product"] = min(known)
