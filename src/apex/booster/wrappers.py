"""What `Booster.boost` returns: a model and an optimizer around those that it was given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._delegation import delegated
from ._norm import total_norm

__all__ = ["ModelWrapper", "OptimizerWrapper"]


class ModelWrapper(nn.Module):
    """A module around `module`, the model that the user made or another wrapper of it.

    Attributes that the wrapper lacks are looked up in `module`. Parameters, buffers and entries of state dicts have the
    names that they have in the user's model.

    `masters` keeps float32 values of parameters that are in half precision, or is None: its `read()` returns them by
    parameter, and its `write(values)` sets them. `has_stages` says that other processes have other pipeline stages.
    """

    masters: Any = None
    has_stages = False
    _optimizer: Any = None

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @property
    def optimizer(self) -> Any:
        """The optimizer that was boosted with the model, while it lives."""
        return None if self._optimizer is None else self._optimizer()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not there yet
                raise
            return getattr(self.module, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_optimizer"}  # a weak reference

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def unwrap(self) -> nn.Module:
        """Return the module that the user made, which is inside of all wrappers."""
        return unwrapped(self)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        named = unwrapped(self).named_parameters if recurse else super().named_parameters
        return named(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        named = unwrapped(self).named_buffers if recurse else super().named_buffers
        return named(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state dict of the user's model, with float32 values where this process has master weights."""
        state = unwrapped(self).state_dict(*args, **kwargs)
        masters = masters_of(self)
        if getattr(masters, "is_local", False) and not kwargs.get("keep_vars", False):
            prefix, exact = kwargs.get("prefix", ""), masters.read()
            for name, param in unwrapped(self).named_parameters(remove_duplicate=False):
                if param in exact and prefix + name in state:
                    state[prefix + name] = exact[param]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of the user's model, or of any other boosted model; master weights get its values too."""
        found = unwrapped(self).load_state_dict(state_dict, *args, **kwargs)
        self._load_masters(state_dict, "")
        return found

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load this wrapper as a part of another module, where PyTorch calls no `load_state_dict` of parts.

        PyTorch loads `module` next, and expects its entries under the names that attributes give them.
        """
        self._load_masters(state_dict, prefix)
        path, inner = prefix, self
        while isinstance(inner, _wrappers()):
            path, inner = f"{path}module.", inner.module
        own = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
        state_dict.update({path + name.removeprefix(prefix): value for name, value in own.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _load_masters(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        masters = masters_of(self)
        if masters is not None:
            named = unwrapped(self).named_parameters(remove_duplicate=False)
            pairs = ((param, state_dict.get(prefix + name)) for name, param in named)
            masters.write(
                {param: value for param, value in pairs if isinstance(value, Tensor) and value.shape == param.shape}
            )


def masters_of(model: Any) -> Any:
    """Return what keeps float32 values of the parameters of a boosted model; None if they are not in half precision."""
    for each in (model, *getattr(model, "chunks", ())):
        while isinstance(each, nn.Module):
            if vars(each).get("masters") is not None:
                return vars(each)["masters"]
            each = getattr(each, "module", None)
    return None


def _wrappers() -> Any:
    """Return the classes of wrappers: this package's, and torch's and apex's DistributedDataParallel."""
    from ..transformer.pipeline_parallel.utils import REPLICATED

    return (ModelWrapper, *REPLICATED)


def unwrapped(model: Any) -> Any:
    """Return the module inside of wrappers of this package, and of torch's and apex's DistributedDataParallel."""
    kinds = _wrappers()
    while isinstance(model, kinds):
        model = model.module
    return model


def check_boosted(optimizer: Any) -> None:
    """Raise unless `optimizer` is one that `boost` returned."""
    if not callable(getattr(optimizer, "backward", None)):
        raise TypeError(
            f"optimizer must be the one that booster.boost(model, optimizer) returned, not {_kind(optimizer)}"
        )


def check_model(model: Any) -> None:
    """Raise unless `model` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {_kind(model)}")


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


class OptimizerWrapper(torch.optim.Optimizer):
    """An optimizer around `optim` that also takes backward passes, clips and measures gradients.

    Parameter groups, state, defaults and all attributes that are not found here are those of `optim`. If `max_norm` is
    positive, every step clips gradients to it. `has_stages` says that other processes have other pipeline stages.
    """

    optim: Any
    max_norm: float = 0.0
    has_stages = False
    # The names of parameters in the model, in their order, where they are known.
    names: list[str | None] | None = None
    # What is to be done to the gradients of a split model before a step, and how their norm is measured.
    finalize: Callable[[], None] | None = None
    measure: Callable[[float], Tensor] | None = None

    def __init__(self, optim: torch.optim.Optimizer) -> None:  # no state of its own: PyTorch's constructor is not run
        self.optim = optim
        # A scheduler that was made on an optimizer from before boosting asks it whether a step has been taken.
        self.watched: list[Any] = [optim]
        self._is_unscaled = False
        # The norms of the gradients of the next step, once it is measured, and of the last one.
        self._next_norm: Tensor | None = None
        self._last_norm: Tensor | None = None

    param_groups = delegated("optim", "param_groups")
    state = delegated("optim", "state")
    defaults = delegated("optim", "defaults")

    def __getattr__(self, name: str) -> Any:
        if name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"

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
        """A backward pass from the scaled loss; arguments are those of `Tensor.backward`."""
        with self._held():
            self.scale_loss(loss).backward(inputs=inputs, retain_graph=retain_graph, **kwargs)

    def _held(self) -> contextlib.AbstractContextManager[None]:
        """Where something is left to do to gradients, ZeRO does not take them before that is done."""
        return self.no_sync() if self.finalize is not None else contextlib.nullcontext()

    def backward_by_grad(self, tensor: Tensor, grad: Tensor, inputs: Any = None, retain_graph: bool = False) -> None:
        """A backward pass from the gradient of a tensor, which is scaled already."""
        with self._held():
            torch.autograd.backward(tensor, grad, inputs=inputs, retain_graph=retain_graph)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, where there is one."""
        return loss

    def unscale_grad(self) -> None:
        """Divides gradients by the loss scale, where there is one, unless that has been done since the last step."""
        if not self._is_unscaled:
            self._is_unscaled = True
            if self.finalize is not None:
                self.finalize()
            self._unscale()

    def _unscale(self) -> None:
        pass

    @property
    def _is_zero(self) -> bool:
        """Whether gradients are divided among processes by the optimizer, and not in `param.grad`."""
        return bool(getattr(self.optim, "_takes_gradients", False))

    def clip_grad_by_value(self, clip_value: float, *args: Any, **kwargs: Any) -> None:
        """Clips every element of the unscaled gradients to at most `clip_value` on either side of zero."""
        self.unscale_grad()
        if self._is_zero:
            raise NotImplementedError(
                "clip_grad_by_value is not there for ZeRO, whose gradients are divided among processes; use "
                "clip_grad_by_norm"
            )
        torch.nn.utils.clip_grad_value_(self.parameters, clip_value, *args, **kwargs)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, **kwargs: Any
    ) -> Tensor:
        """Scale the unscaled gradients so that their norm is at most `max_norm`; return the norm before."""
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

        The norm is over all processes that hold parts of the gradients. None before the first step. The call changes
        nothing, so it may come at any time; it waits for the device. `clip_grad_by_norm` returns other norms.
        """
        if norm_type != 2.0:
            raise ValueError(f"norm_type={norm_type} is not kept from step to step; 2 is")
        return None if self._last_norm is None else self._last_norm.item()

    def _grad_norm(self, norm_type: float) -> Tensor:
        """Measure the unscaled gradients."""
        self.unscale_grad()
        if self.measure is not None:
            return self.measure(norm_type)
        if self._is_zero:
            return self.optim.grad_norm(norm_type=norm_type)
        return total_norm(self._gradients(), norm_type)

    def _gradients(self) -> list[Tensor]:
        """Return the gradients that a step reads; for sparse ones, the values that are not zero."""
        found = []
        for param in self.parameters:
            if param.grad is not None:
                if param.grad.layout == torch.sparse_coo:
                    param.grad = param.grad.coalesce()  # an element may be there several times
                    found.append(param.grad.values())
                else:
                    found.append(param.grad)
        return found

    def _scale_grads(self, factor: Tensor) -> None:
        if self._is_zero:
            self.optim._norms.scale_by(factor)
            return
        for gradient in self._gradients():
            gradient.detach().mul_(factor.to(gradient.device))

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Take a step of the optimizer inside, after clipping to `max_norm` if that is positive."""
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
        for each in self.watched:
            each._opt_called = True
        return result

    def _prepare_step(self) -> None:
        """Unscale, measure and clip the gradients of a step."""
        self.unscale_grad()
        if self.max_norm > 0:
            self.clip_grad_by_norm(self.max_norm)
        elif self._next_norm is None:
            self._next_norm = self._grad_norm(2.0)

    def _step(self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        return self.optim.step(*((closure, *args) if closure is not None or args else ()), **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self._is_unscaled, self._next_norm = False, None
        self.optim.zero_grad(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes inside are not exchanged, where the optimizer does that (ZeRO)."""
        with self.optim.no_sync() if self._is_zero else contextlib.nullcontext():
            yield

    def scaler_state(self) -> dict[str, Any]:
        """The loss scale and what it depends on; empty where there is none."""
        return {}

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        """Goes on with what `scaler_state` gave."""

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the optimizer inside, and the loss scale, where there is one, as "scaler"."""
        found = self.optim.state_dict()
        scaler = self.scaler_state()
        return {**found, "scaler": scaler} if scaler else found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave, or an optimizer without a loss scale."""
        state_dict = dict(state_dict)
        scaler = state_dict.pop("scaler", None)
        self.optim.load_state_dict(state_dict)
        if scaler:
            self.load_scaler_state(scaler)

    def unwrap(self) -> Any:
        """The optimizer inside of all wrappers."""
        inner = self.optim
        return inner.unwrap() if isinstance(inner, OptimizerWrapper) else inner
