"""FusedAdam: Adam and AdamW in one pass over all parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ..ops.multi_tensor import rules
from ._base import EncodingOptimizer, LossScaling, StateOptions, adam_hyperparameters, compiled_function, run_closure
from ._buckets import Group, UpdateBucket
from ._checks import check_cautious, check_decay
from ._parameter_steps import ParameterSteps


class AdamOptions(StateOptions, total=False):
    """Keyword options that upstream's Adam does not have."""

    stochastic_rounding: bool
    materialize_master_grads: bool
    cautious_weight_decay: bool


class FusedAdam(EncodingOptimizer, ParameterSteps):
    """Adam with weight decay decoupled from the gradient (`adam_w_mode`, AdamW) or added to it (L2).

    It computes the same numbers as `torch.optim.AdamW` and `torch.optim.Adam`, and each loads the other's state dicts;
    a state dict with weight decay of the other kind is refused. It works with `torch.amp.GradScaler` without waiting
    for the device. `FusedOptimizer` describes `capturable`, `master_weights` and the keyword options.

    - `state_format`: how the moments are stored, "float32", "bfloat16", "int8" or "float8" (docs/state_formats.md);
    - `master_bits`: 24 or 32; masters of bfloat16 parameters are stored as the bits that the parameters lack;
    - `cautious_weight_decay`: decay only elements whose decay has the sign of their update.
    """

    _encodable: Mapping[str, str] = MappingProxyType({"exp_avg": "signed", "exp_avg_sq": "root"})

    # Without and with AMSGrad.
    _rules = (rules.ADAM_LISTS, rules.ADAM_AMSGRAD_LISTS)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        **options: Unpack[AdamOptions],
    ) -> None:
        defaults: dict[str, Any] = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps)
        defaults |= dict(weight_decay=weight_decay, amsgrad=amsgrad)
        more: dict[str, Any] = {"capturable": capturable, "master_weights": master_weights, **options}
        defaults |= dict(cautious_weight_decay=more.pop("cautious_weight_decay", False))
        self.adam_w_mode = 1 if adam_w_mode else 0
        super().__init__(params, defaults, set_grad_none=set_grad_none, **more)

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        **scaler: Any,
    ) -> Any:
        """Perform one optimization step and return the closure's loss.

        A `torch.amp.GradScaler` can be passed as `grad_scaler`. It is no named argument, because `GradScaler.step`
        would then warn that it will stop passing itself. The other arguments belong to
        `apex.contrib.optimizers.FusedAdam` and raise an error.
        """
        if not (grads is None and output_params is None and scale is None and grad_norms is None):
            raise RuntimeError(
                "apex.optimizers.FusedAdam takes no grads, output_params, scale or grad_norms; "
                "apex.contrib.optimizers.FusedAdam does"
            )
        loss = run_closure(closure)
        self._step(self._loss_scaling(**scaler))
        return loss

    multi_tensor_adam = compiled_function("multi_tensor_adam")

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        check_decay(options, self.adam_w_mode, f"use apex.optimizers.FusedAdam(adam_w_mode={not self.adam_w_mode})")
        if options.get("cautious_weight_decay"):
            check_cautious(options.get("amsgrad"), self.adam_w_mode)
        if options.get("amsgrad") and options.get("state_format", self.state_format) != "float32":
            raise ValueError("amsgrad=True needs state_format='float32'")

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        decoupled, cautious = bool(self.adam_w_mode), bool(group.get("cautious_weight_decay"))
        if cautious or self.state_format != "float32":
            hyper = adam_hyperparameters(group, step, decoupled=decoupled)
            flags = (decoupled, cautious, self.state_format != "float32")
            bucket.lists.apply(rules.GUARDED_ADAM, hyper, flags, seed=seed, **scaling.arguments)
            return
        bucket.lists.apply(
            self._rules[bool(group["amsgrad"])],
            adam_hyperparameters(group, step, decoupled=decoupled),
            (decoupled, bool(group["amsgrad"])),
            noop=scaling.found_inf,
            grad_scale=scaling.inverse_scale,
            seed=seed,
        )
