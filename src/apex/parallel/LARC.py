"""LARC: scales each parameter's gradient so that any optimizer's step is proportional to the parameter's norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._delegation import delegated
from .._distributed.shards import by_shard_groups, like_parameter, local, reduce_over
from ..ops import _graph_numbers
from ..ops.multi_tensor import rules
from ..ops.multi_tensor.dispatch import check, groups_of
from ..optimizers._base import FusedOptimizer, run_closure

_NAMES = ("params", "gradients")


class LARC:
    """Layer-wise adaptive rate control (https://arxiv.org/abs/1708.03888) around any optimizer.

    A parameter's rate is trust_coefficient * |p| / (|g| + weight_decay * |p| + eps). With `clip` the effective learning
    rate is the smaller of this rate and the optimizer's lr, otherwise their product. LARC reaches it by scaling the
    gradient, with the weight decay included; the optimizer runs with a weight decay of 0. If |p| or |g| is 0 the
    gradient is unchanged. The host never waits for the device. Norms of sharded parameters (DTensor) are taken over the
    whole parameters.
    """

    def __init__(self, optimizer: Any, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8) -> None:
        if not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "step")):
            raise TypeError(f"optimizer must be an optimizer, got {type(optimizer).__name__}")
        for name, number in (("trust_coefficient", trust_coefficient), ("eps", eps)):
            if not number >= 0:
                raise ValueError(f"{name}={number} must be at least 0: a negative rate would maximize the loss")
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.eps = eps
        self.clip = clip

    state = delegated("optim", "state")
    param_groups = delegated("optim", "param_groups")
    defaults = delegated("optim", "defaults")

    def __repr__(self) -> str:
        return repr(self.optim)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients; takes the optimizer's own arguments."""
        self.optim.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer."""
        self.optim.add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients, then run the optimizer's step; return the closure's loss."""
        loss = run_closure(closure)
        decays = [group.get("weight_decay", 0) for group in self.optim.param_groups]
        had_decay = ["weight_decay" in group for group in self.optim.param_groups]
        # Other optimizers freeze their options in a captured graph. LARC must then not read them anew at a replay.
        capture = _graph_numbers.current if isinstance(self.optim, FusedOptimizer) else None
        self._scale_gradients(capture)
        try:
            # A captured graph must read 0 as well, not the value that is in the group at a replay.
            for group in self.optim.param_groups:
                group["weight_decay"] = 0 if capture is None else capture.constant(0.0)
            result = self.optim.step()
        finally:
            for group, decay, had in zip(self.optim.param_groups, decays, had_decay, strict=True):
                if had:
                    group["weight_decay"] = decay
                else:
                    group.pop("weight_decay", None)
        return result if closure is None else loss

    @torch.no_grad()
    def _scale_gradients(self, capture: _graph_numbers.CaptureContext | None) -> None:
        ready = []
        for group in self.optim.param_groups:
            if group.get("maximize") and group.get("weight_decay"):
                raise ValueError(
                    "LARC adds the weight decay to the gradient, so with maximize=True weights would grow: negate the "
                    "loss instead, or use weight_decay=0"
                )
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:  # a gradient distributed unlike its parameter: scaling in place would change a copy
                param.grad = like_parameter(param, param.grad)
            gradients = [param.grad for param in params]
            check((params, gradients), _NAMES)
            ready.append((group, params, gradients))
        for index, (group, params, gradients) in enumerate(ready):
            if capture is not None:
                group = capture.group(self.optim, index)
            hyper = {
                "lr": group["lr"],
                "trust_coefficient": self.trust_coefficient,
                "eps": self.eps,
                "weight_decay": group.get("weight_decay", 0),
            }
            for shard_groups, indices in by_shard_groups(params):
                shards = [[local(tensors[i]) for i in indices] for tensors in (params, gradients)]
                for _, lists in groups_of(shards, _NAMES):
                    norms = lists.apply(rules.LARS_NORMS, {})
                    assert norms is not None
                    lists.apply(rules.LARC, hyper, (bool(self.clip),), whole=reduce_over(norms, shard_groups))


# Some clients use `apex.parallel.LARC` as a module, others as the class. Both find `apex.parallel.LARC.LARC`.
LARC.LARC = LARC  # type: ignore[attr-defined]
