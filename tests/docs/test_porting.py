"""What docs/porting.md says of packages that are missing is so."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/porting.md"


def test_what_is_not_here_yet() -> None:
    text = PAGE.read_text()
    paragraph = next(part for part in text.split("\n\n") if part.startswith("What is not here yet"))
    names = re.findall(r"`(?:import )?(?:apex\.contrib\.)?(\w+)`", paragraph.partition("of `apex.transformer`")[0])
    missing = sorted(set(names) - {"ModuleNotFoundError", "ImportError"})
    assert missing == ["bottleneck", "gpu_direct_storage", "nccl_allocator", "peer_memory"]
    for name in missing:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"apex.contrib.{name}")
    with pytest.raises(ImportError):
        from apex.contrib import bottleneck  # noqa: F401
