"""Lists of tensors as clients of the compiled modules bring them along, and what is held against them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from apex.ops import _library
from tests.support.harness import Route, assert_close

# The interpreter's block is 64 elements: two blocks and a rest, nothing, one block, one element.
SIZES = (5, 130, 0, 64, 1)
CHUNK = 2048 * 32

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def make(route: Route, *dtypes: torch.dtype, offset: int = 0, positive: Sequence[int] = ()) -> list[list[Tensor]]:
    """A list per dtype; its tensors start `offset` elements after an aligned address; those of `positive` are >= 0."""
    lists = []
    for index, dtype in enumerate(dtypes):
        tensors = []
        for size in SIZES:
            values = torch.randn(size + offset, device=route.device).to(dtype)
            tensors.append((values.abs() if index in positive else values)[offset:])
        lists.append(tensors)
    return lists


def flag(route: Route, value: int = 0) -> Tensor:
    return torch.full((1,), value, dtype=torch.int32, device=route.device)


def number(route: Route, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([value], dtype=dtype, device=route.device)


def wide(lists: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.detach().cpu().double() for tensor in tensors] for tensors in lists]


def copies(lists: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[tensor.detach().clone() for tensor in tensors] for tensors in lists]


def dispatch(route: Route, *dtypes: torch.dtype) -> Any:
    """The implementation asked for; float64 has only the torch path."""
    return _library.implementation("auto" if F64 in dtypes else route.implementation)


def by_element(formula: Callable[..., tuple[Tensor, ...]], lists: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """`formula` of the tensors of equal index, as a list per result."""
    return [
        list(column) for column in zip(*(formula(*tensors) for tensors in zip(*wide(lists), strict=True)), strict=True)
    ]


def assert_lists(actual: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    for index, (tensor, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert_close(tensor, wanted, what=f"{what}[{index}]")
