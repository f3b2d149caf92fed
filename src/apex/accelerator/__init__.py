"""Colossal-AI's accelerator object: functions of the present device that also work without an accelerator."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ..ops._host import HOST

__all__ = ["BaseAccelerator", "auto_set_accelerator", "get_accelerator", "set_accelerator"]

# Functions of torch.cuda and its siblings that the host lacks, with the value that they return there.
_ON_HOST: dict[str, Any] = {
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
    **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached")),
    **dict.fromkeys(("empty_cache", "set_per_process_memory_fraction", "set_device", "ipc_collect")),
    "memory_stats": {},
    "memory_summary": "",
    "memory_snapshot": [],
    "utilization": 0,
}


class BaseAccelerator:
    """The accelerator of this process, or its host if there is none.

    Attributes that are not defined here are functions of the device's module, such as `torch.cuda`. On a host, numbers
    of bytes are 0, and functions that change the device do nothing.
    """

    @property
    def name(self) -> str:
        """The type of the device, for example "cuda"."""
        return self._type().type

    @property
    def communication_backend(self) -> str:
        """The name of the backend of torch.distributed for this device."""
        return torch.distributed.get_default_backend_for_device(self._type())

    @property
    def is_synchronous(self) -> bool:
        """Whether operations have ended when a call returns."""
        return self._type() == HOST

    def is_available(self) -> bool:
        """Return True: without an accelerator the host is the device."""
        return True

    def get_current_device(self) -> torch.device:
        """Return the present device."""
        device = self._type()
        return device if device == HOST else torch.device(device.type, torch.accelerator.current_device_index())

    def current_device(self) -> int:
        """Return the index of the present device; 0 for a host."""
        return self.get_current_device().index or 0

    def device_count(self) -> int:
        """Return the number of devices; 1 for a host."""
        return 1 if self._type() == HOST else torch.accelerator.device_count()

    def set_to_device(self, models: Any) -> Any:
        """Move a model, or each model of a list, to the present device."""
        if isinstance(models, list) and len(models) > 1:
            return [model.to(self.get_current_device()) for model in models]
        return (models[0] if isinstance(models, list) else models).to(self.get_current_device())

    def get_version(self) -> str:
        """Return the version of the device's libraries, or of PyTorch without an accelerator."""
        return str(getattr(torch.version, self.name, None) or torch.__version__)

    def synchronize(self, device: Any = None) -> None:
        """Wait until the device has finished."""
        if not self.is_synchronous:
            torch.accelerator.synchronize(device)

    def manual_seed(self, seed: int) -> None:
        """Seed the random numbers of all devices."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def autocast(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> Any:
        """Return a context of autocast for this device."""
        return torch.autocast(self.name, enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)

    def stream(self, stream_: Any) -> Any:
        """Return a context that sends operations to a stream; on a host it does nothing."""
        return contextlib.nullcontext() if self.is_synchronous else torch.get_device_module(self.name).stream(stream_)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module = torch.get_device_module(self._type())
        if name in _ON_HOST and not hasattr(module, name):
            return lambda *args, **kwargs: _ON_HOST[name]
        for owner in (module, torch):  # torch has the host's generator: get_rng_state, initial_seed, ...
            if hasattr(owner, name):
                return getattr(owner, name)
        raise AttributeError(f"the device {self.name} has no function {name}")

    @staticmethod
    def _type() -> torch.device:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return device or HOST


_ACCELERATOR = BaseAccelerator()


def get_accelerator() -> BaseAccelerator:
    """Return the accelerator of this process."""
    return _ACCELERATOR


def set_accelerator(accelerator: Any) -> None:
    """Accept the name of the current device; raise for other names, because PyTorch chooses the accelerator."""
    name = getattr(accelerator, "name", accelerator)
    if name != _ACCELERATOR.name:
        raise ValueError(f"accelerator={name!r} is not the device of this process, which is {_ACCELERATOR.name!r}")


def auto_set_accelerator() -> None:
    """Do nothing: the accelerator is always PyTorch's."""
