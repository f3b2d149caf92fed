"""Random schedules: whatever processes use, accumulate, clear and save, they get what one process would get."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.contrib.optimizers import DistributedFusedAdam, DistributedFusedLAMB
from apex.optimizers import FusedLAMB
from tests.parallel.processes import Check, assert_same_everywhere

STEPS = 4
SEEDS = 16


def gradient(seed: Sequence[int], param: Tensor) -> Tensor:
    """Multiples of 1/8, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(hash(tuple(seed)) % 2**31)
    return torch.randint(-9, 10, param.shape, generator=generator) / 8


def used(seed: Sequence[int], count: int) -> list[int]:
    """The parameters that a process uses in a pass: some of them, one at least."""
    choice = random.Random(hash(tuple(seed)))
    return [index for index in range(count) if choice.random() < 0.7] or [choice.randrange(count)]


def pair(choice: random.Random, params: list[nn.Parameter], twins: list[nn.Parameter]) -> tuple[Any, Any]:
    """An optimizer with random options, and the one that it is held against."""

    def flip(chance: float = 0.5) -> bool:
        return choice.random() < chance

    cut = choice.randrange(len(params) + 1)
    groups = [
        [group for group in ({"params": each[:cut], "weight_decay": 0.1}, {"params": each[cut:]}) if group["params"]]
        for each in (params, twins)
    ]
    if flip():
        optimizer: Any = DistributedFusedAdam(
            groups[0],
            lr=0.01,
            bucket_cap_mb=choice.choice([0.0001, 0.0003, 100.0]),
            pipeline_size=choice.randint(1, 3),
            overlap_grad_sync=flip(0.7),
            overlap_param_sync=flip(),
            contiguous_grad_buffer=flip(),
            contiguous_param_buffer=flip(),
            store_params=flip(0.7),
        )
        return optimizer, torch.optim.AdamW(groups[1], lr=0.01, weight_decay=0.0)
    shared: dict[str, Any] = {"lr": 0.01, "eps": 1e-6, "max_grad_norm": choice.choice([0.0, 1.0]), "use_nvlamb": flip()}
    optimizer = DistributedFusedLAMB(
        groups[0],
        **shared,
        overlap_reductions=flip(0.7),
        full_ar=flip(),
        dwu_group_size=choice.choice([0, 1]),
        dwu_num_blocks=choice.randint(1, 5),
        set_param_views_to_flat_buffer=flip(),
    )
    return optimizer, FusedLAMB(groups[1], weight_decay=0.0, **shared)


def schedule(seed: int) -> Check:
    def check(rank: int) -> None:
        choice = random.Random(seed)  # the same in all processes
        shapes = [tuple(choice.randrange(8) for _ in range(choice.randrange(4))) for _ in range(choice.randint(1, 8))]
        start = torch.Generator().manual_seed(seed)
        params = [nn.Parameter(torch.randn(shape, generator=start)) for shape in shapes]
        twins = [nn.Parameter(param.detach().clone()) for param in params]
        optimizer, reference = pair(choice, params, twins)
        is_adam = isinstance(optimizer, DistributedFusedAdam)
        passes, clears, waits = choice.randint(1, 3), choice.random() < 0.5, choice.random() < 0.5
        ranks = range(dist.get_world_size())
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=clears)
            for number in range(passes):
                is_last = number == passes - 1
                chosen = used((seed, step, number, rank), len(params))
                terms = [(params[i].float() * gradient((seed, step, number, rank, i), params[i])).sum() for i in chosen]
                if is_adam and waits and not is_last:
                    with optimizer.no_sync(greedy_grad_copy=choice.random() < 0.5):
                        torch.stack(terms).sum().backward()
                else:
                    if not is_adam:
                        optimizer.set_is_accumulation_step(not is_last)
                    torch.stack(terms).sum().backward()
                if choice.random() < 0.5:  # a script's own, in between
                    dist.all_reduce(torch.ones(2))
            for index, twin in enumerate(twins):
                given = [
                    gradient((seed, step, number, other, index), twin)
                    for number in range(passes)
                    for other in ranks
                    if index in used((seed, step, number, other), len(params))
                ]
                twin.grad = sum(given, torch.zeros(twin.shape)) / len(ranks)
            optimizer.step()
            reference.step()
            if choice.random() < 0.2:
                optimizer.sharded_state_dict()
            if choice.random() < 0.2:
                optimizer.state_dict()
        if is_adam:
            optimizer.param_sync()
        for index, (found, truth) in enumerate(zip(params, twins, strict=True)):
            torch.testing.assert_close(
                found.detach(), truth.detach(), rtol=2e-4, atol=2e-5, msg=f"parameter {index} of {shapes}"
            )
        assert_same_everywhere([param for param in params if param.numel()])

    return check


def every(rank: int) -> None:
    for seed in range(SEEDS):
        try:
            schedule(seed)(rank)
        except Exception as error:
            raise AssertionError(f"schedule {seed}") from error


CHECKS: dict[str, Check] = {"schedules": every}
