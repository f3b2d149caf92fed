"""Options of DistributedFusedLAMB that say how the work is shared: each of these fails where one is passed over."""

from __future__ import annotations

import contextlib
import io
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from apex._distributed.collectives import reduce_scatter
from apex.contrib.optimizers._zero import gradients as gradients_module
from apex.contrib.optimizers._zero import groups, lamb
from tests.contrib.exchanges import Exchange, listed
from tests.contrib.lamb_problem import HYPER, backward, distributed_step, made, parameters, share
from tests.parallel.processes import Check


def sent(**options: Any) -> tuple[list[Exchange], list[Exchange]]:
    """Buckets of gradients, and of parameters, in a step."""
    params = parameters()
    optimizer = made(params, **options)
    distributed_step(optimizer, params, 0)
    with listed() as exchanges:
        distributed_step(optimizer, params, 1)
    gradients = [each for each in exchanges if each.sends_gradients]
    return gradients, [each for each in exchanges if each.sends_parameters]


def overlap(rank: int) -> None:
    """From the second step on, gradients are sent while the backward pass goes on."""
    for overlaps in (True, False):
        params = parameters()
        optimizer = made(params, overlap_reductions=overlaps)
        distributed_step(optimizer, params, 0)
        optimizer.zero_grad()
        with listed() as exchanges:
            backward(params, share(1, params))
        assert any(each.sends_gradients for each in exchanges) == overlaps
        optimizer.step()


def messages(rank: int) -> None:
    counts = {
        (blocks, chunks): len(sent(dwu_num_blocks=blocks, dwu_num_chunks=chunks)[0])
        for blocks, chunks in ((1, 1), (2, 1), (1, 2), (2, 2))
    }
    assert (counts[1, 1], counts[2, 1], counts[1, 2]) == (1, 2, 2)
    assert counts[2, 2] > 2


def communicator_counts(rank: int) -> None:
    """As many communicators as asked for take turns."""
    for options, index, count in (
        ({"dwu_num_rs_pg": 1}, 0, 1),
        ({"dwu_num_rs_pg": 3}, 0, 3),
        ({"dwu_num_rs_pg": 3}, 1, 3),
        ({"dwu_num_rs_pg": 1, "dwu_num_ag_pg": 2}, 1, 2),
        ({"dwu_group_size": 1, "dwu_num_ar_pg": 2}, 0, 2),
        ({"full_ar": True, "dwu_num_ar_pg": 1}, 0, 1),
        ({"full_ar": True, "dwu_num_ar_pg": 2}, 0, 2),
    ):
        exchanges = sent(**options)[index]
        assert len({id(each.group) for each in exchanges}) == count, options
    scattered, gathered = sent(dwu_num_ag_pg=1)
    assert not {id(each.group) for each in scattered} & {id(each.group) for each in gathered}


def whole_buckets(rank: int) -> None:
    """With `full_ar` every process gets the whole mean: buckets of all, not a part of everybody's."""
    for full in (True, False):
        gradients, _ = sent(full_ar=full, dwu_num_blocks=1, dwu_num_chunks=1)
        assert [len(each.tensors) for each in gradients] == [1 + dist.get_world_size() if full else 2]


def norm_while_copying(rank: int) -> None:
    for fused in (True, False):
        params = parameters()
        optimizer = made(params, clip_after_ar=False, fused_norm=fused)
        with mock.patch.object(lamb, "l2norm", wraps=lamb.l2norm) as measured:
            distributed_step(optimizer, params, 0)
        assert ["outputs" in call.kwargs for call in measured.call_args_list] == [fused]


def scale_while_reducing(rank: int) -> None:
    """Where the backend can, as NCCL, the factor goes with the message."""
    found: dict[bool, list[Tensor]] = {}
    for fuse in (True, False):
        params = parameters()
        optimizer = made(params, clip_after_ar=False, fuse_scale=fuse)
        with (
            mock.patch.object(gradients_module, "reduce_scatter", wraps=reduce_scatter) as scattered,
            mock.patch.object(lamb, "can_multiply_while_reducing", return_value=True),
        ):
            distributed_step(optimizer, params, 0)
        assert {call.args[-1] is not None for call in scattered.call_args_list} == {fuse}
        found[fuse] = params
    assert HYPER["max_grad_norm"]
    for one, other in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(one, other)


def talk(rank: int) -> None:
    for verbose in (True, False):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            made(parameters(), verbose=verbose)._lazy_init_stage1()
        assert ("parameters of torch.float32" in said.getvalue()) == verbose


def channels(rank: int) -> None:
    """Of the communicators of parameters alone."""
    for wanted in (0, 3):
        with (
            mock.patch.object(groups, "_made", type(groups._made)()),
            mock.patch.object(groups, "_options", wraps=groups._options) as options,
        ):
            made(parameters(), dwu_num_ag_pg=1, nccl_allgather_channels=wanted)
        assert {call.args[0] for call in options.call_args_list} == {0, wanted}


def scalers_are_told(rank: int) -> None:
    """A GradScaler that looks for itself sees in every process what one of them had."""
    for supports in (True, False):
        params = parameters()
        optimizer = made(params, step_supports_amp_scaling=supports)
        assert optimizer._step_supports_amp_scaling == supports
        gradients = share(0, params)
        if rank == 1:
            gradients[1][0] = torch.inf
        backward(params, gradients)
        optimizer.complete_reductions()
        assert params[0].grad.isfinite().all() == supports


CHECKS: dict[str, Check] = {
    f"option_{check.__name__}": check
    for check in (
        overlap,
        messages,
        communicator_counts,
        whole_buckets,
        norm_while_copying,
        scale_while_reducing,
        talk,
        channels,
        scalers_are_told,
    )
}
