"""Wrappers of a model and of an optimizer, which `Booster.boost` returns."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ..amp._pretrained import SavePretrained
from ._optimizer_wrapper import OptimizerWrapper
from ._warnings import warn_user

__all__ = ["ModelWrapper", "OptimizerWrapper"]


class ModelWrapper(nn.Module):
    """A module around `module`, the model that the user made or another wrapper of it.

    It reads and writes attributes of `module`, except its own, and methods of `nn.Module` are those of `module`: they
    see the user's model and its layers, parameters, buffers and hooks, and their names there. `model.unwrap()` is the
    user's model.

    `masters` holds the float32 values of half-precision parameters, or is None: its `read()` returns them by parameter,
    and its `write(values)` sets them. `has_stages` is True if other processes have other pipeline stages.
    """

    masters: Any = None
    has_stages = False
    _is_boosted = True
    _optimizer: Any = None

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # The dicts themselves, in which torch.func.functional_call replaces tensors.
        vars(self).update(_parameters=module._parameters, _buffers=module._buffers)

    @property
    def optimizer(self) -> Any:
        """The optimizer that was boosted with the model; None if it no longer exists."""
        return None if self._optimizer is None else self._optimizer()

    @property
    def training(self) -> bool:
        """Whether the user's model is in training mode."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in vars(self).get("_modules", ()):  # not while the wrapper is made
            self.module.training = mode

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name in vars(self) or name in _OWN or "module" not in vars(self).get("_modules", ())
        (super().__setattr__ if is_own else functools.partial(setattr, self.module))(name, value)

    def __delattr__(self, name: str) -> None:
        (super().__delattr__ if name in vars(self) else functools.partial(delattr, self.module))(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})

    def __bool__(self) -> bool:
        return bool(self.module)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.module._apply(fn, recurse)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # __init__ has not set it yet
                raise
            if name in ("save_pretrained", "push_to_hub") and hasattr(unwrapped(self), name):
                return functools.partial(save_exact, self, name)
            return getattr(self.module, name)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no optimizer, so that nothing would keep its masters equal to its weights.
        if self.masters is not None:
            warn_user(
                "a copy or pickle of a boosted model has half-precision weights without the float32 masters: a slow "
                "moving average does not move in it. Save and average model.state_dict(), which has the float32 values"
            )
        return {name: value for name, value in vars(self).items() if name not in ("_optimizer", "masters")}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _slow_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: PyTorch calls this method while torch.jit.trace looks for layers, which are those of the user's."""
        raise RuntimeError(
            "torch.jit.trace does not trace boosted models: trace model.unwrap(), with the same weights, inside of "
            "torch.autocast(..., cache_enabled=False) if the result is to compute in half precision"
        )

    def _take_optimizer(self, optimizer: Any) -> None:
        """Prepare for gradients of the user's optimizer, which trains the model from now on."""
        if isinstance(self.module, ModelWrapper):
            self.module._take_optimizer(optimizer)

    def unwrap(self) -> nn.Module:
        """Return the module that the user made, which is inside of all wrappers."""
        return unwrapped(self)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return unwrapped(self).named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return unwrapped(self).named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state dict of the user's model, with the values of this process's float32 master weights."""
        state = unwrapped(self).state_dict(*args, **kwargs)
        masters = masters_of(self)
        if getattr(masters, "is_local", False) and not kwargs.get("keep_vars", False):
            _put_masters(unwrapped(self), state, kwargs.get("prefix", ""), masters.read())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of the user's model or of a boosted one into the model and its master weights."""
        result = unwrapped(self).load_state_dict(state_dict, *args, **kwargs)
        self._load_masters(state_dict, "")
        return result

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load this wrapper as a submodule, for which PyTorch calls this method instead of `load_state_dict`.

        PyTorch then loads `module` and expects its entries under attribute names, with the prefix "module.".
        """
        self._load_masters(state_dict, prefix)
        path, inner = prefix, self
        while isinstance(inner, _wrappers()):
            path, inner = f"{path}module.", inner.module
        own = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
        state_dict.update({path + name.removeprefix(prefix): value for name, value in own.items()})

    def _load_masters(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        masters = masters_of(self)
        if masters is not None:
            named = unwrapped(self).named_parameters(remove_duplicate=False)
            pairs = ((param, state_dict.get(prefix + name)) for name, param in named)
            masters.write(
                {param: value for param, value in pairs if isinstance(value, Tensor) and value.shape == param.shape}
            )


# Attributes that wrappers set on themselves.
_OWN = {"module", "masters", "has_stages", "training", "_optimizer", "_autocast", "_casts", "_copies"}
# What Python does with containers, and methods of nn.Module, that the wrapped module does itself.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "__contains__": operator.contains,
    "__delitem__": operator.delitem,
    "__getitem__": operator.getitem,
    "__iter__": iter,
    "__len__": len,
    "__setitem__": operator.setitem,
}
# fmt: off
_METHODS = (
    "add_module", "apply", "children", "compile", "eval", "extra_repr", "get_buffer", "get_parameter",
    "get_submodule", "modules", "named_children", "named_modules", "register_backward_hook", "register_buffer",
    "register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook", "register_load_state_dict_post_hook", "register_load_state_dict_pre_hook",
    "register_module", "register_parameter", "register_state_dict_post_hook", "register_state_dict_pre_hook",
    "set_submodule", "train", "_register_state_dict_hook", "_register_load_state_dict_pre_hook",
)
# fmt: on


def _calling(name: str) -> Callable[..., Any]:
    return lambda module, *args, **kwargs: getattr(module, name)(*args, **kwargs)


def _delegated_method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls a function with the wrapped module; it returns the wrapper if that returns itself."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self.module, *args, **kwargs)
        return self if result is self.module else result

    method.__name__ = name
    return functools.wraps(getattr(nn.Module, name))(method) if hasattr(nn.Module, name) else method


for _name, _function in _OPERATIONS.items():
    setattr(ModelWrapper, _name, _delegated_method(_name, _function))
for _name in _METHODS:
    if hasattr(nn.Module, _name):  # releases of PyTorch differ
        setattr(ModelWrapper, _name, _delegated_method(_name, _calling(_name)))


def _put_masters(model: nn.Module, state: dict[str, Any], prefix: str, exact: dict[Tensor, Tensor]) -> None:
    """Replace the entries of a state dict of the user's model by the float32 values of parameters."""
    for name, param in model.named_parameters(remove_duplicate=False):
        if param in exact and prefix + name in state:
            state[prefix + name] = exact[param]


def save_exact(
    model: nn.Module, method: str, *args: Any, exact: dict[Tensor, Tensor] | None = None, **kwargs: Any
) -> Any:
    """Call `save_pretrained` or `push_to_hub` of the user's model, which writes the float32 values of parameters.

    `exact` has these values; without it they are the master weights of this process.
    """
    inner, masters = unwrapped(model), masters_of(model)
    if exact is None and getattr(masters, "is_local", False):
        exact = masters.read()
    if not exact:
        return getattr(inner, method)(*args, **kwargs)
    hook = inner.register_state_dict_post_hook(
        lambda module, state, prefix, _: _put_masters(module, state, prefix, exact)
    )
    own = vars(inner).get("save_pretrained")
    vars(inner)["save_pretrained"] = SavePretrained(inner)  # push_to_hub calls it
    try:
        return getattr(inner, method)(*args, **kwargs)
    finally:
        hook.remove()
        del vars(inner)["save_pretrained"]
        if own is not None:
            vars(inner)["save_pretrained"] = own


def masters_of(model: Any) -> Any:
    """Return the holder of a boosted model's float32 master weights, or None if it has none."""
    for wrapper in (model, *getattr(model, "chunks", ())):
        while isinstance(wrapper, nn.Module):
            if vars(wrapper).get("masters") is not None:
                return vars(wrapper)["masters"]
            wrapper = getattr(wrapper, "module", None)
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


def is_replicated(model: nn.Module) -> bool:
    """Return whether a model is, or has inside, torch's or apex's DistributedDataParallel."""
    from ..transformer.pipeline_parallel.utils import REPLICATED

    return any(isinstance(module, REPLICATED) for module in model.modules())


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
