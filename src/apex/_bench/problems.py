"""Parameters with gradients for benchmarks of optimizers, and functions that make, check and time implementations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .parameter_sets import Shapes
from .registry import OURS, Call, Expected, Prepared

# Gradients are multiplied by these factors before each checked step: powers of 2, which need no rounding.
GRADIENT_FACTORS = (1.0, -0.5, 4.0)


class Running(NamedTuple):
    """An optimizer in use: `step` performs one step, `results` returns the lists of tensors to compare after it."""

    step: Callable[[], object]
    results: Callable[[], list[list[Tensor]]]


# Makes an optimizer from parameters that have gradients.
Maker = Callable[[list[nn.Parameter]], Running]


@dataclass(frozen=True)
class Algorithm:
    """An algorithm with a row per parameter set; a step moves `bytes_per_element`, and `exact` runs in float64.

    `result_dtypes` has one dtype for each list of results. `slack` is an absolute error allowed beyond the tolerance.
    An algorithm that is `gpu_only` would take PyTorch's operators minutes on a CPU.
    """

    name: str
    bytes_per_element: int
    ours: Maker
    exact: Maker
    peers: Mapping[str, Maker] = field(default_factory=dict)
    cpu_peers: Mapping[str, Maker] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    result_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    slack: float = 0.0
    gpu_only: bool = False

    def implementations(self, device: torch.device) -> dict[str, Maker]:
        """Return all implementations, ours first."""
        return {OURS: self.ours, **(self.cpu_peers if device.type == "cpu" else {}), **self.peers}


def make_parameters(shapes: Shapes, device: torch.device, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Make parameters and gradients between -0.5 and 0.5, the same in every run."""
    generator = torch.Generator(device).manual_seed(0)

    def values(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=generator, device=device).sub_(0.5).to(dtype)

    params = [nn.Parameter(values(shape)) for shape in shapes]
    for param in params:
        param.grad = values(tuple(param.shape))
    return params


def copied(params: Sequence[nn.Parameter], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    """Return copies of parameters and gradients, in another dtype if one is given."""
    twins = [nn.Parameter(param.detach().to(dtype or param.dtype, copy=True)) for param in params]
    for twin, param in zip(twins, params, strict=True):
        assert param.grad is not None
        twin.grad = param.grad.to(dtype or param.dtype, copy=True)
    return twins


def gradients(params: Sequence[nn.Parameter]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def results_of_steps(make: Maker, params: Sequence[nn.Parameter], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the results of a few steps with different gradients on copies of `params`: one tensor per list."""
    twins = copied(params, dtype)
    running = make(twins)
    for factor in GRADIENT_FACTORS:
        torch._foreach_mul_(gradients(twins), factor)
        running.step()
    return [flat(tensors) for tensors in running.results()]


def prepared_steps(
    ours_and_peers: Mapping[str, Maker],
    exact: Maker,
    checked: Sequence[nn.Parameter],
    timed: Callable[[], list[nn.Parameter]],
    dtypes: Sequence[torch.dtype],
    slack: float = 0.0,
) -> Prepared:
    """Prepare a case of optimizers, checked on some parameters and timed on others, which all implementations share.

    `exact` is the optimizer in float64, which may have one list of results for all; `dtypes` are the lists' dtypes.
    `slack` is an absolute error allowed beyond the tolerance.
    """
    lists = [values.double() for values in results_of_steps(exact, checked, torch.float64)]
    lists += lists[-1:] * (len(dtypes) - len(lists))
    # A norm sums all elements; PyTorch's sums without pairing: an error of 2e-6 of the norm of 1.6 million elements.
    count = sum(param.numel() for param in checked)
    terms = [count if values.numel() == 1 else 1 for values in lists]
    timed = functools.cache(timed)

    def check(make: Maker) -> Call:
        return lambda: results_of_steps(make, checked)

    def time(make: Maker) -> Call:
        step = make(timed()).step

        def call() -> Sequence[Tensor]:  # timed calls have no results to compare
            step()
            return ()

        return call

    return Prepared(
        {name: functools.partial(check, make) for name, make in ours_and_peers.items()},
        [Expected(*each, slack) for each in zip(lists, dtypes, terms, strict=True)],
        {name: functools.partial(time, make) for name, make in ours_and_peers.items()},
    )
