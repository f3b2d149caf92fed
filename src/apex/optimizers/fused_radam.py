"""FusedRAdam and FusedNAdam: `torch.optim`'s RAdam and NAdam in one pass over all parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops import _graph_numbers
from ..ops._host import HOST
from ..ops.multi_tensor import rules
from ._base import LossScaling, Options, adam_hyperparameters
from ._buckets import Group, UpdateBucket
from ._checks import check_cautious
from ._parameter_steps import ParameterSteps


def _check_cautious(options: dict[str, Any]) -> None:
    """Raise an error if a group has cautious decay that is not decoupled."""
    if options.get("cautious_weight_decay"):
        check_cautious(False, options["decoupled_weight_decay"], "decoupled_weight_decay")


class FusedRAdam(ParameterSteps):
    """RAdam with the arguments and numbers of `torch.optim.RAdam`; their state dicts are interchangeable.

    Without `decoupled_weight_decay`, decay is added to the gradient. With it, `cautious_weight_decay` decays only
    elements whose decay has the sign of their update. `FusedOptimizer` describes the keyword options.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        *,
        cautious_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults: dict[str, Any] = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        defaults |= dict(decoupled_weight_decay=decoupled_weight_decay, cautious_weight_decay=cautious_weight_decay)
        super().__init__(params, defaults, **options)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        _check_cautious(options)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return ("exp_avg", "exp_avg_sq")

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        decoupled = bool(group["decoupled_weight_decay"])
        hyper = adam_hyperparameters(group, step, decoupled=decoupled)
        del hyper["bias_correction"]
        flags = decoupled, bool(group.get("cautious_weight_decay"))
        bucket.lists.apply(rules.RADAM, hyper, flags, seed=seed, **scaling.arguments)


class Momentum(NamedTuple):
    """NAdam's step count, the momentum factors of this step and the next, and the product of all up to this step.

    `again(count, product)` returns the numbers of parameters with another count, as `_momentum` does.
    """

    step: Any
    factor: Any
    next_factor: Any
    product: Any
    again: Callable[[Any, Any], tuple[Any, Momentum]]


def _momentum(
    beta1: Any, decay: Any, skips: Tensor | None, device: torch.device, step: Any, product: Any
) -> tuple[Any, Momentum]:
    """Return the product of momentum factors to keep, which a skipped step does not change, and this step's numbers."""
    factor, next_factor = (beta1 * (1 - 0.5 * 0.96 ** (count * decay)) for count in (step, step + 1))
    if isinstance(step, Tensor) or _graph_numbers.current is not None or isinstance(product, Tensor):
        kept = product if isinstance(product, Tensor) else torch.full((), product, dtype=torch.float64, device=device)
        product = kept * (factor.on(device) if isinstance(factor, _graph_numbers.Number) else factor)
        kept.copy_(product if skips is None else torch.where(skips, kept, product))
    else:
        product = kept = product * factor
    return kept, Momentum(step, factor, next_factor, product, partial(_momentum, beta1, decay, skips, device))


class FusedNAdam(ParameterSteps):
    """NAdam with the arguments and numbers of `torch.optim.NAdam`; their state dicts are interchangeable.

    `group["mu_product"]` is the product of the momentum factors of all steps. Without `decoupled_weight_decay`, decay
    is added to the gradient. With it, `cautious_weight_decay` decays only elements whose decay has the sign of their
    update. `FusedOptimizer` describes the keyword options.
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
        *,
        cautious_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults: dict[str, Any] = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        defaults |= dict(momentum_decay=momentum_decay, decoupled_weight_decay=decoupled_weight_decay)
        defaults |= dict(cautious_weight_decay=cautious_weight_decay)
        # Products of parameters that missed steps of their group, or have no gradient now.
        self._products: dict[Tensor, Any] = {}
        super().__init__(params, defaults, **options)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        _check_cautious(options)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return ("exp_avg", "exp_avg_sq")

    def _next_step(self, index: int, group: dict[str, Any], device: torch.device, scaling: LossScaling) -> Any:
        """Count a step; return the count, and the momentum factors, whose product a skipped step does not change."""
        step = super()._next_step(index, group, device, scaling)
        capture = _graph_numbers.current
        numbers = group if capture is None else capture.group(self, index)
        skips = None if scaling.found_inf is None else scaling.found_inf.to(device).reshape(()) != 0
        product = group.get("mu_product", 1.0)
        beta1, decay = numbers["betas"][0], numbers["momentum_decay"]
        group["mu_product"], momentum = _momentum(beta1, decay, skips, device, step, product)
        return momentum

    def _step_of(self, bucket: UpdateBucket, step: Momentum) -> Momentum:
        """Return the numbers of the bucket's parameters: the group's, unless they missed steps of it."""
        missed = self._missed.get(bucket.params[0], 0)
        if not missed:
            return step
        product, momentum = step.again(step.step - missed, self._products[bucket.params[0]])
        self._products.update(dict.fromkeys(bucket.params, product))
        return momentum

    def _kind(self, param: Tensor, state: dict[str, Any]) -> Any:
        return super()._kind(param, state), self._products.get(param)

    def _before_buckets(self, index: int, group: dict[str, Any]) -> None:
        super()._before_buckets(index, group)
        product = group.get("mu_product", 1.0)
        for param in group["params"]:
            if not (self._missed.get(param) or param in self._away):
                self._products.pop(param, None)
            elif param not in self._products:  # it just lost its gradient, or got its first one late
                is_new = param not in self._away
                self._products[param] = 1.0 if is_new else product.clone() if isinstance(product, Tensor) else product

    def _update(
        self, group: Group, bucket: UpdateBucket, step: Momentum, scaling: LossScaling, seed: int | None
    ) -> None:
        decoupled = bool(group["decoupled_weight_decay"])
        hyper = adam_hyperparameters(group, step.step, decoupled=decoupled)
        del hyper["bias_correction"]
        hyper |= {"momentum": step.factor, "next_momentum": step.next_factor, "product": step.product}
        flags = decoupled, bool(group.get("cautious_weight_decay"))
        bucket.lists.apply(rules.NADAM, hyper, flags, seed=seed, **scaling.arguments)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the product of momentum factors for each parameter, as `torch.optim.NAdam` has it."""
        saved = super().state_dict()
        for group, saved_group in zip(self.param_groups, saved["param_groups"], strict=True):
            for param, key in zip(group["params"], saved_group["params"], strict=True):
                if key in saved["state"]:
                    product = self._products.get(param, group.get("mu_product", 1.0))
                    product = torch.full((), float(product), dtype=torch.float64, device=HOST)
                    saved["state"][key] = {**saved["state"][key], "mu_product": product}
        return saved

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of `torch.optim.NAdam`."""
        super()._load(state_dict)
        self._products.clear()
        for group in self.param_groups:
            states = {param: self.state[param] for param in group["params"] if param in self.state}
            found = {param: state.pop("mu_product", None) for param, state in states.items()}
            known = {param: float(product) for param, product in found.items() if product is not None}
            self._products.update((param, product) for param, product in known.items() if self._missed.get(param))
            if "mu_product" not in group and known:
                of_group = (product for param, product in known.items() if param not in self._products)
                group["mu_product"] = min(of_group, default=1.0)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_products": self._products}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_products", {})  # pickles of earlier versions lack them
