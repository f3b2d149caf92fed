"""Models and optimizers in mixed precision: casts and loss scales."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..amp._amp_state import HALF, AmpState
from ..amp._model_casts import ForwardCasts, _cast_model
from ..amp.scaler import NonfiniteCounts, OverflowMessages
from ..logging import get_dist_logger
from ..ops._host import default_device
from ..ops.multi_tensor import scale
from ..transformer.amp import GradScaler
from ._masters import Masters, StateMasters, has_state_masters
from ._warnings import warn_user
from ._weight_copies import WeightCopies
from .wrappers import ModelWrapper, OptimizerWrapper, masters_of, unwrapped


class CastModel(ModelWrapper):
    """A model that runs under autocast, or whose inputs and outputs are cast; None means no cast."""

    def __init__(
        self,
        module: nn.Module,
        *,
        autocast: torch.dtype | None = None,
        inputs: torch.dtype | None = None,
        outputs: torch.dtype | None = None,
        masters: Any = None,
        copies: WeightCopies | None = None,
    ) -> None:
        super().__init__(module)
        self.masters, self._copies = masters, copies
        self._autocast, self._casts = autocast, ForwardCasts(inputs, outputs=outputs)

    def _take_optimizer(self, optimizer: Any) -> None:
        if self._copies is not None:
            self._copies.take_optimizer(optimizer)
        super()._take_optimizer(optimizer)

    def cast_outputs(self, dtype: torch.dtype) -> None:
        """Cast outputs to `dtype` from now on."""
        self._casts = dataclasses.replace(self._casts, outputs=dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if not isinstance(value, MethodType) or hasattr(nn.Module, name) or value.__self__ is not unwrapped(self):
            return value

        @functools.wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            """Call a method of the model; with tensors, such as `encode(inputs)`, in the model's precision."""
            has_tensors = any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))
            result = self._run(value, args, kwargs) if has_tensors else value(*args, **kwargs)
            return self if result is value.__self__ else result

        return method

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the model, or a method of it, in this precision."""
        return self._casts.run(functools.partial(self._under_autocast, function), args, kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply `float`, `to` and so on; raise before anything changes if that casts weights that have masters."""
        half = next((param for param in self.parameters() if param.dtype in HALF), None)
        if self.masters is not None and half is not None:
            dtype = fn(torch.empty(0, dtype=half.dtype, device=half.device)).dtype
            if dtype != half.dtype:
                raise RuntimeError(
                    f"the weights of a boosted model stay {half.dtype}, because their float32 masters are in the "
                    f"optimizer: they cannot become {dtype}. model.state_dict() has the float32 values; to train with "
                    'float32 weights, boost with mixed_precision=None or BF16MixedPrecision("O4")'
                )
        return super()._apply(fn, recurse)

    def _under_autocast(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._autocast is None:
            return function(*args, **kwargs)
        with torch.autocast(_device_type(self.module, args, kwargs), self._autocast):
            if self._copies is None or torch.compiler.is_compiling():  # the compiler joins casts with other operators
                return function(*args, **kwargs)
            return self._copies.call(function, args, kwargs)


def _device_type(module: nn.Module, args: Any, kwargs: Any) -> str:
    """Return the device type of a module's parameters, or of its first tensor argument if it has none (a loss)."""
    for tensor in module.parameters():
        return tensor.device.type
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return next((tensor.device.type for tensor in tensors), default_device().type)


def autocast_criterion(criterion: Any, dtype: torch.dtype) -> Any:
    """Return a loss function or loss module that runs under autocast."""
    if criterion is None:
        return None
    if isinstance(criterion, nn.Module):
        return CastModel(criterion, autocast=dtype)

    @functools.wraps(criterion)
    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(_device_type(nn.Identity(), args, kwargs), dtype):
            return criterion(*args, **kwargs)

    return cast


def cast_weights(
    models: list[nn.Module], optimizer: Any, dtype: torch.dtype, in_state: bool = False
) -> Masters | StateMasters | None:
    """Cast all parameters and buffers except batch norms'; return master weights for the optimizer.

    If `in_state` is set, an optimizer made with `master_weights=True` or `master_bits` keeps them in its state, and one
    made with `stochastic_rounding=True` needs none. Returns None without masters: also without an optimizer, or for a
    ZeRO optimizer, which has float32 weights in its state.
    """
    exact: dict[Tensor, Tensor] = {param: param.detach() for model in models for param in model.parameters()}
    for model in models:
        earlier = masters_of(model)  # of an optimizer that the model was boosted with before
        exact |= earlier.read() if getattr(earlier, "is_local", False) else {}
        _cast_model(model, dtype, True)
    if getattr(optimizer, "_takes_gradients", False):  # ZeRO: its float32 weights start from the exact values
        optimizer._exact_value = lambda param: exact.pop(param, None)
        optimizer.init_params()
        optimizer._exact_value = None
        return None
    if in_state and has_state_masters(optimizer):
        return StateMasters(optimizer, exact)
    unused = [name for name in ("stochastic_rounding", "master_bits") if getattr(optimizer, name, None)]
    if in_state and "stochastic_rounding" in unused:
        return None
    if unused:
        message = f"{unused[0]}={getattr(optimizer, unused[0])} of {type(optimizer).__name__} has no effect: "
        warn_user(f"{message}its parameters are float32 masters beside those of the model")
    return None if optimizer is None else Masters(optimizer, exact)


class MixedOptimizer(OptimizerWrapper):
    """An optimizer with a loss scale (`scaler`), master weights, both or neither.

    If `log_zeros` is set, every step logs the number of zero elements in this process's gradients. A skipped step
    prints a message. `overflow_patience` skipped steps in a row at the smallest scale raise an error.
    """

    log_zeros = False
    overflow_patience = AmpState().overflow_patience

    def __init__(self, optim: Any, scaler: GradScaler | None = None, masters: Any = None) -> None:
        super().__init__(optim)
        self.scaler, self.masters = scaler, masters
        self._has_scaled = False  # whether a loss has been scaled since the last step
        # A gradient that is multiplied by the loss scale, and its version counter after the last backward pass.
        self._scaled_grad: tuple[Tensor, int] | None = None
        self._warned_of_changes = False
        self._has_stepped = False
        self._found_inf: Tensor | None = None
        self._nonfinite: list[NonfiniteCounts] = []
        own: Any = weakref.ref(self)  # a reference cycle would keep an unused optimizer in memory
        self._messages = OverflowMessages(
            lambda: own()._names_by_id(),
            lambda: own().overflow_patience,
            setting="optimizer.overflow_patience",
            bfloat16='Booster(mixed_precision="bf16")',
            tracing="Booster(trace_overflow=True)",
        )
        self._scale_before: Tensor | None = None
        self._is_stepping = False
        if scaler is not None and hasattr(optim, "register_step_pre_hook"):
            optim.register_step_pre_hook(lambda *_: None if own() is None else own()._refuse_other_steps())

    def _refuse_other_steps(self) -> None:
        """Raise if `optim` is stepped itself, with gradients that are multiplied by the loss scale."""
        if self._has_scaled and not self._is_stepping and not self._is_unscaled:
            raise RuntimeError(
                "this optimizer was given to boost, and its step would apply gradients that are multiplied by the loss "
                "scale: call step() of the optimizer that boost returned"
            )

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name in ("train", "eval") and vars(self).get("masters") is not None:
            return functools.partial(self._move, value)
        return value

    def _move(self, move: Callable[[], Any]) -> Any:
        """Call `train` or `eval` of a Schedule-Free optimizer, which moves its parameters, and move the model's too."""
        result = move()
        self.masters.update_model()
        return result

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Raise if a user's torch.amp.GradScaler, which asks this in its `step`, does not see the gradients."""
        if self.scaler is not None or isinstance(self.masters, Masters):
            has = "float32 masters without gradients" if self.scaler is None else "a loss scale of its own"
            raise RuntimeError(
                f"a torch.amp.GradScaler cannot step this optimizer, because it has {has}: remove the GradScaler and "
                'call optimizer.backward(loss) and optimizer.step(). Booster(mixed_precision="fp16") has a loss scale'
            )
        return False

    def _names_by_id(self) -> dict[int, str]:
        named = zip(self.parameters, self.names or (), strict=False)
        return {id(param): name for param, name in named if name is not None}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        before = len(self.optim.param_groups)
        super().add_param_group(param_group)
        for group in self.optim.param_groups[before:]:  # Muon makes two groups of one
            if self.masters is not None:
                self.masters.add(self.optim, group, {})

    def scale_loss(self, loss: Tensor) -> Tensor:
        self._refuse_more_gradients()
        self._messages.read()
        self._has_scaled = True
        return loss if self.scaler is None else self.scaler.scale(loss)

    def backward(self, loss: Tensor, inputs: Any = None, retain_graph: bool = False, **kwargs: Any) -> None:
        super().backward(loss, inputs, retain_graph, **kwargs)
        if self.scaler is not None and not self._is_zero:
            params = self.masters._master_of if isinstance(self.masters, Masters) else self.parameters
            gradient = next((param.grad for param in params if param.grad is not None), None)
            self._scaled_grad = None if gradient is None else (gradient, gradient._version)

    def _warn_of_changes(self) -> None:
        """Warn once if scaled gradients were changed: a clip to a norm or value would divide it by the loss scale.

        One gradient suffices, because clipping changes all of them.
        """
        if self._scaled_grad is None or self._warned_of_changes:
            return
        gradient, version = self._scaled_grad
        if gradient._version != version:
            self._warned_of_changes = True
            warn_user(
                "gradients were changed between backward and step, while they were multiplied by the loss scale: if "
                "they were clipped, nearly nothing is left of them. Clip by optimizer.clip_grad_by_norm or "
                "clip_grad_by_value, or call optimizer.unscale_grad() before"
            )

    def _refuse_more_gradients(self) -> None:
        """Raise if a backward pass would add scaled gradients to unscaled ones, or gradients that the step ignores."""
        if self._is_unscaled and (self.scaler is not None or isinstance(self.masters, Masters)):
            raise RuntimeError(
                "the gradients of this step have been unscaled already, by clipping them or by unscale_grad, and those "
                "of another backward pass cannot be added: call optimizer.step() or optimizer.zero_grad() first, and "
                "clip after the last backward pass of a step"
            )

    @property
    def _loss_scale(self) -> Any:  # type: ignore[override]
        return None if self.scaler is None else self._scaled_one

    def _scaled_one(self) -> Tensor:
        assert self.scaler is not None
        return self.scaler.scale(torch.ones((), dtype=torch.float32, device=self.parameters[0].device))

    def backward_by_grad(self, tensor: Tensor, grad: Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        self._refuse_more_gradients()
        self._has_scaled = True
        super().backward_by_grad(tensor, grad, inputs, retain_graph)

    def unscale_grad(self) -> None:
        if self.scaler is not None and not (self._is_unscaled or self._has_scaled) and self._has_gradients():
            raise RuntimeError(
                "the optimizer has gradients that do not come from a scaled loss, and a step would divide them by the "
                f"loss scale, {self.scaler.get_scale()}: call booster.backward(loss, optimizer) or "
                "optimizer.backward(loss) in place of loss.backward(), once before every step"
            )
        if not self._is_unscaled:
            self._warn_of_changes()
        super().unscale_grad()

    def _has_gradients(self) -> bool:
        if self._is_zero:
            return bool(self.optim._gradients.tensors())
        models = () if self.masters is None else self.masters.read()
        return any(param.grad is not None for param in (*self.parameters, *models))

    def _unscale(self) -> None:
        if self.masters is not None:
            self.masters.take_gradients()
        if self.scaler is not None:
            self._scale_before = self._messages.scale_before(self.scaler._scale)  # type: ignore[arg-type]
            self.scaler.unscale_(self.optim)
            flags = self.scaler._per_optimizer_states[id(self.optim)]["found_inf_per_device"]
            self._found_inf = next(iter(flags.values()))
            self._nonfinite = [] if self._is_zero else self._count_nonfinite(self._found_inf)
        if self.log_zeros:
            zeros = sum(int((param.grad == 0).sum()) for param in self.parameters if param.grad is not None)
            get_dist_logger().info(f"{zeros} elements of gradients are zero")

    def _count_nonfinite(self, found_inf: Tensor) -> list[NonfiniteCounts]:
        """Count infinite and NaN elements of each gradient on the device; read gradients only if `found_inf` is set."""
        by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for param in self.parameters:
            if param.grad is not None:
                gradient = getattr(param.grad, "_local_tensor", param.grad)
                gradient = gradient._values() if gradient.layout == torch.sparse_coo else gradient
                params, gradients = by_device.setdefault(gradient.device, ([], []))
                params.append(param)
                gradients.append(gradient)
        counted = []
        for device, (params, gradients) in by_device.items():
            counts = torch.zeros(len(params), 2, dtype=torch.int32, device=device)
            is_fine = (found_inf == 0).to(device, torch.float32).reshape(1)
            flag = torch.zeros_like(is_fine)
            scale(gradients, gradients, 1.0, overflow=flag, nonfinite_counts=counts, noop=is_fine)
            counted.append(NonfiniteCounts(params, counts))
        return counted

    def _step(self, closure: Any, *args: Any, **kwargs: Any) -> Any:
        if (self.scaler or self.masters) is not None and (args or closure is not None):
            raise ValueError("step takes no closure with a loss scale or master weights: its gradients would miss them")
        if self.scaler is None:
            result = super()._step(closure, *args, **kwargs)
        else:
            self._is_stepping = True
            try:
                result = self.scaler.step(self.optim, **kwargs)
            finally:
                self._is_stepping = False
            self.scaler.update()
        if self.masters is not None:
            self.masters.update_model()
            self.masters.drop_gradients()
        return result

    def _prepare_step(self) -> None:
        if self._is_unscaled and isinstance(self.masters, Masters):
            self.masters.check_taken()
        if self.masters is not None and not self._has_stepped:
            self._adopt_weights()
        self._has_stepped = True
        super()._prepare_step()

    @torch.no_grad()
    def _adopt_weights(self) -> None:
        """Set masters to weights that were changed since `boost`, by an initialisation of the model for example.

        Only the first step does, because it compares all weights. With `master_bits` a master is made of its weight.
        """
        if getattr(self.optim, "master_bits", None) is None:
            changed = [(p, m) for p, m in self.masters.read().items() if not torch.equal(m.to(p.dtype), p)]
            self.masters.write({p: torch.where(m.to(p.dtype) == p, m, p.float()) for p, m in changed})

    def step(self, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = super().step(closure, *args, **kwargs)
        self._has_scaled, self._scaled_grad = False, None
        if self.scaler is not None and self._found_inf is not None:
            floor, found_inf, counts = getattr(self.scaler, "min_scale", None), self._found_inf, self._nonfinite
            self._found_inf, self._nonfinite, scale, before = None, [], self.scaler._scale, self._scale_before
            self._messages.note(found_inf, scale, floor, 0, counts, before)  # type: ignore[arg-type]
        return result

    def trace_overflow(self, model: nn.Module, after_skips: int | None = None) -> Any:
        if self.scaler is None:
            return super().trace_overflow(model, after_skips)
        return self._messages.trace(unwrapped(model), after_skips)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._is_unscaled and self.scaler is not None:  # gradients were clipped, and are dropped without a step
            self.scaler._per_optimizer_states.pop(id(self.optim), None)
        self._has_scaled, self._scaled_grad = False, None
        super().zero_grad(*args, **kwargs)
        if isinstance(self.masters, Masters):  # also if `optim` was fused since, which drops its own `zero_grad`
            self.masters.zero_gradients(bool(args[0] if args else kwargs.get("set_to_none", True)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before = self.masters.read() if isinstance(self.masters, StateMasters) else {}
        super().load_state_dict(state_dict)
        if before:
            self.masters.add_missing(before, state_dict)

    def scaler_state(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        if self.scaler is not None and "scale" in state:
            self.scaler.load_state_dict(state)
