"""Checks of pipelines that run in two, four or eight processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.transformer import parallel_state
from apex.transformer._groups.device import parameter_device
from apex.transformer.pipeline_parallel import p2p_communication, utils

from .toy import (
    HIDDEN,
    LENGTH,
    SAMPLES,
    SHAPE,
    STEPS,
    Part,
    assert_same_gradients,
    batch_of,
    in_one_process,
    parts_of,
    pipeline,
    set_microbatches,
    step_function,
)


def every_schedule(rank: int) -> None:
    """Losses and gradients are bitwise equal to one process that runs the same microbatches."""
    ranks = dist.get_world_size()
    for name, chunks, microbatches, options in (
        ("1f1b", 1, 1, {}),
        ("1f1b", 1, 5, {"deallocate_pipeline_outputs": True}),
        ("interleaved", 2, ranks, {"deallocate_pipeline_outputs": True}),
        ("interleaved", 3, 2 * ranks, {"tensor_shape": None}),
        ("zb_h1", 1, 2 * ranks - 1, {"deallocate_pipeline_outputs": True}),
        ("zb_v", 2, 2, {}),
        ("zb_v", 2, 2 * ranks + 1, {"deallocate_pipeline_outputs": True}),
    ):
        losses, whole = in_one_process(ranks * chunks * 2, microbatches)
        with pipeline(ranks, None if chunks == 1 else chunks):
            model = parts_of(name, chunks, 2)
            found = STEPS[name](
                step_function,
                batch_of(microbatches),
                model,
                **{"forward_only": False, "tensor_shape": SHAPE, **options},
            )
            last = 0 if name == "zb_v" else ranks - 1
            assert len(found) == (microbatches if rank == last else 0), name
            assert all(torch.equal(one, other) for one, other in zip(found, losses, strict=False)), name
            assert_same_gradients(model, whole)


def forward_only(rank: int) -> None:
    ranks = dist.get_world_size()
    count = 2 * ranks - 1  # no multiple of the ranks, which training in chunks would need
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zb_v", 2)):
        losses, _ = in_one_process(ranks * chunks, count, forward_only=True)
        with pipeline(ranks, None if chunks == 1 else chunks):
            model = parts_of(name, chunks, 1)
            found = STEPS[name](
                step_function, batch_of(count), model, forward_only=True, tensor_shape=SHAPE, async_comm=True
            )
            assert len(found) == (count if rank == (0 if name == "zb_v" else ranks - 1) else 0)
            assert all(torch.equal(one, other) for one, other in zip(found, losses, strict=False))
            assert all(param.grad is None for part in model for param in part.parameters())


def autocast_and_scaler(rank: int) -> None:
    """With half precision, stages may send another dtype than the parameters have."""
    ranks = dist.get_world_size()
    for dtype, name in ((torch.bfloat16, "1f1b"), (torch.float16, "zb_h1"), (torch.float16, "1f1b")):
        options = {"dtype": dtype}
        if dtype == torch.float16:
            options["grad_scaler"] = torch.amp.GradScaler(parameter_device().type, init_scale=4.0)
        losses, whole = in_one_process(ranks * 2, 4, **options)
        with pipeline(ranks, None):
            model = parts_of(name, 1, 2)
            found = STEPS[name](step_function, batch_of(4), model, forward_only=False, tensor_shape=SHAPE, **options)
            assert all(torch.equal(one, other) for one, other in zip(found, losses, strict=False))
            assert_same_gradients(model, whole)


def frozen_stages(rank: int) -> None:
    """If all parameters of the first stages are frozen, the other gradients equal one process's."""
    ranks = dist.get_world_size()
    for name, chunks in (("1f1b", 1), ("zb_v", 2)):
        _, whole = in_one_process(ranks * chunks, 3)
        with pipeline(ranks, None if chunks == 1 else chunks):
            model = parts_of(name, chunks, 1)
            if rank < ranks // 2:
                model[0].requires_grad_(False)
            STEPS[name](step_function, batch_of(3), model, forward_only=False, deallocate_pipeline_outputs=True)
            assert_same_gradients([part for part in model if next(part.parameters()).requires_grad], whole)


def a_batch_that_is_too_short(rank: int) -> None:
    """A short batch is refused before a microbatch is run."""
    with pipeline(dist.get_world_size(), None):
        model = parts_of("1f1b", 1, 1)
        set_microbatches(3)
        with pytest.raises(AssertionError, match="microbatch 2 of 2 samples needs a batch of 6, got 5"):
            STEPS["1f1b"](
                step_function, [tensor[:5] for tensor in batch_of(3)], model, forward_only=False, tensor_shape=SHAPE
            )
        assert all(param.grad is None for param in model[0].parameters())


def other_steps_are_an_error(rank: int) -> None:
    """Different steps raise an error in every stage before a microbatch is run."""
    last = dist.get_world_size() - 1
    for mine, forward_only, words in (
        (4, False, rf"number of microbatches is 3 in rank 0 and 4 in rank {last}"),
        (3, True, rf"forward_only is False in rank 0 and True in rank {last}"),
    ):
        with pipeline(dist.get_world_size(), None):
            model = parts_of("1f1b", 1, 1)
            count = mine if rank == last else 3
            set_microbatches(count)
            with pytest.raises(RuntimeError, match=rf"pipeline steps of rank 0 and rank {last} differ: {words}"):
                STEPS["1f1b"](
                    step_function,
                    batch_of(count),
                    model,
                    forward_only=forward_only and rank == last,
                    tensor_shape=SHAPE,
                )
            assert all(param.grad is None for param in model[0].parameters())


class Sender(Part):
    """A stage whose second microbatch, or its output, is longer."""

    cut = 0

    def forward(self, x: Tensor | None) -> Tensor:
        self.cut -= 1
        return super().forward(x)[: LENGTH - (self.cut < 0)]


def wrong_shapes_are_named(rank: int) -> None:
    """Every stage raises; the stages at both ends of the message name the shapes."""
    for cut, microbatch, expected in ((0, 0, "expects (3, 2, 6)"), (1, 1, "of earlier microbatches (3, 2, 6)")):
        with pipeline(dist.get_world_size(), None):
            model = parts_of("1f1b", 1, 1)
            if rank == 0:
                model[0].__class__, model[0].cut = Sender, cut
            set_microbatches(3)
            with pytest.raises(RuntimeError) as found:
                STEPS["1f1b"](step_function, batch_of(3), model, forward_only=False, tensor_shape=SHAPE)
            if rank == 0 or (rank == 1 and cut == 0):
                words = f"pipeline stage 0, microbatch {microbatch}: the output is (2, 2, 6) torch.float32"
                assert words in str(found.value)
                assert expected in str(found.value)
            else:
                assert "Timed out" not in str(found.value)
            dist.barrier()


def failure_ends_all_stages(rank: int) -> None:
    """All stages fail without waiting for the timeout and leave all contexts; the failed process stays alive."""
    held = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        held.append(True)
        try:
            yield
        finally:
            held.pop()

    ranks = dist.get_world_size()
    for name, chunks in (("1f1b", 1), ("interleaved", 2)):
        with pipeline(ranks, None if chunks == 1 else chunks):
            calls = []

            def failing(batch: Any, model: nn.Module, calls: list = calls) -> Any:
                calls.append(1)
                if rank == ranks - 1 and len(calls) == 3:
                    raise ZeroDivisionError("in a stage")
                return step_function(batch, model)

            set_microbatches(2 * ranks)
            parallel_state.get_virtual_pipeline_model_parallel_rank()
            with pytest.raises(ZeroDivisionError if rank == ranks - 1 else RuntimeError) as found:
                STEPS[name](
                    failing,
                    batch_of(2 * ranks),
                    parts_of(name, chunks, 1),
                    forward_only=False,
                    custom_sync_context_handler=context,
                )
            assert not held
            assert parallel_state.get_virtual_pipeline_model_parallel_rank() == (None if chunks == 1 else 0)
            if rank != ranks - 1:
                assert "Timed out" not in str(found.value)
                assert "pipeline stage" in str(found.value)
            dist.barrier()


def sync_handlers(rank: int) -> None:
    """The caller's context is left, and its functions are called, at the times of upstream's contract."""
    ranks = dist.get_world_size()
    events: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        events.append("enter")
        yield
        events.append(f"leave {len(seen)}")

    seen: list[int] = []
    synchronized: list[int] = []
    with pipeline(ranks, None):
        model = parts_of("1f1b", 1, 1)
        model[0].register_full_backward_hook(lambda *_: seen.append(1))
        set_microbatches(4)
        STEPS["1f1b"](
            step_function,
            batch_of(4),
            model,
            forward_only=False,
            custom_sync_context_handler=context,
            custom_grad_sync_func=lambda: events.append("sync"),
        )
        assert len(seen) == 4 or rank == 0  # the first stage's input has no gradient
        assert [event.split()[0] for event in events] == (
            ["enter", "leave"] if rank == 0 else ["enter", "leave", "sync"]
        )
        assert rank == 0 or "leave 4" in events
    for grad_sync in (False, True):
        events.clear()
        synchronized.clear()
        with pipeline(ranks, 2):
            model = parts_of("interleaved", 2, 1)
            set_microbatches(ranks)
            STEPS["interleaved"](
                step_function,
                batch_of(ranks),
                model,
                forward_only=False,
                custom_sync_context_handler=context,
                custom_grad_sync_func=(lambda params: events.append(f"sync {len(params)}")) if grad_sync else None,
                custom_param_sync_func=lambda params: synchronized.append(id(params[0])),
            )
            assert synchronized == [id(next(part.parameters())) for part in model]
            kinds = [event.split()[0] for event in events]
            between = ["leave", "sync", "enter"] if grad_sync else ["leave", "enter"]
            assert kinds == ["enter", *between, *between, "leave"]


def partial_checkpoints(rank: int) -> None:
    """As upstream, the first passes of each window of warm-up + 1 passes over all chunks of a rank are partial."""
    ranks = dist.get_world_size()
    given: list[bool] = []

    def step(batch: Any, model: nn.Module, checkpoint: bool) -> Any:
        given.append(checkpoint)
        return step_function(batch, model)

    # All passes are a warm-up where interleaved schedules have as many microbatches as ranks.
    warmups = [("1f1b", 1, 4, ranks - rank - 1), ("interleaved", 2, ranks, 2 * ranks)]
    warmups.append(("interleaved", 2, 2 * ranks, 2 * (ranks - rank - 1) + ranks))
    for name, chunks, microbatches, warmup in warmups:
        for partial in (1, 3):
            with pipeline(ranks, chunks if chunks > 1 else None):
                set_microbatches(microbatches)
                options = {"forward_only": False, "num_micro_batches_with_partial_activation_checkpoints": partial}
                given.clear()
                STEPS[name](step, batch_of(microbatches), parts_of(name, chunks, 1), **options)
            expected = [index % (warmup + 1) >= partial for index in range(microbatches * chunks)]
            assert given == expected, (name, microbatches, partial)


def exchanges(rank: int) -> None:
    """All nine functions run in all processes at once; the pipeline is a ring for the last three."""
    ranks = dist.get_world_size()
    mine = torch.full((2, 3), float(rank), dtype=torch.float64)
    before, after = float((rank - 1) % ranks), float((rank + 1) % ranks)
    with pipeline(ranks, None):
        for options in ({}, {"dtype": torch.float64}, {"dtype": torch.float64, "async_comm": True}):

            def value(found: Any) -> float | None:
                if isinstance(found, p2p_communication.FutureTensor):
                    found = found.get()
                assert found is None or (found.requires_grad and found.shape == (2, 3))
                return None if found is None else found[1, 2].item()

            first, last = rank == 0, rank == ranks - 1
            found = p2p_communication.recv_forward((2, 3), **options)
            p2p_communication.send_forward(mine, tensor_shape=(2, 3), **options)
            assert value(found) == (None if first else before)
            found = p2p_communication.recv_backward((2, 3), **options)
            p2p_communication.send_backward(mine, (2, 3), **options)
            assert value(found) == (None if last else after)
            if rank % 2 == 0:
                found = p2p_communication.send_forward_recv_backward(mine, (2, 3), **options)
                assert value(found) == (None if last else after)
            else:
                found = p2p_communication.send_backward_recv_forward(mine, (2, 3), **options)
                assert value(found) == before
            dist.barrier()
            ring = p2p_communication.send_forward_recv_forward(mine, True, (2, 3), **options)
            assert value(ring) == before
            ring = p2p_communication.send_backward_recv_backward(mine, True, (2, 3), **options)
            assert value(ring) == after
            both = p2p_communication.send_forward_backward_recv_forward_backward(
                mine, -mine, True, True, (2, 3), **options
            )
            assert [value(each) for each in both] == [before, -after]
        one, handles = p2p_communication.send_forward_recv_forward(
            mine, True, (2, 3), dtype=torch.float64, overlap_p2p_comm=True
        )
        for handle in handles:
            handle.wait()
        assert one[0, 0] == before
        with pytest.raises(RuntimeError, match="tensor_shape"):
            p2p_communication.send_forward_recv_forward(None, True, None)
        dist.barrier()
        with pytest.raises(RuntimeError, match=r"expected \(2, 4\) torch.float64, but \(2, 3\) torch.float64 comes"):
            p2p_communication.send_forward_recv_forward(mine, True, (2, 4))
        dist.barrier()


def a_killed_stage(rank: int) -> None:
    """One process ends, and the others report it and end. This must be the last check."""
    ranks = dist.get_world_size()
    path = Path(f"rank{rank}.json")
    results = json.loads(path.read_text()) if path.exists() else {}
    calls = []

    def failing(batch: Any, model: nn.Module) -> Any:
        calls.append(1)
        if rank == 1 and len(calls) == 2:
            path.write_text(json.dumps({**results, a_killed_stage.__name__: ""}))
            os.kill(os.getpid(), signal.SIGKILL)
        return step_function(batch, model)

    parallel_state.initialize_model_parallel(1, ranks)
    set_microbatches(2 * ranks)
    with pytest.raises(RuntimeError) as found:
        STEPS["1f1b"](failing, batch_of(2 * ranks), parts_of("1f1b", 1, 1), forward_only=False)
    assert "Timed out" not in str(found.value)
    path.write_text(json.dumps({**results, a_killed_stage.__name__: ""}))
    os._exit(0)


def helpers(rank: int) -> None:
    ranks = dist.get_world_size()
    with pipeline(ranks, None):
        model = parts_of("1f1b", 1, 1)
        expected = sum(param.double().square().sum() for param in Part(range(ranks)).parameters()).sqrt()
        assert utils.calc_params_l2_norm(model, bf16=False) == pytest.approx(expected.item(), rel=1e-6)
        for part in model:
            part.double()
        assert utils.calc_params_l2_norm(model, bf16=False) == pytest.approx(expected.item(), rel=1e-12)
    with pipeline(1, None):
        losses = [torch.tensor(float(rank)), torch.tensor(1.0)]
        assert utils.average_losses_across_data_parallel_group(losses).tolist() == [(ranks - 1) / 2, 1.0]
    assert utils.is_last_rank() == (rank == ranks - 1)
    assert (SAMPLES, HIDDEN) == (2, 6)


CHECKS = {
    check.__name__: check
    for check in (
        every_schedule,
        forward_only,
        autocast_and_scaler,
        frozen_stages,
        a_batch_that_is_too_short,
        other_steps_are_an_error,
        sync_handlers,
        partial_checkpoints,
        exchanges,
        helpers,
        wrong_shapes_are_named,
        failure_ends_all_stages,
        a_killed_stage,
    )
}
