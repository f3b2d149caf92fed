"""Models and optimizers in mixed precision: casts, master weights and loss scales."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ..amp._containers import applier, to_type
from ..amp._models import _cast_model
from ..logging import get_dist_logger
from ..transformer.amp import GradScaler
from .wrappers import ModelWrapper, OptimizerWrapper

HALF = (torch.float16, torch.bfloat16)


class CastModel(ModelWrapper):
    """A model that runs under autocast, or whose inputs and outputs are cast; None for nothing."""

    def __init__(
        self,
        module: nn.Module,
        *,
        autocast: torch.dtype | None = None,
        inputs: torch.dtype | None = None,
        outputs: torch.dtype | None = None,
    ) -> None:
        super().__init__(module)
        self._autocast, self._inputs, self._outputs = autocast, inputs, outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._inputs is not None:
            cast = functools.partial(to_type, self._inputs)
            args, kwargs = applier(args, cast), applier(kwargs, cast)
        if self._autocast is None:
            found = self.module(*args, **kwargs)
        else:
            with torch.autocast(_device_type(self.module, args, kwargs), self._autocast):
                found = self.module(*args, **kwargs)
        return found if self._outputs is None else applier(found, functools.partial(to_type, self._outputs))


def _device_type(module: nn.Module, args: Any, kwargs: Any) -> str:
    """Where a module computes: where its parameters are, or its first tensor where it has none (a loss)."""
    for tensor in module.parameters():
        return tensor.device.type
    tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
    return next((tensor.device.type for tensor in tensors), torch.get_default_device().type)


def autocast_criterion(criterion: Any, dtype: torch.dtype) -> Any:
    """A loss function, a module or not, under autocast."""
    if criterion is None:
        return None
    if isinstance(criterion, nn.Module):
        return CastModel(criterion, autocast=dtype)

    @functools.wraps(criterion)
    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(_device_type(nn.Identity(), args, kwargs), dtype):
            return criterion(*args, **kwargs)

    return cast


# Loss scales ----------------------------------------------------------------------------------------------------------


class HysteresisScaler(GradScaler):
    """A loss scale that is lowered after `hysteresis` overflows since it last grew, not after each.

    It stays between `min_scale` and `max_scale`. The count of overflows is part of its state, as the count of steps
    without one is.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        min_scale: float = 1.0,
        max_scale: float = 2.0**32,
        verbose: bool = False,
    ) -> None:
        if hysteresis < 1:
            raise ValueError(f"hysteresis={hysteresis} must be at least 1")
        if not 0 < min_scale <= max_scale:
            raise ValueError(f"min_scale={min_scale} must be positive and at most max_scale={max_scale}")
        super().__init__(min(init_scale, max_scale), growth_factor, backoff_factor, growth_interval)
        self.hysteresis, self.min_scale, self.max_scale = hysteresis, min_scale, max_scale
        self.verbose = verbose
        self._first_overflows = 0
        self._overflows: Tensor | None = None

    def update(self, new_scale: Any = None) -> None:
        if new_scale is not None or self._scale is None:
            super().update(new_scale)
            return
        scale = self._scale
        flags = [
            flag for state in self._per_optimizer_states.values() for flag in state["found_inf_per_device"].values()
        ]
        found = torch.stack([flag.to(scale.device).reshape(()) for flag in flags]).amax() > 0
        before = scale.clone()
        super().update()
        if self._overflows is None:
            self._overflows = torch.full((), self._first_overflows, dtype=torch.int32, device=scale.device)
        self._overflows += found
        waits = found & (self._overflows < self.hysteresis)
        scale.copy_(torch.where(waits, before, scale).clamp(self.min_scale, self.max_scale))
        has_grown = ~found & (self._growth_tracker == 0).reshape(())  # type: ignore[operator]
        self._overflows *= ~has_grown
        if self.verbose and bool(found):  # waits for the device, as messages must
            get_dist_logger().info(f"gradients overflowed; the step was skipped, the loss scale is {scale.item()}")

    def state_dict(self) -> dict[str, Any]:
        count = self._first_overflows if self._overflows is None else int(self._overflows)
        return {**super().state_dict(), "overflows": count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self._first_overflows = int(state_dict.pop("overflows", 0))
        self._overflows = None
        super().load_state_dict(state_dict)


# Master weights -------------------------------------------------------------------------------------------------------


class Masters:
    """float32 copies of an optimizer's half-precision parameters, which are in its groups in their place."""

    def __init__(self, optimizer: Any, exact: dict[Tensor, Tensor]) -> None:
        """`exact` has values from before parameters were cast."""
        self._of: dict[Tensor, Tensor] = {}
        for group in optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                if param.dtype not in HALF:
                    continue
                master = nn.Parameter(exact.get(param, param.detach()).float(), requires_grad=param.requires_grad)
                vars(master).update(vars(param))  # what a split layer notes on its parameters
                group["params"][index] = self._of[param] = master
                if param in optimizer.state:
                    optimizer.state[master] = optimizer.state.pop(param)

    def take_gradients(self) -> None:
        """Moves gradients from parameters to masters, in float32."""
        for param, master in self._of.items():
            if param.grad is not None:
                master.grad = param.grad.float()
                param.grad = None

    def forget_gradients(self) -> None:
        for param, master in self._of.items():
            param.grad = master.grad = None

    @torch.no_grad()
    def update_model(self) -> None:
        """Gives parameters the values of their masters."""
        if self._of:
            torch._foreach_copy_(list(self._of), list(self._of.values()))

    def read(self) -> dict[Tensor, Tensor]:
        return {param: master.detach() for param, master in self._of.items()}

    @torch.no_grad()
    def write(self, values: dict[Tensor, Tensor]) -> None:
        for param, value in values.items():
            if param in self._of:
                self._of[param].copy_(value)
        self.update_model()


class ZeroMasters:
    """The float32 values that a ZeRO optimizer keeps of its parameters, divided among processes."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def read(self) -> dict[Tensor, Tensor]:
        from ..contrib.optimizers._zero.saved import gather
        from ..contrib.optimizers._zero.state import PARAM

        self._optimizer._settle()
        return {param: state[PARAM] for param, state in gather(self._optimizer._states, True).items()}

    def write(self, values: dict[Tensor, Tensor]) -> None:
        from ..contrib.optimizers._zero.state import start_from

        self._optimizer._settle()
        for state in self._optimizer._states:
            start_from(state, [values.get(param, param.detach()) for param in state.arena.params])
        self._optimizer._parameters.updated()
        self._optimizer.param_sync()


def cast_weights(model: nn.Module, optimizer: Any, dtype: torch.dtype) -> Any:
    """Casts parameters and buffers but for those of batch norms; what keeps float32 values for the optimizer."""
    is_zero = bool(getattr(optimizer, "_takes_gradients", False))
    if is_zero:
        optimizer.init_params()
    exact: dict[Tensor, Tensor] = {} if is_zero else {param: param.detach() for param in model.parameters()}
    _cast_model(model, dtype, True)
    if is_zero:
        optimizer._params_were_cast()
        return None
    return None if optimizer is None else Masters(optimizer, exact)


# The optimizer --------------------------------------------------------------------------------------------------------


class MixedOptimizer(OptimizerWrapper):
    """An optimizer with a loss scale (`scaler`), with master weights, with both or with neither.

    With `log_zeros` every step logs how many elements of this process's gradients are zero.
    """

    log_zeros = False

    def __init__(self, optim: Any, scaler: GradScaler | None = None, masters: Any = None) -> None:
        super().__init__(optim)
        self.scaler, self.masters = scaler, masters
        self._is_unscaled = False

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale_grad(self) -> None:
        if self._is_unscaled:
            return
        self._is_unscaled = True
        if self.masters is not None:
            self.masters.take_gradients()
        if self.scaler is not None:
            self.scaler.unscale_(self.optim)
        if self.log_zeros:
            zeros = sum(int((param.grad == 0).sum()) for param in self.parameters if param.grad is not None)
            get_dist_logger().info(f"{zeros} elements of gradients are zero")

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        if self.scaler is not None and (args or kwargs.get("closure") is not None):
            raise ValueError("step takes no closure with a loss scale: backward passes in it would not be scaled")
        self.unscale_grad()
        result = self.optim.step(*args, **kwargs) if self.scaler is None else self.scaler.step(self.optim)
        if self.scaler is not None:
            self.scaler.update()
        if self.masters is not None:
            self.masters.update_model()
        self._is_unscaled = False
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super().zero_grad(*args, **kwargs)
        if self.masters is not None:
            self.masters.forget_gradients()

    def scaler_state(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        if self.scaler is not None and "scale" in state:
            self.scaler.load_state_dict(state)
