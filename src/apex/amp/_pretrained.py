"""`save_pretrained` of Hugging Face models whose state dicts amp keeps in float32.

transformers writes the dtype of a model's first parameter to config.json, next to the tensors of `state_dict()`. Under
amp the parameter is in half precision and the tensors are float32. `from_pretrained` gives the model the dtype in
config.json, which would round the tensors.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ._amp_state import HALF

_METHOD = "save_pretrained"


class SavePretrained:
    """The `save_pretrained` of a module under amp: while it runs, `parameters()` has the saved tensors' dtypes.

    The module is not kept alive. Copies of it (`copy.deepcopy`, pickle) save their own weights.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Return the method without amp; `inspect.signature` reads it."""
        return getattr(type(self.module()), _METHOD).__get__(self.module())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module()
        state = inspect.signature(self).bind(*args, **kwargs).arguments.get("state_dict")
        vars(module)["parameters"] = lambda recurse=True: _as_saved(module, state, recurse)
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            del vars(module)["parameters"]

    def __reduce__(self) -> Any:
        return SavePretrained, (self.module(),)


def _as_saved(module: nn.Module, state: Mapping[str, Any] | None, recurse: bool) -> Iterator[Tensor]:
    """Yield the parameters of a module, or a tensor of the saved dtype and the same shape if that differs."""
    for name, parameter in module.named_parameters(recurse=recurse):
        if state is None:
            dtype = torch.float32 if parameter.dtype in HALF else parameter.dtype
        else:
            dtype = getattr(state.get(name), "dtype", parameter.dtype)
        yield parameter if dtype == parameter.dtype else parameter.new_empty((), dtype=dtype).expand(parameter.shape)


def save_dtypes_of_state_dict(model: nn.Module) -> None:
    """Replace the `save_pretrained` of a model, and of every module in it that has one."""
    for module in model.modules():
        if hasattr(type(module), _METHOD) and _METHOD not in vars(module):
            vars(module)[_METHOD] = SavePretrained(module)


def save_dtypes_of_parameters(model: nn.Module) -> None:
    """Undo `save_dtypes_of_state_dict`."""
    for module in model.modules():
        if isinstance(vars(module).get(_METHOD), SavePretrained):
            del vars(module)[_METHOD]
