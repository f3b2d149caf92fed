"""Checks in four processes that checkpoints of one split load into others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from apex.contrib.optimizers import DistributedFusedAdam
from apex.optimizers import FusedAdam
from apex.transformer import checkpoint, parallel_state
from apex.transformer import tensor_parallel as tp
from tests.parallel.processes import everywhere
from tests.support import forked_writer
from tests.support.grids import full_grids
from tests.support.harness import sum_error

from .small_gpt import SMOOTH, TERMS, Run, parts, split, whole

# Called in each process before it is connected to the others.
BEFORE = forked_writer.prepare
# Tensor-parallel ranks, stages, chunks and context-parallel ranks; the rest of the four processes are replicas.
LAYOUTS = [(4, 1, None, 1), (1, 4, None, 1), (1, 2, 2, 1), (2, 1, None, 2)]
if full_grids():
    LAYOUTS.append((2, 1, None, 1))


def in_all_stages(loss: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())
    return loss


def reshards(rank: int) -> None:
    """Every layout has the same bits after loading, and its next step is the same."""
    with split(2, 2):
        run = Run(4, **SMOOTH)
        run.model[0].steps += 3
        for _ in range(2):
            run.train()
        run.save(Path("two"))
        loss = in_all_stages(run.train())
        run.save(Path("three"))
        Path("loss").write_text(str(loss.item()))
    two, three = whole(Path("two")), whole(Path("three"))
    assert two["model.layers.3.up.weight"].shape == (16, 8)
    for tensor, pipeline, chunks, context in LAYOUTS:
        with split(tensor, pipeline, chunks, context):
            run = Run(4, **SMOOTH)
            run.load(Path("two"))
            assert run.step == 2
            assert all(part.steps.tolist() == [3.0, 3.0] for part in run.model)
            for key, view, place in parts(run):
                assert torch.equal(view, two[key][place]), key
            rtol = 0.0 if tensor == 2 else sum_error(loss.dtype, TERMS)
            torch.testing.assert_close(in_all_stages(run.train()), loss, rtol=rtol, atol=0)
            for key, view, place in parts(run):
                torch.testing.assert_close(view, three[key][place], rtol=1e-5, atol=1e-6, msg=key)
                # Without stages both gradients of the tied embedding are added up in another order.
                same = tensor == 2 and "embedding" not in key
                assert not same or torch.equal(view, three[key][place]), key


def zero(params: Any, **options: Any) -> DistributedFusedAdam:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return DistributedFusedAdam(params, process_group=group, bucket_cap_mb=0.001, **options)


def every_optimizer(rank: int) -> None:
    """State, master weights and the next step have the same bits in other layouts."""
    cases = [
        (torch.optim.AdamW, {}, (2, 2), (4, 1)),
        (FusedAdam, {"master_weights": True}, (1, 1), (2, 2)),
        (FusedAdam, {"amp_level": "O2"}, (2, 1), (1, 2)),
        (zero, {}, (2, 1, None, 2), (1, 1)),
        (zero, {"amp_level": "O5"}, (1, 2), (2, 1)),
    ]
    if full_grids():
        cases += [(FusedAdam, {"amp_level": "O5"}, (1, 2), (4, 1)), (zero, {}, (2, 1), (1, 1))]
    for number, (optimizer, options, first, second) in enumerate(cases):
        with split(*first):
            run = Run(2, optimizer, **options)
            for name in (f"{number}-before", f"{number}-after"):
                run.train_each()
                # The ZeRO optimizers' are copied, and written while the next step changes everything.
                run.save(Path(name), use_async=optimizer is zero)
        after = whole(Path(f"{number}-after"))
        with split(*second):
            run = Run(2, optimizer, **options)
            run.load(Path(f"{number}-before"))
            run.train_each()
            for key, view, place in parts(run):
                assert torch.equal(view, after[key][place]), (number, key)


def errors(rank: int) -> None:
    """All processes raise before anything is changed, even if only one of them has the fault."""
    with split(2, 2):
        run = Run(4)
        embedding, kept = run.model[0].get_submodule("head" if rank > 1 else "embedding").weight, Path("two")
        before = [(key, view.clone()) for key, view, _ in parts(run)], torch.get_rng_state()
        with pytest.raises(FileNotFoundError, match="no checkpoint nowhere"):
            run.load(Path("nowhere"))
        with pytest.raises(RuntimeError, match=r"it has no clock; it has data, scaler, scheduler beside the model"):
            checkpoint.load(kept, run.model, clock=run.scaler)
        with pytest.raises(RuntimeError, match="data must have load_state_dict, got dict; plain values are returned"):
            checkpoint.load(kept, run.model, data={})
        with pytest.raises(RuntimeError, match=r"lacks 16 parameters or buffers: layers.4.down.bias, layers.4.down.w"):
            checkpoint.load(kept, Run(6).model)
        with pytest.raises(RuntimeError, match=r"it has, and the model not, 16 parameters or buffers: layers.2.down"):
            checkpoint.load(kept, Run(2).model)
        with pytest.raises(RuntimeError, match="its optimizer is FusedAdam, not AdamW"):
            Run(4, torch.optim.AdamW).load(kept)
        other = Run(4)
        other.optimizer.param_groups.reverse()
        with pytest.raises(RuntimeError, match="positions was in the optimizer's group 0, and is in group 1"):
            other.load(kept)
        embedding.vocab_size = 9 if rank == 3 else 10
        with pytest.raises(
            RuntimeError, match=r"rank 3 had .*embedding.weight is torch.float32 \(10, 8\) in it, but .*9"
        ):
            run.load(kept)
        embedding.vocab_size = 10
        run.model[0].layers[0].down.bias.data = run.model[0].layers[0].down.bias.data.double()
        with pytest.raises(
            RuntimeError, match=r"down.bias is torch.float32 \(8,\) in it, but torch.float64 \(8,\) here"
        ):
            run.load(kept)
        run.model[0].layers[0].down.bias.data = run.model[0].layers[0].down.bias.data.float()
        with pytest.raises(RuntimeError, match="data holds what torch"):
            checkpoint.save("new", run.model, data=Path())
        assert torch.equal(torch.get_rng_state(), before[1])
        for (key, view, _), (_, old) in zip(parts(run), before[0], strict=True):
            assert torch.equal(view, old), key
        for layer in run.model[0].layers:
            del layer.layer_number
        with pytest.raises(RuntimeError, match="chunk 0 of pipeline rank 0 and chunk 0 of rank 1 both hold layers"):
            run.save(Path("new"))
        assert not Path("new").exists()


def random_numbers(rank: int) -> None:
    """Another layout seeds anew, reproducibly: tensor-parallel ranks share one stream, and each has its own stream."""
    drawn = []
    with split(4, 1):
        run = Run(4)
        for _ in range(2):
            run.load(Path("two"))
            with tp.get_cuda_rng_tracker().fork():
                drawn.append(torch.rand(2))
            drawn.append(torch.rand(2))
            torch.manual_seed(1)
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])
    common, own = everywhere(drawn[1]), everywhere(drawn[0])
    assert all(torch.equal(each, common[0]) for each in common)
    assert len({tuple(each.tolist()) for each in (*own, common[0])}) == 5


CHECKS = {check.__name__: check for check in (reshards, every_optimizer, errors, random_numbers)}
