"""Trains the cases of test_resume, from the beginning or from checkpoints; run as a program to continue."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apex import amp
from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD
from tests.amp.common import LEVELS, overflow_at, quiet, small_model, train

SAVED_AFTER, STEPS = 4, 9
# Shortly before and after the break.
OVERFLOWS = (0, 3, 5)

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-4),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01, weight_decay=0.1),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.05, momentum=0.9, dampening=0.1),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=0.01),
}


class Case(NamedTuple):
    level: str
    scale: str
    optimizer: str

    def __str__(self) -> str:
        return "-".join(self)


def cases() -> Iterator[Case]:
    for level in LEVELS:
        for scale in ("static", "dynamic"):
            for optimizer in OPTIMIZERS:
                if (level, optimizer) != ("O3", "Adam"):  # whose state does not fit in float16
                    yield Case(level, scale, optimizer)


def prepared(case: Case, seed: int) -> tuple[nn.Module, Any]:
    model = small_model(seed)
    return quiet(
        model,
        OPTIMIZERS[case.optimizer](model.parameters()),
        opt_level=case.level,
        loss_scale=128.0 if case.scale == "static" else "dynamic",
        dynamic_init_scale=2.0**10,
        scale_window=2,
    )


def run(case: Case, model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    return train(model, optimizer, steps, overflow_at(*OVERFLOWS) if case.scale == "dynamic" else lambda step: 1.0)


def outcome(model: nn.Module, optimizer: Any, losses: list[float]) -> dict[str, Any]:
    """Return everything that must be equal at the end."""
    state = optimizer.state_dict()["state"]
    return {
        "losses": losses,
        "model": [p.detach().clone() for p in (*model.parameters(), *model.buffers())],
        "masters": [p.detach().clone() for p in amp.master_params(optimizer)],
        "state": [v for index in sorted(state) for _, v in sorted(state[index].items()) if isinstance(v, Tensor)],
        "amp": dict(amp.state_dict()),
    }


def recipe(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the functions `save` and `resume` of the documentation."""
    text = (Path(__file__).parents[2] / "docs" / "amp.md").read_text()
    section = text[text.index("## Checkpoints") :]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"torch": torch, "os": os, "amp": amp, "model": model, "optimizer": optimizer}
    exec(code.group(1), names)
    return names


def continue_all(folder: Path) -> None:
    for case in cases():
        model, optimizer = prepared(case, seed=77)  # other weights than those that were saved
        step = recipe(model, optimizer)["resume"](folder / f"{case}.checkpoint")
        losses = run(case, model, optimizer, range(step, STEPS))
        torch.save(outcome(model, optimizer, losses), folder / f"{case}.result")
        amp.shutdown()


if __name__ == "__main__":
    continue_all(Path(sys.argv[1]))
