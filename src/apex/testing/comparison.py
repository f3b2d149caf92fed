"""Comparisons of Colossal-AI's tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close as assert_close


def assert_equal(a: Tensor, b: Tensor) -> None:
    """Raise unless all elements are equal."""
    assert torch.all(a == b), f"expected a and b to be equal but they are not, {a} vs {b}"


def assert_not_equal(a: Tensor, b: Tensor) -> None:
    """Raise if all elements are equal."""
    assert not torch.all(a == b), f"expected a and b to be not equal but they are, {a} vs {b}"


def assert_close_loose(a: Tensor, b: Tensor, rtol: float = 1e-3, atol: float = 1e-3) -> None:
    """Raise unless tensors are close; the bounds are loose."""
    assert_close(a, b, rtol=rtol, atol=atol)


def assert_equal_in_group(tensor: Tensor, process_group: Any = None) -> None:
    """Raise unless all processes of a group have the same tensor; all must call it."""
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(found, tensor.contiguous(), group=process_group)
    for rank, other in enumerate(found):
        assert torch.equal(other, found[0]), f"the tensors of ranks 0 and {rank} differ: {found[0]} vs {other}"


def check_state_dict_equal(d1: Any, d2: Any, ignore_device: bool = True, ignore_dtype: bool = False) -> None:
    """Raise unless nested dicts and lists have the same keys and close tensors; other values must be equal."""
    if isinstance(d1, Mapping):
        same = isinstance(d2, Mapping) and d1.keys() == d2.keys()
        assert same, f"the keys differ: {list(d1)} vs {list(d2)}"
        for key, value in d1.items():
            check_state_dict_equal(value, d2[key], ignore_device, ignore_dtype)
    elif isinstance(d1, (list, tuple)):
        same = isinstance(d2, type(d1)) and len(d1) == len(d2)
        assert same, f"{d1} is not equal to {d2}"
        for one, other in zip(d1, d2, strict=True):
            check_state_dict_equal(one, other, ignore_device, ignore_dtype)
    elif isinstance(d1, Tensor):
        assert isinstance(d2, Tensor), f"a tensor is not equal to {d2}"
        d1 = d1.to(d2.device if ignore_device else d1.device, d2.dtype if ignore_dtype else d1.dtype)
        assert_close_loose(d1, d2)
    else:
        assert d1 == d2, f"{d1} is not equal to {d2}"


def assert_hf_output_close(
    out1: Any,
    out2: Any,
    ignore_keys: list[str] | None = None,
    track_name: str = "",
    atol: float = 1e-5,
    rtol: float = 1e-5,
) -> None:
    """Raise unless outputs of two models, nested dicts, lists and tensors, are close, except for `ignore_keys`."""
    options = {"ignore_keys": ignore_keys, "atol": atol, "rtol": rtol}
    if isinstance(out1, Mapping) and isinstance(out2, Mapping):
        assert out1.keys() == out2.keys(), f"{track_name}: the keys differ: {list(out1)} vs {list(out2)}"
        for key in (key for key in out1 if key not in (ignore_keys or ())):
            assert_hf_output_close(out1[key], out2[key], track_name=f"{track_name}.{key}", **options)  # type: ignore[arg-type]
    elif isinstance(out1, (list, tuple)) and isinstance(out2, (list, tuple)):
        assert len(out1) == len(out2), f"{track_name}: the lengths differ"
        for index, (one, other) in enumerate(zip(out1, out2, strict=True)):
            assert_hf_output_close(one, other, track_name=f"{track_name}.{index}", **options)  # type: ignore[arg-type]
    elif isinstance(out1, Tensor) and isinstance(out2, Tensor):
        assert_close(out1, out2, atol=atol, rtol=rtol, msg=lambda text: f"{track_name}: {text}")
    else:
        assert out1 == out2, f"{track_name}: {out1} vs {out2}"
