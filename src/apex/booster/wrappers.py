"""What `Booster.boost` returns: a model and an optimizer around those that it was given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._delegation import delegated
from .._distributed.comparison import check_settings, optimizer_settings

__all__ = ["ModelWrapper", "OptimizerWrapper"]


class ModelWrapper(nn.Module):
    """A module around `module`; what it has not itself is looked up there, but for parameters' names in state dicts.

    `masters`, where there is one, keeps float32 values of parameters that are in half precision: its `read()` gives
    them by parameter, and its `write(values)` sets them.
    """

    masters: Any = None
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def unwrap(self) -> nn.Module:
        """The module that the user made, inside of all wrappers."""
        return unwrapped(self)


def unwrapped(model: Any) -> Any:
    """A module inside of wrappers of this package, of torch's and apex's DistributedDataParallel."""
    from ..transformer.pipeline_parallel.utils import REPLICATED

    kinds: Any = (ModelWrapper, *REPLICATED)
    while isinstance(model, kinds):
        model = model.module
    return model


class OptimizerWrapper(torch.optim.Optimizer):
    """An optimizer around `optim` that also takes backward passes, clips and measures gradients.

    Parameter groups, state and defaults are those of `optim`, and so is whatever else is not found here. `max_norm`,
    where it is positive, is what every step clips gradients to.
    """

    optim: Any
    max_norm: float = 0.0
    # The names of parameters in the model, in their order, where they are known.
    names: list[str | None] | None = None
    # Process groups over which the first step compares settings, if there are several processes.
    compared_over: Sequence[Any] = ()
    # What is to be done to the gradients of a split model before a step, and how their norm is measured.
    finalize: Callable[[], None] | None = None
    measure: Callable[[float], Tensor] | None = None

    def __init__(self, optim: torch.optim.Optimizer) -> None:  # no state of its own: PyTorch's constructor is not run
        self.optim = optim
        # A scheduler that was made on an optimizer from before boosting asks it whether a step has been taken.
        self.watched: list[Any] = [optim]
        self._is_unscaled = False

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
        """Scales the unscaled gradients so that their norm is at most `max_norm`; returns the norm before."""
        norm = self._grad_norm(norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {norm.item()}, and cannot be clipped"
            )
        self._scale_grads(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def get_grad_norm(self, norm_type: float = 2.0, **kwargs: Any) -> float:
        """The norm of the unscaled gradients, over all processes that hold parts of them."""
        return self._grad_norm(norm_type).item()

    def _grad_norm(self, norm_type: float) -> Tensor:
        self.unscale_grad()
        if self.measure is not None:
            return self.measure(norm_type)
        if self._is_zero:
            return self.optim.grad_norm(norm_type=norm_type)
        gradients = [param.grad for param in self.parameters if param.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def _scale_grads(self, factor: Tensor) -> None:
        if self._is_zero:
            self.optim._norms.scale_by(factor)
            return
        gradients = [param.grad for param in self.parameters if param.grad is not None]
        for gradient in gradients:
            gradient.detach().mul_(factor.to(gradient.device))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step of the optimizer inside, after clipping to `max_norm` if that was asked for.

        The first step raises in all processes if their learning rates, other options or loss scales differ.
        """
        if self.max_norm > 0:
            self.clip_grad_by_norm(self.max_norm)
        self.unscale_grad()
        self._compare_settings()
        result = self._step(*args, **kwargs)
        self._is_unscaled = False
        for each in self.watched:
            each._opt_called = True
        return result

    def _compare_settings(self) -> None:
        """Compare settings with other processes, once."""
        groups, self.compared_over = self.compared_over, ()
        if groups and self._is_zero:
            self.optim.grad_sync()  # processes that lack gradients send them late: from here on all are at one place
        for group in groups:
            settings = {"max_norm": self.max_norm, **optimizer_settings(self)}
            settings |= {
                f"number of parameters of group {number}": len(each["params"])
                for number, each in enumerate(self.param_groups)
            }
            settings |= {f"{name} of the loss scale": value for name, value in self.scaler_state().items()}
            check_settings(settings, "settings of optimizers", group, self.parameters)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        return self.optim.step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self._is_unscaled = False
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
