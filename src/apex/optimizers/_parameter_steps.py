"""Step counts per parameter, as in `torch.optim`, instead of one count per group.

The counts differ if a parameter gets its first gradient late (it was frozen at first) or has none in some steps; Adam's
bias correction and schedules depend on them. Parameters that missed the same number of steps form a bucket. Steps cost
no extra work as long as no parameter gains or loses its gradient.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._base import FusedOptimizer
from ._buckets import UpdateBucket


class ParameterSteps(FusedOptimizer):
    """A fused optimizer that counts steps for each parameter if `counts_by_parameter` is set, else for each group.

    With `capturable`, steps are counted for the group only, because a replayed graph can count no other way.
    """

    counts_by_parameter = False

    def __init__(self, *args: Any, **options: Any) -> None:
        # `_missed`: steps of its group that a parameter missed. `_away`: step counts of parameters without a gradient.
        self._missed: dict[Tensor, int] = {}
        self._away: dict[Tensor, int] = {}
        super().__init__(*args, **options)

    def _step_of(self, bucket: UpdateBucket, step: Any) -> Any:
        """Return the step count of the bucket's parameters from the group's count."""
        missed = self._missed.get(bucket.params[0], 0) if self._missed else 0
        return step - missed if missed else step

    def _kind(self, param: Tensor, state: dict[str, Any]) -> Any:
        return self._missed.get(param, 0)

    def _before_buckets(self, index: int, group: dict[str, Any]) -> None:
        if self.capturable or not self.counts_by_parameter:
            return
        started = {param for param in group["params"] if self.state.get(param)}
        models = self._model_params if self._takes_model_grads else {}
        present = {param for param in group["params"] if models.get(param, param).grad is not None}
        # `left`: parameters that just lost their gradient. `came`: parameters that just got a gradient.
        left = [p for p in group["params"] if p not in present and p in started and p not in self._away]
        came = [p for p in group["params"] if p in present and (p not in started or p in self._away)]
        if not left and not came:
            return
        if index in self._skipped:
            self._settle_skipped(index, group)
        now = int(group.get("step", 0))
        for param in left:
            self._away[param] = now - self._missed.get(param, 0)
        for param in came:
            self._missed[param] = now - (self._away.pop(param) if param in started else 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, including master weights, in the format of `torch.optim`, which can load it."""
        saved = super().state_dict()
        if self.counts_by_parameter and not self.capturable:
            for group, saved_group in zip(self.param_groups, saved["param_groups"], strict=True):
                for param, index in zip(group["params"], saved_group["params"], strict=True):
                    if index in saved["state"] and "step" in saved["state"][index]:
                        count = self._away.get(param, int(group["step"]) - self._missed.get(param, 0))
                        saved["state"][index]["step"].fill_(count)
        return saved

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of PyTorch's optimizer of the same algorithm."""
        super()._load(state_dict)
        self._missed.clear()
        self._away.clear()
        if self.capturable or not self.counts_by_parameter:
            return
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, index in zip(group["params"], saved_group["params"], strict=True):
                count = state_dict["state"].get(index, {}).get("step")
                if count is not None and "step" in group:
                    self._missed[param] = int(group["step"]) - int(count)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_missed": self._missed, "_away": self._away}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in ("_missed", "_away"):  # pickles of earlier versions lack them
            self.__dict__.setdefault(name, {})
