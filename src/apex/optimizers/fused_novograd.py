"""FusedNovoGrad: NovoGrad in two passes over all gradients and one over parameters and state."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops._host import HOST
from ..ops.multi_tensor import rules
from ._base import LOW_PRECISION, FusedOptimizer, LossScaling, Options, adam_hyperparameters, compiled_function
from ._buckets import Group, UpdateBucket
from ._checkpoints import check_saved

NORM = "exp_avg_sq"
# Stands for a norm that has not been computed yet.
UNKNOWN = -1.0


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad (https://arxiv.org/abs/1905.11286): momentum of gradients divided by a moving average of their norm.

    - `norm_type` 2 averages the square of each parameter's L2 norm, 0 averages its largest absolute value.
    - The average starts with the first norm, or at 0 with `init_zero`.
    - `reg_inside_moment` applies the division by the norm and the weight decay inside the momentum, else to the update.
    - `grad_averaging=False` adds the whole gradient to the momentum instead of 1 - beta1 times the gradient.

    The average is a number per parameter, `state[p]["exp_avg_sq"]`, which a step updates in place. The original keeps
    the averages' roots in `group["exp_avg_sq"]`: two tensors, for 16-bit parameters and for others, with one element
    per parameter that has a gradient. `state_dict` adds this list and `load_state_dict` reads it, so that checkpoints
    can be exchanged. `FusedOptimizer` describes the keyword options.
    """

    _measures = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
        **options: Unpack[Options],
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedNovoGrad does not support the AMSGrad variant")
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        defaults |= dict(grad_averaging=grad_averaging, norm_type=norm_type, init_zero=init_zero)
        self.reg_inside_moment = bool(reg_inside_moment)
        self.moment_mode = 0 if reg_inside_moment else 1
        super().__init__(params, defaults, set_grad_none=set_grad_none, **options)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        if options["norm_type"] not in (0, 2):
            raise ValueError(f"norm_type={options['norm_type']!r} is neither 2 (L2) nor 0 (largest absolute value)")

    multi_tensor_novograd = compiled_function("multi_tensor_novograd")

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return ("exp_avg",)

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        squares = group["norm_type"] == 2
        inside = self.moment_mode == 0
        averages = self._averages(group, bucket)
        rule, share = rules.SQUARE_SUM if squares else rules.MAXIMUM, float(1 - group["betas"][1])
        over_shards = functools.partial(bucket.over_shards, maximum=not squares) if bucket.shard_groups else None
        bucket.lists.measured_average(rule, averages, share, over_shards, **scaling.arguments)
        hyper = adam_hyperparameters(group, step, grad_averaging=bool(group["grad_averaging"]), inside=inside)
        bucket.lists.apply(rules.NOVOGRAD, hyper, (inside, squares), whole=averages, seed=seed, **scaling.arguments)

    def _averages(self, group: dict[str, Any], bucket: UpdateBucket) -> Tensor:
        """Return a bucket's averages, float32 [tensors, 2], in the first column; each state holds a view of its own."""
        averages = bucket.cache.get("averages")
        if averages is None:
            averages = _common_base(bucket.states)
            if averages is None or averages.device != bucket.device:
                averages = self._gather(group, bucket)
            bucket.cache["averages"] = averages
            bucket.watch(NORM)
        return averages

    def _gather(self, group: dict[str, Any], bucket: UpdateBucket) -> Tensor:
        start = 0.0 if group["init_zero"] else UNKNOWN
        fresh = torch.full((), start, dtype=torch.float32, device=bucket.device)
        known = [state.get(NORM, fresh).to(bucket.device, torch.float32) for state in bucket.states]
        averages = torch.zeros(len(known), 2, dtype=torch.float32, device=bucket.device)
        column = averages[:, 0]
        column.copy_(torch.stack(known))
        for state, average in zip(bucket.states, column.unbind(), strict=True):
            state[NORM] = average
        return averages

    def state_dict(self) -> dict[str, Any]:
        """Return the state; each group also has its parameters' norms in the original's format."""
        saved = super().state_dict()
        for group, saved_group in zip(self.param_groups, saved["param_groups"], strict=True):
            lists: tuple[list[Tensor], list[Tensor]] = ([], [])
            for param, state in self._stepped(group):
                lists[_place(param)].append(state[NORM].clamp(min=0))
            nothing = torch.empty(0, dtype=torch.float32, device=HOST)
            joined = [torch.stack(norms) if norms else nothing for norms in lists]
            saved_group[NORM] = [norms.sqrt() for norms in joined] if group["norm_type"] == 2 else joined
        return saved

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of the original."""
        check_saved(self, state_dict)
        norms = [group.get(NORM) for group in state_dict["param_groups"]]
        self._check_norms(state_dict, norms)
        super()._load(state_dict)
        for group, lists in zip(self.param_groups, norms, strict=True):
            group.pop(NORM, None)
            places = [0, 0]
            for param, state in self._stepped(group):
                number = _place(param)
                if NORM not in state and lists is not None:
                    norm = lists[number][places[number]].to(param.device, torch.float32)
                    state[NORM] = norm.square() if group["norm_type"] == 2 else norm.clone()
                places[number] += 1

    def _check_norms(self, state_dict: dict[str, Any], norms: list[Any]) -> None:
        for index, (group, saved, lists) in enumerate(
            zip(self.param_groups, state_dict["param_groups"], norms, strict=False)
        ):
            states = [state_dict["state"].get(name, {}) for name in saved["params"]]
            for name, state in zip(saved["params"], states, strict=True):
                norm = state.get(NORM)
                if NORM in state and (not isinstance(norm, Tensor) or norm.numel() != 1):
                    actual = tuple(norm.shape) if isinstance(norm, Tensor) else norm
                    raise ValueError(f"{NORM} in the state of parameter {name} is {actual}; one number is expected")
            if lists is None or len(states) != len(group["params"]):
                continue  # PyTorch raises if the numbers of parameters differ
            expected = [0, 0]
            for param, state in zip(group["params"], states, strict=True):
                expected[_place(param)] += "exp_avg" in state
            counts = [0 if tensor is None else tensor.numel() for tensor in lists]
            if counts != expected:
                raise ValueError(
                    f"param_groups[{index}]['exp_avg_sq'] has {counts[0]} norms of 16-bit parameters and {counts[1]} "
                    f"of others; the state has {expected[0]} and {expected[1]} parameters with a gradient"
                )

    def _stepped(self, group: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield the parameters of a group that have state, in order."""
        for param in group["params"]:
            state = self.state.get(param, {})
            if "exp_avg" in state:
                yield param, state


def _common_base(states: Sequence[dict[str, Any]]) -> Tensor | None:
    """Return the averages made by an earlier bucket of the same parameters, or None.

    They are reused because a CUDA graph that began by gathering averages would gather them again at every replay.
    """
    base = getattr(states[0].get(NORM), "_base", None)
    if base is None or base.shape != (len(states), 2):
        return None
    addresses = [state[NORM].data_ptr() if NORM in state else 0 for state in states]
    expected = range(base.data_ptr(), base.data_ptr() + base.nbytes, 2 * base.element_size())
    return base if addresses == list(expected) else None


def _place(param: Tensor) -> int:
    """Return which of the original's two lists holds a parameter's norm."""
    return 0 if param.dtype in LOW_PRECISION else 1
