"""Comparisons of Colossal-AI's tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
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


def _compare(one: Any, other: Any, close: Callable[..., None], ignored: Any = (), place: str = "") -> None:
    """Raise unless nested dicts and lists have equal keys, lengths and values, and tensors that `close` accepts."""
    kinds: Any = next((kind for kind in (Mapping, (list, tuple), Tensor) if isinstance(one, kind)), object)
    assert isinstance(other, kinds), f"{place} {one} is not equal to {other}"
    if isinstance(one, Tensor):
        close(one, other, msg=lambda text: f"{place}: {text}")
    elif isinstance(one, Mapping):
        assert one.keys() == other.keys(), f"{place} the keys differ: {list(one)} vs {list(other)}"
        for key in (key for key in one if key not in ignored):
            _compare(one[key], other[key], close, ignored, f"{place}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), f"{place} {one} is not equal to {other}"
        for index, pair in enumerate(zip(one, other, strict=True)):
            _compare(*pair, close, ignored, f"{place}.{index}")
    else:
        assert one == other, f"{place} {one} is not equal to {other}"


def check_state_dict_equal(d1: Any, d2: Any, ignore_device: bool = True, ignore_dtype: bool = False) -> None:
    """Raise unless nested dicts and lists have the same keys and close tensors; other values must be equal."""

    def close(one: Tensor, other: Tensor, msg: Any) -> None:
        one = one.to(other.device if ignore_device else one.device, other.dtype if ignore_dtype else one.dtype)
        assert_close(one, other, rtol=1e-3, atol=1e-3, msg=msg)

    _compare(d1, d2, close)


def assert_hf_output_close(
    out1: Any,
    out2: Any,
    ignore_keys: list[str] | None = None,
    track_name: str = "",
    atol: float = 1e-5,
    rtol: float = 1e-5,
) -> None:
    """Raise unless outputs of two models, nested dicts, lists and tensors, are close, except for `ignore_keys`."""
    close = functools.partial(assert_close, atol=atol, rtol=rtol)
    _compare(out1, out2, close, ignore_keys or (), track_name)
