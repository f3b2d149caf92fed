"""The default device: that of new parameters, however the user has set it."""

from __future__ import annotations

import pytest
import torch

from apex.ops._host import default_device


def test_the_default_device_is_that_of_new_parameters() -> None:
    assert default_device() == torch.device("cpu")
    with torch.device("meta"):
        assert default_device() == torch.device("meta")
    try:
        for device in ("meta", None):
            torch.set_default_device(device)
            assert default_device() == torch.device(device or "cpu")
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert default_device() == torch.device("cpu")
    finally:
        torch.set_default_dtype(before)
