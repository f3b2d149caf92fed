"""Steps counted for every parameter by itself, as `torch.optim` does, instead of for a group as a whole.

It matters to Adam's bias correction, and to schedules, when a parameter gets its first gradient late or goes without
one at times. Parameters that missed equally many steps form a bucket; nothing is counted while none comes or goes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._base import FusedOptimizer
from ._buckets import Bucket


class ParameterSteps(FusedOptimizer):
    """A fused optimizer whose parameters have step counts of their own.

    With `capturable` a replayed graph counts for the group, and so do all steps.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        # How many steps of its group a parameter missed; and the count of one that has no gradient at the moment.
        self._missed: dict[Tensor, int] = {}
        self._away: dict[Tensor, int] = {}
        super().__init__(*args, **options)

    def _step_of(self, bucket: Bucket, step: Any) -> Any:
        """The count of the bucket's parameters, given the group's."""
        return step - self._missed.get(bucket.params[0], 0)

    def _kind(self, param: Tensor, state: dict[str, Any]) -> Any:
        return self._missed.get(param, 0)

    def _before_buckets(self, index: int, group: dict[str, Any]) -> None:
        if self.capturable:
            return
        started = {param for param in group["params"] if self.state.get(param)}
        # Parameters that go without a gradient from now on, and those that have their first, or one again.
        left = [p for p in group["params"] if p.grad is None and p in started and p not in self._away]
        came = [p for p in group["params"] if p.grad is not None and (p not in started or p in self._away)]
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
        """The state, in the format of `torch.optim`, which loads it too; master weights included."""
        saved = super().state_dict()
        if not self.capturable:
            for group, saved_group in zip(self.param_groups, saved["param_groups"], strict=True):
                for param, index in zip(group["params"], saved_group["params"], strict=True):
                    if index in saved["state"] and "step" in saved["state"][index]:
                        count = self._away.get(param, int(group["step"]) - self._missed.get(param, 0))
                        saved["state"][index]["step"].fill_(count)
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this class, or of PyTorch's optimizer of the same algorithm, returned."""
        super().load_state_dict(state_dict)
        self._missed.clear()
        self._away.clear()
        if self.capturable:
            return
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, index in zip(group["params"], saved_group["params"], strict=True):
                count = state_dict["state"].get(index, {}).get("step")
                if count is not None and "step" in group:
                    self._missed[param] = int(group["step"]) - int(count)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_missed": self._missed, "_away": self._away}
