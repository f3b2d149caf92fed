"""The devices of this machine, and the choice of one by name."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """A device with its properties; None for a property that PyTorch does not tell. Memory is in bytes."""

    device: str  # "cpu", "cuda:0", ...
    name: str
    memory: int | None = None
    multiprocessors: int | None = None
    threads: int | None = None
    problem: str | None = None


def list_devices() -> list[Device]:
    """Return the CPU and every accelerator that PyTorch can see, the CPU first."""
    cpu = Device("cpu", platform.processor() or platform.machine(), threads=torch.get_num_threads())
    return [cpu, *_gpus(), *_other_accelerators()]


def _gpus() -> list[Device]:
    if not torch.cuda.is_available():
        return []
    return [_gpu(index) for index in range(torch.cuda.device_count())]


def _gpu(index: int) -> Device:
    try:
        properties = torch.cuda.get_device_properties(index)
    except Exception as error:  # a GPU in a bad state is a fact to report
        return Device(f"cuda:{index}", "unknown", problem=f"{type(error).__name__}: {error}")
    return Device(f"cuda:{index}", properties.name, properties.total_memory, properties.multi_processor_count)


def _other_accelerators() -> list[Device]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type == "cuda":
        return []
    get_name = getattr(getattr(torch, accelerator.type, None), "get_device_name", None)
    devices = []
    for index in range(torch.accelerator.device_count()):
        device = f"{accelerator.type}:{index}"
        try:
            devices.append(Device(device, get_name(index) if get_name else accelerator.type))
        except Exception as error:  # a device in a bad state is a fact to report
            devices.append(Device(device, "unknown", problem=f"{type(error).__name__}: {error}"))
    return devices


def why_no_gpu() -> str | None:
    """Return the reason why PyTorch sees no accelerator, or None if it sees one."""
    if torch.accelerator.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return f"PyTorch {torch.__version__} is a build without CUDA or HIP"
    return f"PyTorch {torch.__version__} can use GPUs, but finds none here; is the driver installed and new enough?"


def pick_device(name: str | None) -> torch.device:
    """Return the device called `name`; without a name the first usable accelerator, or else the CPU.

    Raises a ValueError that lists the usable names if `name` is not one of them.
    """
    usable = [device.device for device in list_devices() if device.problem is None]
    if name is None:
        return torch.device(usable[min(1, len(usable) - 1)])
    available = f"available here: {', '.join(usable)}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"{name!r} is not the name of a device; {available}") from None
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, 0)
    if device.type != "cpu" and str(device) not in usable:
        reason = why_no_gpu()
        raise ValueError(f"there is no device {name!r}; {available}" + (f" ({reason})" if reason else ""))
    return device
