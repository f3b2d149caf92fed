"""Runs of a split model in which one rank kills itself in a phase of a step; started by test_checkpoint.py.

Argument: a folder. This process imports everything and forks four ranks for every run. Each run has its own folder with
the output of its ranks; `ends.json` has their exit codes. One run, "alive", is not killed. When all have ended,
"resumed" continues from the last checkpoint of one of them. The runs of EXCHANGES have two ranks of a single layer.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from apex.checkpoint import Series
from apex.checkpoint._split import SavePlanner
from apex.transformer import checkpoint, parallel_state
from apex.transformer.context_parallel import _ring, context_attention
from apex.transformer.moe import MoELayer
from apex.transformer.testing.standalone_transformer_lm import TransformerConfig

from ..support.forked_ranks import die, start
from .small_gpt import Run, split

# The rank that dies in each phase.
VICTIMS = {"forward": 2, "backward": 1, "exchange": 3, "optimizer": 0, "save": 0, "save_elsewhere": 3}
RANKS, SAVED, LAST = 4, 1, 3
# What rank 0 says of the exchange in which rank 1 is missing.
EXCHANGES = {"experts": "the all-to-all of experts' tokens", "ring": "ring attention's exchange with ranks 1 and 1"}


def arm(phase: str, run: Run) -> None:
    """Make this process die in the next step."""
    if phase == "forward":
        run.model[0].layers[0].register_forward_pre_hook(die)
    elif phase == "backward":
        run.model[0].layers[0].up.weight.register_hook(die)
    elif phase == "exchange":
        run.scaler.step = die  # type: ignore[method-assign]
    elif phase == "optimizer":
        run.optimizer.register_step_pre_hook(die)
    else:
        calls: list[int] = []
        resolve = SavePlanner.resolve_data

        def resolve_data(self: Any, item: Any) -> Any:
            calls.append(1)
            return die() if len(calls) == 5 else resolve(self, item)

        SavePlanner.resolve_data = resolve_data  # type: ignore[method-assign]


def exchange(name: str) -> None:
    """Run a layer whose second rank dies between its exchanges."""
    sizes = {"experts": "expert_model_parallel_size", "ring": "context_parallel_size"}
    parallel_state.initialize_model_parallel(**{sizes[name]: 2})
    dies = dist.get_rank() == 1
    if name == "experts":
        options: Any = {"num_moe_experts": 2, "moe_token_dispatcher_type": "alltoall", "activation": "swiglu"}
        layer = MoELayer(TransformerConfig(1, 8, 2, 16, 8, **options))
        if dies:
            layer.experts.register_forward_pre_hook(die)
        layer(torch.ones(4, 1, 8))
    else:
        if dies:
            _ring.Passing.__init__ = die  # type: ignore[method-assign]
        query = torch.ones(4, 1, 2, 8)
        context_attention(query, query, query)


def train(name: str, folder: Path) -> None:
    if name in EXCHANGES:
        exchange(name)
        return
    with split(2, 2):
        run = Run(2, training=True)
        series = Series(folder / "checkpoints", sharded=True)
        path = series.latest()
        if path is not None:
            run.load(path)
        while run.step < LAST:
            if run.step == SAVED and VICTIMS.get(name) == dist.get_rank():
                arm(name, run)
            run.train()
            if run.step in (SAVED, LAST) or (run.step > SAVED and name.startswith("save")):
                data = {"position": run.step}
                series.save(checkpoint.state_of(run.model, run.optimizer, data=data, **run.others()), run.step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    ends = start({**dict.fromkeys(("alive", *VICTIMS), RANKS), **dict.fromkeys(EXCHANGES, 2)}, place, train)
    shutil.copytree(place / "save" / "checkpoints", place / "resumed" / "checkpoints")
    ends |= start({"resumed": RANKS}, place, train)
    (place / "ends.json").write_text(json.dumps(ends))
