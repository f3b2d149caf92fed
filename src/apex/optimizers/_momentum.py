"""What SGD and LARS share: momentum buffers whose first step is undampened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ._base import CommonOptions, FusedOptimizer, LossScaling, state_dtype
from ._buckets import Bucket
from ._checks import check_nesterov, check_options

BUFFER = "momentum_buffer"
FRESH = "fresh"


class MomentumOptimizer(FusedOptimizer):
    """Base of the optimizers with a momentum buffer."""

    _counts_steps = False
    # Before the first step that was not skipped, and without momentum.
    _may_lack = frozenset({BUFFER})

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        wd_after_momentum: bool,
        materialize_master_grads: bool,
        set_grad_none: bool,
        **options: Unpack[CommonOptions],
    ) -> None:
        check_options(defaults)
        check_nesterov(defaults)
        self.wd_after_momentum = wd_after_momentum
        # Parameters whose first step an overflow may have kept from happening, and where the device notes it.
        self._undampened: dict[Tensor, Tensor] = {}
        more = {"materialize_master_grads": materialize_master_grads, "set_grad_none": set_grad_none}
        super().__init__(params, defaults, **more, **options)

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

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return (BUFFER,) if group["momentum"] else ()

    # The first step of a buffer ---------------------------------------------------------------------------------------

    def _prepare(self, param: Tensor, group: dict[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], Any]:
        """With dampening, parameters whose momentum buffer may not have seen a step yet form buckets of their own."""
        fresh = BUFFER not in self.state[param]
        if fresh:
            self._undampened.pop(param, None)
        state, _ = super()._prepare(param, group, names)
        if not names or not group["dampening"]:
            return state, None
        return state, FRESH if fresh else id(self._undampened[param]) if param in self._undampened else None

    def _first(self, bucket: Bucket, scaling: LossScaling) -> bool | Tensor:
        """Whether this is the bucket's first step; a tensor where only the device knows of skipped ones."""
        if bucket.kind is None:
            return False
        flag = self._undampened.get(bucket.params[0])
        if flag is None and bucket.kind == FRESH:
            if scaling.found_inf is None and not self.capturable:
                bucket.kind = None
                return True
            flag = torch.ones((), dtype=torch.float64, device=bucket.device)
            self._undampened.update(dict.fromkeys(bucket.params, flag))
        return False if flag is None else flag

    @staticmethod
    def _note_first(first: bool | Tensor, scaling: LossScaling) -> None:
        """Called after the step: the next one is the first no more, unless this one was skipped."""
        if isinstance(first, Tensor):
            first.mul_(0.0 if scaling.found_inf is None else scaling.found_inf.reshape(()) != 0)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state, in the format of `torch.optim.SGD`, which loads it too; master weights included."""
        saved = super().state_dict()
        params = (param for group in self.param_groups for param in group["params"])
        indices = (index for group in saved["param_groups"] for index in group["params"])
        for param, index in zip(params, indices, strict=True):
            if param in self._undampened and bool(self._undampened[param]):
                saved["state"][index] = {name: v for name, v in saved["state"][index].items() if name != BUFFER}
        return saved

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


def momentum_dtype(param: Tensor) -> torch.dtype:
    """float32 for bfloat16 parameters, else the parameter's own: what SGD's momentum is stored in."""
    return torch.float16 if param.dtype == torch.float16 else state_dtype(param)
