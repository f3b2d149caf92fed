"""Checks that one process loads the checkpoint of four."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apex.checkpoint import save_sharded
from apex.contrib.optimizers import DistributedFusedAdam, DistributedFusedLAMB
from apex.transformer import checkpoint
from tests.support.harness import sum_error

from .small_gpt import SMOOTH, TERMS, Run, Stage, parts, split, whole

BESIDE = Path("..")


def loads_what_four_saved(rank: int) -> None:
    with split():
        run = Run(4, **SMOOTH)
        run.load(BESIDE / "two")
        two, three = whole(BESIDE / "two"), whole(BESIDE / "three")
        found = {key: view for key, view, _ in parts(run)}
        assert found.keys() == {key for key in two if not key.endswith("|padding")}
        for key, view in found.items():
            assert torch.equal(view, two[key]), key
        expected = float((BESIDE / "loss").read_text())
        assert run.train().item() == pytest.approx(expected, rel=sum_error(torch.float32, TERMS))
        for key, view, _ in parts(run):
            torch.testing.assert_close(view, three[key], rtol=1e-5, atol=1e-6, msg=key)


class BothEnds:
    """The first and the last chunk of a model on one rank, as in a folded pipeline, and an optimizer."""

    def __init__(self, kind: Any, steps: int) -> None:
        self.model = [Stage(0, True, False), Stage(0, False, True)]
        self.model[1].layers = nn.ModuleDict({"7": nn.Linear(2, 2)})
        self.model[1].layers["7"].layer_number = 1
        self.parameters = [param for part in self.model for param in part.parameters()]
        self.optimizer = kind(self.parameters, lr=0.1)
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        sum((param * (param + 1)).sum() for param in self.parameters).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def both_ends_in_one_process(rank: int) -> None:
    """Copies of an embedding are saved once; both are loaded, each with its own optimizer state."""
    with split():
        for kind in (torch.optim.AdamW, DistributedFusedAdam, DistributedFusedLAMB):
            one, other = BothEnds(kind, 2), BothEnds(kind, 1)
            state = checkpoint.state_of(one.model, one.optimizer)
            assert "model.layers.7.weight" in state, "a key of a ModuleDict is no number of a list"
            assert not any("head" in key for key in state)
            save_sharded(state, kind.__name__)
            checkpoint.load(kind.__name__, other.model, other.optimizer)
            for run in (one, other):
                run.step()
            for value, again in zip(one.parameters, other.parameters, strict=True):
                assert torch.equal(value, again)


class Strict:
    """An object that refuses a state after it has changed part of itself."""

    def __init__(self, value: int, refused: int | None = None) -> None:
        self.value, self.refused = value, refused

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]
        if self.value == self.refused:
            raise LookupError("not this value")


def a_refused_scheduler_changes_nothing(rank: int) -> None:
    with split():
        one, other = BothEnds(torch.optim.AdamW, 2), BothEnds(torch.optim.AdamW, 1)
        checkpoint.save("strict", one.model, one.optimizer, first=Strict(3), last=Strict(5))
        before = [param.detach().clone() for param in other.parameters]
        moments = [state["exp_avg"].clone() for state in other.optimizer.state.values()]
        first, last = Strict(1), Strict(2, refused=5)
        with pytest.raises(RuntimeError, match="does not fit; rank 0 had LookupError: not this value"):
            checkpoint.load("strict", other.model, other.optimizer, first=first, last=last)
        assert (first.value, last.value) == (1, 2)
        assert all(map(torch.equal, before, other.parameters))
        assert all(map(torch.equal, moments, (state["exp_avg"] for state in other.optimizer.state.values())))
        last.refused = None
        checkpoint.load("strict", other.model, other.optimizer, first=first, last=last)
        assert (first.value, last.value) == (3, 5)
        assert all(map(torch.equal, one.parameters, other.parameters))


CHECKS = {
    check.__name__: check
    for check in (loads_what_four_saved, both_ends_in_one_process, a_refused_scheduler_changes_nothing)
}
