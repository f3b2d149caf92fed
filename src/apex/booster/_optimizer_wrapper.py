"""The wrapper of an optimizer, which `Booster.boost` returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._delegation import delegated
from .._distributed.comparison import check_settings, optimizer_settings
from .._distributed.experts import scaled_router_losses
from .._distributed.norms import total_norm
from ..amp._checks import check_loss

__all__ = ["OptimizerWrapper"]


def _exclude_from_compilation(cls: Any) -> None:
    """Let methods of a boosted optimizer run as they are where a training step is compiled as a whole."""
    for name in ("backward", "backward_by_grad", "unscale_grad", "clip_grad_by_value", "clip_grad_by_norm", "step",
                 "zero_grad"):  # fmt: skip
        if name in vars(cls):  # torch.compiler.disable would import the compiler here: 1.8 s
            setattr(cls, name, torch._disable_dynamo(vars(cls)[name]))


class OptimizerWrapper(torch.optim.Optimizer):
    """An optimizer around `optim` that also runs backward passes, and clips and measures gradients.

    Parameter groups, state, defaults and all other attributes are taken from `optim`. If `max_norm` is positive, every
    step clips gradients to it. `has_stages` is True if other processes have other pipeline stages.
    """

    optim: Any
    max_norm: float = 0.0
    # Whether steps without clipping measure the norm of gradients for `get_grad_norm`: one pass over them.
    measures_norm = True
    has_stages = False
    # Names of the parameters in the model, in the order of `parameters`; None for unknown ones.
    names: list[str | None] | None = None
    # Process groups whose members compare their settings in the first step.
    compared_over: Sequence[Any] = ()
    # For split models: a function that completes gradients before a step, and one that returns their norm.
    finalize: Callable[[], None] | None = None
    measure: Callable[[float], Tensor] | None = None
    # For the losses of routers: a function that returns the loss scale.
    _loss_scale: Callable[[], Tensor] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _exclude_from_compilation(cls)

    def __init__(self, optim: torch.optim.Optimizer) -> None:  # PyTorch's constructor is not called: no state is needed
        self.optim = optim
        # Optimizers to mark as stepped, because schedulers that were made on them check it.
        self.watched: list[Any] = [optim]
        self._is_unscaled = False
        self._next_norm: Tensor | None = None  # of the next step's gradients, once it is measured
        self._last_norm: Tensor | None = None  # of the last step's gradients

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return False: a torch.amp.GradScaler must unscale gradients, because `optim` does not see its scale."""
        return False

    param_groups = delegated("optim", "param_groups")
    state = delegated("optim", "state")
    defaults = delegated("optim", "defaults")

    def __getattr__(self, name: str) -> Any:
        if name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a boosted optimizer is not copied or pickled, because its parameters are those of the boosted model: save "
            "and load its state_dict(), or copy model and optimizer before boost"
        )

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters, group by group."""
        return [param for group in self.param_groups for param in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        before = len(self.parameters)
        self.optim.add_param_group(param_group)
        if self.names is not None:
            self.names += [None] * (len(self.parameters) - before)

    def backward(self, loss: Tensor, inputs: Any = None, retain_graph: bool = False, **kwargs: Any) -> None:
        """Run a backward pass from the scaled loss; the other arguments go to `Tensor.backward`."""
        if not isinstance(loss, Tensor):
            check_loss(loss)  # raises
        with self._held():
            self.scale_loss(loss).backward(inputs=inputs, retain_graph=retain_graph, **kwargs)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Scale router losses in backward passes inside; ZeRO takes gradients only after `finalize`, if that is set."""
        with (
            self.no_sync() if self.finalize is not None else contextlib.nullcontext(),
            scaled_router_losses(self._loss_scale),
        ):
            yield

    def backward_by_grad(self, tensor: Tensor, grad: Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        """Run a backward pass from the gradient of a tensor, which is already scaled."""
        with self._held():
            torch.autograd.backward(tensor, grad, inputs=inputs, retain_graph=retain_graph)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, if there is one."""
        return loss

    def trace_overflow(self, model: nn.Module, after_skips: int | None = None) -> Any:
        """Make messages about skipped steps name a module of the boosted model: see `apex.amp.trace_overflow`."""
        raise RuntimeError("trace_overflow needs a loss scale, because no step is skipped without one")

    def unscale_grad(self) -> None:
        """Divide gradients by the loss scale, if there is one; do it once per step."""
        if not self._is_unscaled:
            self._is_unscaled = True
            if self.finalize is not None:
                self.finalize()
            self._unscale()

    def _unscale(self) -> None:
        pass

    @property
    def _is_zero(self) -> bool:
        """Whether the optimizer is a ZeRO optimizer, which takes gradients out of `param.grad` and divides them."""
        return bool(getattr(self.optim, "_takes_gradients", False))

    def clip_grad_by_value(self, clip_value: float, *args: Any, **kwargs: Any) -> None:
        """Clip every element of the unscaled gradients to the range from -clip_value to clip_value."""
        self.unscale_grad()
        if self._is_zero:
            raise NotImplementedError(
                "clip_grad_by_value is not supported by ZeRO, whose gradients are divided among processes; use "
                "clip_grad_by_norm"
            )
        torch.nn.utils.clip_grad_value_(self.parameters, clip_value, *args, **kwargs)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, **kwargs: Any
    ) -> Tensor:
        """Clip the unscaled gradients to a norm of at most `max_norm`; return their norm before."""
        if not max_norm >= 0:  # also NaN
            raise ValueError(f"max_norm must be a number of at least 0, not {max_norm}")
        norm = self._grad_norm(norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {norm.item()}, and cannot be clipped"
            )
        if norm_type == 2.0 and self._next_norm is None:
            self._next_norm = norm
        self._scale_grads(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def get_grad_norm(self, norm_type: float = 2.0, **kwargs: Any) -> float | None:
        """Return the 2-norm of the last step's gradients, unscaled and before `clip_grad_by_norm`.

        The norm covers all processes that hold parts of the gradients. It is None before the first step, and if
        `measures_norm` is False and gradients were not clipped. The call changes nothing and waits for the device. For
        another `norm_type` use `clip_grad_by_norm`.
        """
        if norm_type != 2.0:
            raise ValueError(f"norm_type={norm_type} is not kept from step to step; 2 is")
        return None if self._last_norm is None else self._last_norm.item()

    def _grad_norm(self, norm_type: float) -> Tensor:
        """Return the norm of the unscaled gradients."""
        self.unscale_grad()
        if self.measure is not None:
            return self.measure(norm_type)
        if self._is_zero:
            return self.optim.grad_norm(norm_type=norm_type)
        return total_norm(self._gradients(), norm_type)

    def _gradients(self) -> list[Tensor]:
        """Return the gradients that a step reads; for a sparse gradient, the tensor of its values."""
        gradients = []
        for param in self.parameters:
            if param.grad is not None:
                if param.grad.layout == torch.sparse_coo:
                    param.grad = param.grad.coalesce()  # sums repeated elements
                    gradients.append(param.grad.values())
                else:
                    gradients.append(param.grad)
        return gradients

    def _scale_grads(self, factor: Tensor) -> None:
        if self._is_zero:
            self.optim._norms.scale_by(factor)
            return
        for gradient in self._gradients():
            gradient.detach().mul_(factor.to(gradient.device))

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Step the wrapped optimizer, after clipping to `max_norm` if that is positive.

        The first step raises in all processes if their learning rates, other options or loss scales differ.
        """
        if closure is None:
            self._prepare_step()
            result = self._step(None, *args, **kwargs)
        else:

            def prepared() -> Any:
                loss = closure()
                self._prepare_step()
                return loss

            result = self._step(prepared, *args, **kwargs)
        self._last_norm, self._next_norm = self._next_norm, None
        self._is_unscaled = False
        for optimizer in self.watched:
            optimizer._opt_called = True
        return result

    def _prepare_step(self) -> None:
        """Unscale, measure and clip the gradients of a step; the first step compares settings of all processes."""
        self.unscale_grad()
        if self.max_norm > 0:
            self.clip_grad_by_norm(self.max_norm)
        elif self._next_norm is None and self.measures_norm:
            self._next_norm = self._grad_norm(2.0)
        self._compare_settings()

    def _compare_settings(self) -> None:
        """Compare settings with other processes in the first call; do nothing in later calls."""
        groups, self.compared_over = self.compared_over, ()
        if groups and self._is_zero:
            self.optim.grad_sync()  # completes collectives of gradients first: ranks may be at different ones
        for group in groups:
            settings = {"max_norm": self.max_norm, **optimizer_settings(self)}
            settings |= {
                f"number of parameters of group {number}": len(param_group["params"])
                for number, param_group in enumerate(self.param_groups)
            }
            settings |= {f"{name} of the loss scale": value for name, value in self.scaler_state().items()}
            check_settings(settings, "settings of optimizers", group, self.parameters)

    def _step(self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        return self.optim.step(*((closure, *args) if closure is not None or args else ()), **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self._is_unscaled, self._next_norm = False, None
        self.optim.zero_grad(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of backward passes in the block; a ZeRO optimizer does not exchange them."""
        with self.optim.no_sync() if self._is_zero else contextlib.nullcontext():
            yield

    def scaler_state(self) -> dict[str, Any]:
        """Return the state of the loss scaler; empty without a loss scale."""
        return {}

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        """Load a state from `scaler_state`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped optimizer, with the loss scaler's state, if any, as "scaler"."""
        state = self.optim.state_dict()
        scaler = self.scaler_state()
        return {**state, "scaler": scaler} if scaler else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of `state_dict`, or of an optimizer without a loss scale."""
        state_dict = dict(state_dict)
        scaler = state_dict.pop("scaler", None)
        self.optim.load_state_dict(state_dict)
        if scaler:
            self.load_scaler_state(scaler)

    def unwrap(self) -> Any:
        """Return the optimizer inside of all wrappers."""
        inner = self.optim
        return inner.unwrap() if isinstance(inner, OptimizerWrapper) else inner


_exclude_from_compilation(OptimizerWrapper)
