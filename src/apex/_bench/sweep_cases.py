"""Families of random cases for `apex bench --sweep`: the ops' examples, and optimizers.

A family is a function of a `Random` and a device. It returns a case's name and a function that makes its passes, by
their names: "fwd" and "bwd" of an op, "" of an optimizer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from ..ops._examples import Random
from .cases import optimizers
from .examples import sweeps
from .list_passes import PASSES
from .problems import make_parameters, prepared_steps
from .registry import Prepared

Passes = dict[str, Prepared]
Drawn = tuple[str, Callable[[], Passes]]


def _optimizers(random: Random, device: torch.device) -> Drawn:
    """Draw an optimizer that PyTorch has too, or a pass over all gradients, on tensors of very different sizes."""
    algorithms = [
        a
        for a in optimizers.ALGORITHMS
        if "eager" not in a.peers and "distributed" not in a.name and not (a.gpu_only and device.type == "cpu")
    ]
    algorithm, count = random.choice(algorithms), random.size(1, 300)
    shapes: list[tuple[int, ...]] = [(random.size(1, max(2, random.most // (2 * count)), 4),) for _ in range(count)]
    words = f"{count} tensors {sum(map(math.prod, shapes))} elements"
    if random.random() < 0.3:
        algorithm = random.choice(PASSES)
    parameters = functools.partial(make_parameters, shapes, device, algorithm.dtype)
    makers, dtypes = algorithm.implementations(device), algorithm.result_dtypes
    return f"{algorithm.name} {words}", lambda: {
        "": prepared_steps(makers, algorithm.exact, parameters(), parameters, dtypes, slack=algorithm.slack)
    }


def families() -> dict[str, Callable[[Random, torch.device], Drawn]]:
    """Return the families that can be drawn from, by name."""
    return {**sweeps(), "optimizers": _optimizers}
