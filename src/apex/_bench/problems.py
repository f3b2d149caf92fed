"""Parameters with gradients for the benchmarks of optimizers, and how implementations are made, checked and timed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .parameter_sets import Shapes
from .registry import OURS, Call, Expected, Prepared

# What gradients are multiplied by before every checked step: powers of 2, which need no rounding.
GRADIENT_FACTORS = (1.0, -0.5, 4.0)


class Running(NamedTuple):
    """An optimizer at work: `step` does one step, `results` gives the lists of tensors to compare after it."""

    step: Callable[[], object]
    results: Callable[[], list[list[Tensor]]]


# Makes an optimizer of parameters that have gradients.
Maker = Callable[[list[nn.Parameter]], Running]


@dataclass(frozen=True)
class Algorithm:
    """A row per parameter set: `bytes_per_element` must move in a step; `exact` is run in float64.

    `result_dtypes` has one for each list of results."""

    name: str
    bytes_per_element: int
    ours: Maker
    exact: Maker
    peers: Mapping[str, Maker] = field(default_factory=dict)
    cpu_peers: Mapping[str, Maker] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    result_dtypes: tuple[torch.dtype, ...] = (torch.float32,)

    def implementations(self, device: torch.device) -> dict[str, Maker]:
        """Ours first."""
        return {OURS: self.ours, **(self.cpu_peers if device.type == "cpu" else {}), **self.peers}


def make_parameters(shapes: Shapes, device: torch.device, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Parameters and gradients between -0.5 and 0.5, the same at every run."""
    generator = torch.Generator(device).manual_seed(0)

    def values(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=generator, device=device).sub_(0.5).to(dtype)

    params = [nn.Parameter(values(shape)) for shape in shapes]
    for param in params:
        param.grad = values(tuple(param.shape))
    return params


def copied(params: Sequence[nn.Parameter], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    """The same parameters and gradients in memory of their own, in another dtype if one is given."""
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
    """What a few steps with other gradients each make of copies of `params`: one tensor per list of results."""
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
) -> Prepared:
    """A case of optimizers: checked on some parameters, timed on others, which all of them share and go on changing.

    `exact` is the optimizer in float64, which may have one list of results for all; `dtypes` are those of the lists.
    """
    lists = [values.double() for values in results_of_steps(exact, checked, torch.float64)]
    lists += lists[-1:] * (len(dtypes) - len(lists))
    # A norm is one number of all; PyTorch's own adds up without pairing: 2e-6 of the norm of 1.6 million elements.
    count = sum(param.numel() for param in checked)
    terms = [count if values.numel() == 1 else 1 for values in lists]
    timed = functools.cache(timed)

    def check(make: Maker) -> Call:
        return lambda: results_of_steps(make, checked)

    def time(make: Maker) -> Call:
        step = make(timed()).step

        def call() -> Sequence[Tensor]:  # whose results nobody looks at
            step()
            return ()

        return call

    return Prepared(
        {name: functools.partial(check, make) for name, make in ours_and_peers.items()},
        [Expected(*each) for each in zip(lists, dtypes, terms, strict=True)],
        {name: functools.partial(time, make) for name, make in ours_and_peers.items()},
    )
