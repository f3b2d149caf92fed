"""What SGD and LARS share: momentum buffers whose first step is undampened, and gradients that amp left scaled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from ._base import FusedOptimizer, Skip, check_hyperparameters
from ._buckets import Bucket

BUFFER = "momentum_buffer"


class MomentumOptimizer(FusedOptimizer):
    """Base of the optimizers with a momentum buffer.

    `apex.amp` sets `most_recent_scale` to the loss scale that it left on the gradients, and `scale_set_by_backward`;
    a step divides by the one and resets both. `materialize_master_grads` is an option of amp, kept for it.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        wd_after_momentum: bool,
        materialize_master_grads: bool,
        **options: bool,
    ) -> None:
        lr, momentum = defaults["lr"], defaults["momentum"]
        check_hyperparameters(momentum=momentum, weight_decay=defaults["weight_decay"])
        if lr is not required:
            check_hyperparameters(lr=lr)
        if defaults["nesterov"] and (momentum <= 0 or defaults["dampening"] != 0):
            raise ValueError(
                f"nesterov needs a momentum and no dampening, not {momentum=} and dampening={defaults['dampening']}"
            )
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.most_recent_scale: float | Tensor = 1.0
        self.scale_set_by_backward = False
        # Parameters whose first step an overflow may have kept from happening, and where the device notes it.
        self._undampened: dict[Tensor, Tensor] = {}
        super().__init__(params, defaults, **options)

    def get_momentums(self, params: Iterable[Tensor]) -> tuple[list[Tensor], bool]:
        """The momentum buffers of the parameters, made where there is none; and whether the last one is new."""
        momentums, first_run = [], True
        for param in params:
            state = self.state[param]
            first_run = BUFFER not in state
            if first_run:
                state[BUFFER] = self._initial_state(BUFFER, param, {})
            momentums.append(state[BUFFER])
        return momentums, first_run

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimization step; returns the closure's loss."""
        loss = self._run_closure(closure)
        self._step(self._with_recent_scale(self._skip_from_scaler()))
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        return loss

    def _with_recent_scale(self, skip: Skip) -> Skip:
        scale = self.most_recent_scale
        if not isinstance(scale, Tensor):
            if scale == 1.0:
                return skip
            scale = torch.full((1,), scale, dtype=torch.float64, device=self.param_groups[0]["params"][0].device)
        inverse = scale.double().reciprocal().to(torch.float32).reshape(1)
        if skip.inverse_scale is not None:
            inverse = inverse.to(skip.inverse_scale.device) * skip.inverse_scale
        return Skip(skip.noop, inverse)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return (BUFFER,) if group["momentum"] else ()

    # The first step of a buffer ---------------------------------------------------------------------------------------

    def _prepare(self, param: Tensor, group: dict[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], Any]:
        """Where there is dampening, the kind of a parameter is whether its buffer has not been through a step."""
        pending = self._undampened.pop(param, None)
        fresh = BUFFER not in self.state[param] or (pending is not None and bool(pending))
        state, _ = super()._prepare(param, group, names)
        return state, fresh and bool(names) and bool(group["dampening"])

    def _first(self, bucket: Bucket, skip: Skip) -> bool | Tensor:
        """Whether this is the bucket's first step; a number on the device where only that knows."""
        if not bucket.kind:
            return False
        if BUFFER not in bucket.kept:
            if skip.noop is None and not self.capturable:
                bucket.kind = False
                return True
            bucket.kept[BUFFER] = torch.ones((), dtype=torch.float64, device=bucket.device)
            self._undampened.update(dict.fromkeys(bucket.params, bucket.kept[BUFFER]))
        return bucket.kept[BUFFER]

    @staticmethod
    def _note_first(first: bool | Tensor, skip: Skip) -> None:
        """After the step: it was the first, unless it was skipped."""
        if isinstance(first, Tensor):
            first.mul_(0.0 if skip.noop is None else skip.noop.reshape(()) != 0)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state, in the format of `torch.optim.SGD`, which loads it too; master weights included."""
        pending = [param for param, flag in self._undampened.items() if bool(flag)]
        self._undampened.clear()
        for param in pending:
            del self.state[param][BUFFER]
        if pending:
            self._plans.clear()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this class, or of `torch.optim.SGD`, returned."""
        super().load_state_dict(state_dict)
        self._undampened.clear()

    def _rename_loaded_state(self) -> None:
        for state in self.state.values():
            if state.get(BUFFER, self) is None:  # torch.optim.SGD may note that there is no buffer yet
                del state[BUFFER]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._undampened = {}
        for group in self.param_groups:
            group.setdefault("nesterov", False)
