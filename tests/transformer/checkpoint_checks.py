"""Checkpoints of one split loaded by others: checks that run in four processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from apex.contrib.optimizers import DistributedFusedAdam
from apex.optimizers import FusedAdam
from apex.transformer import parallel_state

from .small_gpt import Run, parts, split, whole

# Tensor-parallel ranks, stages, chunks; what is left of four processes are replicas.
LAYOUTS = ((4, 1, None), (1, 4, None), (1, 2, 2), (2, 1, None), (1, 1, None), (2, 2, None))


def reshards(rank: int) -> None:
    """Every layout holds the same bits after loading, and its next step is the same."""
    with split(2, 2):
        run = Run()
        run.model[0].steps += 3
        for _ in range(2):
            run.train()
        run.save(Path("two"))
        loss = run.train()
        run.save(Path("three"))
    two, three = whole(Path("two")), whole(Path("three"))
    assert two["model.layers.3.up.weight"].shape == (16, 8)
    for tensor, pipeline, chunks in LAYOUTS:
        with split(tensor, pipeline, chunks):
            run = Run()
            run.load(Path("two"))
            assert run.step == 2
            assert all(part.steps.tolist() == [3.0, 3.0] for part in run.model)
            for key, view, place in parts(run):
                assert torch.equal(view, two[key][place]), key
            torch.testing.assert_close(run.train(), loss, rtol=1e-6, atol=0)
            for key, view, place in parts(run):
                torch.testing.assert_close(view, three[key][place], rtol=1e-5, atol=1e-6, msg=key)
                # Without stages both gradients of the tied embedding are added up in another order.
                same = tensor == 2 and (pipeline == 2 or "embedding" not in key)
                assert not same or torch.equal(view, three[key][place]), key


def zero(params: Any, **options: Any) -> DistributedFusedAdam:
    return DistributedFusedAdam(params, process_group=parallel_state.get_data_parallel_group(), **options)


def every_optimizer(rank: int) -> None:
    """State, masters and the next step have the same bits in other layouts."""
    for number, (optimizer, options, first, others) in enumerate(
        (
            (torch.optim.AdamW, {}, (2, 2), ((4, 1), (1, 1))),
            (FusedAdam, {"master_weights": True}, (2, 2), ((1, 4),)),
            (FusedAdam, {"amp_level": "O2"}, (2, 1), ((1, 2),)),
            (FusedAdam, {"amp_level": "O5"}, (1, 4), ((4, 1),)),
            (zero, {}, (2, 1), ((1, 2), (1, 1), (4, 1))),
        )
    ):
        with split(*first):
            run = Run(optimizer, **options)
            for name in (f"{number}-before", f"{number}-after"):
                run.train_each()
                run.save(Path(name))
        before, after = whole(Path(f"{number}-before")), whole(Path(f"{number}-after"))
        for layout in others:
            with split(*layout):
                run = Run(optimizer, **options)
                run.load(Path(f"{number}-before"))
                for expected in (before, after):
                    for key, view, place in parts(run):
                        assert torch.equal(view, expected[key][place]), (key, options, layout)
                    run.train_each()


CHECKS = {check.__name__: check for check in (reshards, every_optimizer)}
