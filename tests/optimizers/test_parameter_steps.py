"""Parameters that come late, or go without a gradient at times, count their own steps, as in `torch.optim`."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from apex.ops import implementation
from apex.optimizers import FusedNAdam, FusedRAdam, NpuFusedAdam, NpuFusedAdamP, NpuFusedAdamW, NpuFusedBertAdam
from tests.optimizers import helpers
from tests.optimizers.helpers import exact_copy, parameters, relative_error, set_gradients, through_a_file
from tests.optimizers.test_npu_adamp import AdamP
from tests.optimizers.test_npu_others import BertAdam
from tests.support.harness import Route, routes

SHAPES = ((9,), (5,), (3,), (2,))
SCHEDULE = {"t_total": 20, "warmup": 0.3}


def counting(kind: type[Any]) -> helpers.Factory:
    """Return a factory of an optimizer that counts by parameter only if it is asked to, as `apex.fuse` does."""

    def make(params: Any) -> Any:
        optimizer = kind(params, lr=0.01)
        optimizer.counts_by_parameter = True
        return optimizer

    return make


KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "Adam": (lambda p: NpuFusedAdam(p, lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    "AdamW": (lambda p: NpuFusedAdamW(p, lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)),
    "AdamP": (lambda p: NpuFusedAdamP(p, lr=0.01), AdamP),
    "NAdam": (counting(FusedNAdam), lambda p: torch.optim.NAdam(p, lr=0.01)),
    "RAdam": (counting(FusedRAdam), lambda p: torch.optim.RAdam(p, lr=0.01)),
    "BertAdam": (lambda p: NpuFusedBertAdam(p, 0.01, **SCHEDULE), lambda p: BertAdam(p, **SCHEDULE)),
}
kinds = pytest.mark.parametrize(("make", "make_reference"), KINDS.values(), ids=KINDS)


def absent(step: int) -> list[int]:
    """0 comes late and leaves for a while, 1 misses every third step, 2 comes last; 3 is always there."""
    return [index for index, away in enumerate((step < 2 or step in (6, 7), step % 3 == 1, step < 8)) if away]


@pytest.mark.parametrize("route", routes())
@kinds
def test_matches_the_reference(make: helpers.Factory, make_reference: helpers.Factory, route: Route) -> None:
    helpers.check_training(make, make_reference, route, absent=absent, shapes=SHAPES, steps=12)


def interrupted(optimizer: Any, how: str, make: helpers.Factory) -> Any:
    """The optimizer after a checkpoint or a copy."""
    if how == "deepcopy":
        return copy.deepcopy(optimizer)
    if how == "pickle":
        return pickle.loads(pickle.dumps(optimizer))
    resumed = make([p for group in optimizer.param_groups for p in group["params"]])
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    return resumed


@pytest.mark.parametrize("how", ["state_dict", "deepcopy", "pickle"])
@kinds
def test_counts_survive(make: helpers.Factory, make_reference: helpers.Factory, how: str) -> None:
    params = parameters(shapes=SHAPES)
    exact = exact_copy(params)
    optimizer, reference = make(params), make_reference(exact)
    for step in range(12):
        optimizer = interrupted(optimizer, how, make)
        params = optimizer.param_groups[0]["params"]
        for each, tensors in ((optimizer, params), (reference, exact)):
            set_gradients(tensors, step, absent=absent(step))
            each.step()
    assert relative_error(params, exact) <= helpers.LIMIT


@pytest.mark.parametrize(("kind", "torchs"), [(NpuFusedAdam, torch.optim.Adam), (NpuFusedAdamW, torch.optim.AdamW)])
def test_torch_reads_and_writes_the_counts(kind: Callable[..., Any], torchs: Callable[..., Any]) -> None:
    params = parameters(shapes=SHAPES)
    exact = exact_copy(params)
    reference = torchs(exact, lr=0.01)
    optimizer = kind(params, lr=0.01)
    for step in range(12):
        for each, tensors in ((optimizer, params), (reference, exact)):
            set_gradients(tensors, step, absent=absent(step))
            each.step()
        counts = [
            {index: int(state["step"]) for index, state in each.state_dict()["state"].items()}
            for each in (optimizer, reference)
        ]
        assert counts[0] == counts[1]
        other = torchs if step % 2 else kind
        saved = optimizer.state_dict()
        optimizer = other(params, lr=0.01)
        optimizer.load_state_dict(through_a_file(saved))
    assert relative_error(params, exact) <= helpers.LIMIT


@kinds
def test_steps_that_overflow_count_for_nobody(make: helpers.Factory, make_reference: helpers.Factory) -> None:
    params = parameters(shapes=SHAPES)
    exact = exact_copy(params)
    optimizer, reference = make(params), make_reference(exact)
    with implementation("torch"):
        for step in range(24):
            real, overflows = divmod(step, 2)
            set_gradients(params, real, absent=absent(step if overflows else real))
            optimizer.grad_scale = torch.ones(1)
            optimizer.found_inf = torch.full((1,), float(overflows))
            optimizer.step()
            if not overflows:
                set_gradients(exact, real, absent=absent(real))
                reference.step()
    assert relative_error(params, exact) <= helpers.LIMIT
