"""A wrapper of an optimizer with float32 masters of half-precision parameters and loss scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from .._delegation import delegated
from ..amp._amp_state import HALF, maybe_print
from ..amp._checks import check_flags, checked_scale
from ..amp.scaler import LossScaler
from ..ops.multi_tensor import scale as scale_tensors
from .fp16util import clip_grad_norm, gradient_pairs, master_params_to_model_params
from .loss_scaler import scaled_backward

_FULL = (torch.float32, torch.float64)

# Lowering a closure's scale from 2^24 to the smallest that any gradient could need takes fewer attempts.
_ATTEMPTS = 64


class FP16_Optimizer:
    """A wrapper that trains a model in half precision, wholly or in part, with any optimizer.

        model = Model().half()  # or .bfloat16(), or network_to_half(model)
        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
        ...
        optimizer.zero_grad()
        optimizer.backward(loss)  # instead of loss.backward()
        optimizer.step()

    Half-precision parameters in `init_optimizer` are replaced by float32 masters; from then on use this object only.
    `static_loss_scale` is the loss scale. With `dynamic_loss_scale` the scale adapts to the gradients instead, with the
    settings `dynamic_loss_args`: arguments of `apex.amp.scaler.LossScaler` (`init_scale`, `scale_factor`,
    `scale_window`, `min_loss_scale`, `max_loss_scale`).
    """

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        check_flags(dynamic_loss_scale=dynamic_loss_scale, verbose=verbose)
        checked_scale("static_loss_scale", static_loss_scale)
        self.verbose = verbose
        self.dynamic_loss_scale = bool(dynamic_loss_scale)
        self.dynamic_loss_args = dict(dynamic_loss_args or {})
        scaling = self.dynamic_loss_args if dynamic_loss_scale else {}
        self.loss_scaler = LossScaler("dynamic" if dynamic_loss_scale else static_loss_scale, **scaling)
        self.optimizer = init_optimizer
        self.overflow = False
        self.first_closure_call_this_step = True
        self.clip_grad_norm = clip_grad_norm
        # The loss scale of the gradients of half-precision and of other parameters; None without gradients.
        self._half_scale: float | None = None
        self._full_scale: float | None = None

        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp32_groups: list[list[Tensor]] = []
        _check_types(init_optimizer)
        for index, group in enumerate(init_optimizer.param_groups):
            self._take_group(index, group)
        self.all_fp16_params = _joined(self.fp16_groups)
        self.all_fp32_from_fp16_params = _joined(self.fp32_from_fp16_groups)
        self.all_fp32_from_fp32_params = _joined(self.fp32_from_fp32_groups)
        if init_optimizer.state:  # loading casts the state of parameters that now have a master
            init_optimizer.load_state_dict(init_optimizer.state_dict())

    def _take_group(self, index: int, group: dict[str, Any]) -> None:
        """Replace the half-precision parameters of a group by masters."""
        halves: list[Tensor] = []
        masters: list[Tensor] = []
        full: list[Tensor] = []
        state = self.optimizer.state
        for position, param in enumerate(group["params"]):
            if not param.requires_grad:
                continue
            if param.dtype not in HALF:
                full.append(param)
                continue
            master = torch.nn.Parameter(param.detach().float())
            group["params"][position] = master
            if param in state:
                state[master] = state.pop(param)
            halves.append(param)
            masters.append(master)
        self.fp16_groups.append(halves)
        self.fp32_from_fp16_groups.append(masters)
        self.fp32_from_fp32_groups.append(full)
        self.maybe_print(
            f"FP16_Optimizer: group {index} has {len(halves)} parameters with a float32 master and {len(full)} without"
        )

    def maybe_print(self, msg: str) -> None:
        """Print if the optimizer was made with `verbose`."""
        if self.verbose:
            print(msg)

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Run a backward pass from the scaled loss, then `update_master_grads` if the flag is set.

        Gradients accumulate over calls, until `zero_grad`, even if the loss scale changes in between. For several
        losses in a step it is faster to pass `update_master_grads=False` and to call `update_master_grads` once
        after them. Gradients of the model's parameters are scaled; `inspect_master_grad_data` returns the
        masters' gradients.
        """
        scale = self.loss_scale
        self._bring_gradients_to(scale)
        scaled_backward(loss, scale, retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def _bring_gradients_to(self, scale: float) -> None:
        """Multiply existing gradients so that gradients with the given scale can be added to them."""
        self._half_scale = _rescale(self.all_fp16_params, self._half_scale, scale)
        self._full_scale = _rescale(self.all_fp32_from_fp32_params, self._full_scale, scale)

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Copy the model's unscaled gradients to the masters, check for overflow and adapt a dynamic scale."""
        current = self.loss_scale
        half_scale = current if self._half_scale is None else self._half_scale
        full_scale = current if self._full_scale is None else self._full_scale
        self.loss_scaler.clear_overflow_state()
        pairs = gradient_pairs(self.all_fp16_params, self.all_fp32_from_fp16_params)
        if pairs:
            model_grads, master_grads = map(list, zip(*pairs, strict=True))
            self.loss_scaler.unscale(model_grads, master_grads, scale_override=half_scale)
        own = _gradients(self.all_fp32_from_fp32_params)
        if own and (self.dynamic_loss_scale or full_scale != 1.0):
            self.loss_scaler.unscale(own, own, scale_override=full_scale)
        self._full_scale = 1.0
        self.overflow = self.loss_scaler.update_scale()

    def zero_grad(self, set_grads_to_None: bool = False, set_to_none: bool | None = None) -> None:
        """Set the gradients of the model and of the masters to 0, or to None.

        `set_to_none` is torch.optim's name for the argument.
        """
        to_none = set_grads_to_None if set_to_none is None else set_to_none
        masters = [param for group in self.optimizer.param_groups for param in group["params"]]
        params = [param for param in (*masters, *self.all_fp16_params) if param.grad is not None]
        if to_none:
            for param in params:
                param.grad = None
        elif params:
            torch._foreach_zero_([param.grad.detach_() for param in params])  # type: ignore[union-attr]
        self._half_scale = self._full_scale = None

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Tensor | float:
        """Clip the masters' gradients by their norm and return it; return -1 if the last ones overflowed."""
        if self.overflow:
            return -1
        masters = [param for group in self.optimizer.param_groups for param in group["params"]]
        return self.clip_grad_norm(masters, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return the unscaled gradients, a list for each group; None, with a warning, if the last ones overflowed."""
        if self.overflow:
            print("Warning: the last gradients overflowed; FP16_Optimizer.inspect_master_grad_data returns None")
            return None
        return [
            [None if param.grad is None else param.grad.detach() for param in group["params"]]
            for group in self.optimizer.param_groups
        ]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters, then the model; do nothing if the last gradients overflowed.

        A closure must call `zero_grad` and `backward` of this object and return the loss. If its gradients overflow, it
        is called again with the lower scale until they do not.
        """
        if closure is not None:
            return self._step_with_closure(closure)
        if self.overflow:
            maybe_print(f"Gradient overflow.  Skipping step, reducing loss scale to {self.loss_scale}")
            return None
        waits = self._full_scale not in (None, 1.0)
        if waits or (_gradients(self.all_fp16_params) and not _gradients(self.all_fp32_from_fp16_params)):
            raise RuntimeError(
                "step() finds gradients that are scaled, or not copied to the float32 masters: call "
                "optimizer.backward(loss) instead of loss.backward(), and optimizer.update_master_grads() after the "
                "last backward(loss, update_master_grads=False)"
            )
        result = self.optimizer.step()
        self._master_params_to_model_params()
        return result

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def wrapped() -> Any:
            if not self.first_closure_call_this_step:
                # The optimizer may have changed the masters since; it does not know the model's parameters.
                self._master_params_to_model_params()
            self.first_closure_call_this_step = False
            loss = closure()
            for _ in range(_ATTEMPTS):
                if not self.overflow:
                    return loss
                old_scale = self.loss_scale
                maybe_print(f"Gradient overflow in a closure.  Calling it again with loss scale {old_scale}")
                loss = closure()
                if self.overflow and (self.loss_scale == old_scale or not _is_finite(loss)):
                    break
            raise RuntimeError(
                f"gradients in the closure still overflow with loss scale {self.loss_scale}, and a lower one does not "
                f"help (the loss is {loss}); look for infinite or NaN values in the model or its inputs"
            )

        try:
            return self.optimizer.step(wrapped)
        finally:
            self.first_closure_call_this_step = True
            self._master_params_to_model_params()

    def _master_params_to_model_params(self) -> None:
        master_params_to_model_params(self.all_fp16_params, self.all_fp32_from_fp16_params)

    def __getstate__(self) -> NoReturn:
        raise RuntimeError("an FP16_Optimizer cannot be pickled; save its state_dict()")

    def __setstate__(self, state: Any) -> NoReturn:
        raise RuntimeError("an FP16_Optimizer cannot be unpickled; use load_state_dict()")

    def state_dict(self) -> dict[str, Any]:
        """Return everything besides the model that a run needs to continue: plain containers, numbers and tensors.

        As in torch.optim, tensors are not copied.
        """
        return {
            # Plain numbers, which `torch.load` reads without running code.
            "loss_scaler": {
                "loss_scale": self.loss_scale,
                "unskipped": self.loss_scaler._unskipped,
                "dynamic_loss_args": dict(self.dynamic_loss_args),
            },
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[master.detach() for master in group] for group in self.fp32_from_fp16_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, also from the original's checkpoints.

        Load the model first: its half-precision parameters are then overwritten with the saved masters' values.
        """
        saved_groups = state_dict["fp32_from_fp16"]
        _check_shapes(self.fp32_from_fp16_groups, saved_groups)
        dynamic = bool(state_dict["dynamic_loss_scale"])
        scaler, arguments = _load_scaler(state_dict["loss_scaler"], dynamic)
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.loss_scaler, self.dynamic_loss_args, self.dynamic_loss_scale = scaler, arguments, dynamic
        self.overflow = state_dict["overflow"]
        self.first_closure_call_this_step = state_dict["first_closure_call_this_step"]
        self._half_scale = self._full_scale = None
        with torch.no_grad():
            for master, value in zip(self.all_fp32_from_fp16_params, _joined(saved_groups), strict=True):
                master.copy_(value)
        self._master_params_to_model_params()

    @property
    def loss_scale(self) -> float:
        """Return the loss scale; it can be assigned to."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = checked_scale("loss_scale", value)

    state = delegated("optimizer", "state")
    # Gives access to learning rates and masters.
    param_groups = delegated("optimizer", "param_groups")


def _joined(groups: Iterable[Iterable[Tensor]]) -> list[Tensor]:
    return [tensor for group in groups for tensor in group]


def _gradients(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def _is_finite(loss: Any) -> bool:
    value = loss.detach() if isinstance(loss, Tensor) else loss
    return value is None or math.isfinite(value)


def _rescale(params: list[Tensor], current: float | None, target: float) -> float:
    """Multiply gradients of scale `current` so that they have scale `target`, and return `target`."""
    if current is not None and current != target:
        gradients = _gradients(params)
        if gradients:
            scale_tensors(gradients, gradients, target / current)
    return target


def _check_types(optimizer: Any) -> None:
    for index, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if param.requires_grad and param.dtype not in (*HALF, *_FULL):
                raise TypeError(
                    f"parameter {position} of group {index} is {param.dtype}; FP16_Optimizer takes float16, bfloat16, "
                    "float32 and float64"
                )


def _check_shapes(current: list[list[Tensor]], saved: list[list[Tensor]]) -> None:
    shapes = [[tuple(tensor.shape) for tensor in group] for group in current]
    saved_shapes = [[tuple(tensor.shape) for tensor in group] for group in saved]
    if shapes != saved_shapes:
        raise ValueError(
            f"the checkpoint has masters of shapes {saved_shapes}, this optimizer has {shapes}; it must be made "
            "from the same model, in the same precision"
        )


def _load_scaler(saved: Any, dynamic: bool) -> tuple[LossScaler, dict[str, Any]]:
    """Return a scaler in the saved state, and the arguments it was made with.

    The original pickles its whole scaler; such an object is accepted too.
    """
    numbers = saved if isinstance(saved, Mapping) else _numbers_of(saved)
    arguments = dict(numbers.get("dynamic_loss_args") or {})
    scale = float(numbers["loss_scale"])
    scaler = LossScaler("dynamic", **arguments) if dynamic else LossScaler(scale)
    scaler._loss_scale = scale
    scaler._unskipped = int(numbers["unskipped"])
    return scaler, arguments


def _numbers_of(pickled: Any) -> dict[str, Any]:
    # Unpickling fills the object's `__dict__` with the original's attributes, whatever properties the class has.
    attributes = vars(pickled)
    if "cur_scale" in attributes:  # a scaler of apex.fp16_utils, from checkpoints written before 2019
        since = attributes.get("cur_iter", 0) - attributes.get("last_overflow_iter", -1) - 1
        names = {"scale_factor": "scale_factor", "scale_window": "scale_window"}
        scale, unskipped = attributes["cur_scale"], since % attributes.get("scale_window", since + 1)
    else:
        names = {
            "scale_window": "_scale_seq_len",
            "min_loss_scale": "_min_loss_scale",
            "max_loss_scale": "_max_loss_scale",
        }
        scale, unskipped = attributes["_loss_scale"], attributes["_unskipped"]
    arguments = {name: attributes[source] for name, source in names.items() if source in attributes}
    return {"loss_scale": scale, "unskipped": unskipped, "dynamic_loss_args": arguments}
