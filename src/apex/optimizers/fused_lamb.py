"""FusedLAMB: LAMB in three passes over all parameters, eleven reads or writes of an element in all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ..ops.multi_tensor import lamb_step, rules
from ._base import FusedOptimizer, LossScaling, Options, adam_hyperparameters, compiled_function
from ._buckets import Bucket
from ._norms import clipped_together


class FusedLAMB(FusedOptimizer):
    """LAMB (https://arxiv.org/abs/1904.00962): Adam's step, made as long as lr times the length of the parameter.

    - Gradients are first divided by their global norm over `max_grad_norm` if that is more than 1; 0 or None turns
      this off. All groups share the norm and the limit.
    - Parameters without weight decay take Adam's step as it is; with `use_nvlamb` theirs is scaled too.
    - `adam_w_mode` adds the decay to the step, else to the gradient.
    - `grad_averaging=False` adds the whole gradient to the first moment instead of 1 - beta1 times the gradient.

    Gradients are left as they are, where the original overwrites them. See `FusedOptimizer` for the options by keyword.
    """

    _takes_shards = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        **options: Unpack[Options],
    ) -> None:
        if amsgrad:
            raise RuntimeError(f"{type(self).__name__} does not support the AMSGrad variant")
        defaults: dict[str, Any] = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps)
        defaults |= dict(weight_decay=weight_decay, grad_averaging=grad_averaging, max_grad_norm=max_grad_norm)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        # What this step's gradients are multiplied by, the loss scale included.
        self._clipping: LossScaling | None = None
        super().__init__(params, defaults, set_grad_none=set_grad_none, **options)

    multi_tensor_lamb = compiled_function("multi_tensor_lamb")

    multi_tensor_l2norm = compiled_function("multi_tensor_l2norm")

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return ("exp_avg", "exp_avg_sq")

    def _before_update(self, scaling: LossScaling) -> None:
        limit = self.defaults["max_grad_norm"]
        self._clipping = clipped_together([bucket for _, bucket in self._ready], scaling, limit) if limit else None

    def _update(self, group: dict[str, Any], bucket: Bucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        if self._clipping is not None:
            scaling = self._clipping.on(bucket.device)
        flags = (bool(self.adam_w_mode),)
        hyper = adam_hyperparameters(group, step, grad_averaging=bool(group["grad_averaging"]))
        if not (self.use_nvlamb or group["weight_decay"]):
            bucket.lists.apply(rules.LAMB_UNSCALED, hyper, flags, seed=seed, **scaling.arguments)
            return
        lamb_step(bucket.lists, hyper, flags, seed=seed, **scaling.arguments)
