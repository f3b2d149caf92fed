"""One table of cases per op, run three ways: reference in float64, torch path, Triton kernel.

`routes()` parametrises a test over the ways to reach an op here: PyTorch operators on the CPU, Triton's interpreter on
the CPU, and on a GPU (marker `gpu`) both the operators and the real kernels.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from apex.ops._tolerance import excess

_HAS_TRITON = importlib.util.find_spec("triton") is not None
# Why the transducer loss cannot run in this Triton's interpreter; empty if it can, or if there is no Triton at all.
NO_GATHER = (
    "Triton 3.2 has no tl.gather"
    if _HAS_TRITON and not hasattr(importlib.import_module("triton.language"), "gather")
    else ""
)


@dataclass(frozen=True)
class Route:
    """A device and the implementation asked for there."""

    device: str
    implementation: str

    def __str__(self) -> str:
        return f"{self.device}-{self.implementation}"


def routes(*, interpreter: bool = True, lacks: str = "") -> list:
    """Return every way to reach an op on this machine, as pytest parameters.

    The interpreter takes milliseconds per block of elements, so it is for tests of numbers; what an optimizer does
    around its updates is tested without it. `lacks` says what this release of Triton lacks for the op; the interpreter
    is skipped then.
    """
    parameters = [pytest.param(Route("cpu", "torch"), id="cpu-torch")]
    if torch.cuda.is_available():
        parameters += [
            pytest.param(Route("cuda", implementation), id=f"gpu-{implementation}", marks=pytest.mark.gpu)
            for implementation in ("torch", "triton")
        ]
    if interpreter:
        usable = os.environ.get("TRITON_INTERPRET") == "1" and _HAS_TRITON
        reason = lacks or "Triton's interpreter needs triton, and is for machines without a GPU"
        mark = pytest.mark.skipif(not usable or bool(lacks), reason=reason)
        parameters.append(pytest.param(Route("cpu", "triton"), id="interpreter", marks=mark))
    return parameters


def opcheck(route: Route, operator: torch._ops.OpOverload, arguments: tuple[object, ...]) -> None:
    """PyTorch's checks of an operator.

    Nearly all their time goes into tracing it for all sizes. What is traced does not depend on the implementation, so
    on a CPU that is done for one of two.
    """
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, arguments, test_utils=checks[:-1] if route == Route("cpu", "triton") else checks)


def before_nan(tensor: Tensor) -> Tensor:
    """The same in memory that goes on with NaN, so that it shows when a kernel reads beyond the end."""
    size = tensor.numel()
    memory = torch.full((size + 1024,), torch.nan, dtype=tensor.dtype, device=tensor.device)
    memory[:size] = tensor.flatten()
    return memory[:size].view(tensor.shape)


def assert_close(actual: Tensor | None, expected: Tensor | None, *, reduction: int = 1, what: str = "result") -> None:
    """Holds a result against its float64 expectation by the one tolerance table."""
    assert (actual is None) == (expected is None), f"{what}: {actual is None=}, {expected is None=}"
    if actual is None or expected is None:
        return
    assert actual.shape == expected.shape, f"{what} has shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    error = excess(actual.detach().cpu(), expected.detach().cpu(), reduction=reduction)
    assert error <= 1, f"{what} is off by {error:.3g} times its tolerance"


def sum_error(dtype: torch.dtype, terms: int) -> float:
    """Return how far two sums of `terms` numbers may differ in `dtype`, relative to their largest partial sums.

    Each addition is off by half a unit in the last place at most, and processors and process counts add in different
    orders. For a number behind several sums, one after the other, `terms` is the total of their lengths.
    """
    return terms * torch.finfo(dtype).eps


def assert_equal_bits(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> None:
    """Two runs gave the same bits."""
    for a, b in zip(first, second, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            # Copied, because a view as bytes needs a stride of 1 even of a single element.
            first_bytes, second_bytes = (t.reshape(-1).clone(memory_format=torch.contiguous_format) for t in (a, b))
            assert torch.equal(first_bytes.view(torch.uint8), second_bytes.view(torch.uint8))
