"""The environment of a run: the device, its name and the versions of everything that affects times."""

from __future__ import annotations

import platform
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from .._installed import TRITON_DISTRIBUTIONS, installed_version


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU as the operating system reports it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return f"{platform.machine()} CPU"


def device_stem(name: str) -> str:
    """Return a device name as the beginning of a file name: "NVIDIA H200" -> "nvidia_h200"."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def describe(device: torch.device) -> dict[str, Any]:
    """Return device, versions and date for the head of a results file."""
    versions = {
        "apex": __version__,
        "torch": torch.__version__,
        "triton": installed_version(*TRITON_DISTRIBUTIONS),
        "python": platform.python_version(),
        "liger_kernel": installed_version("liger-kernel"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }
    return {
        "device": {"type": device.type, "name": device_name(device), "threads": torch.get_num_threads()},
        "versions": {name: str(version) for name, version in versions.items() if version is not None},
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
