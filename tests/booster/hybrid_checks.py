"""Models that are split over processes, by layers and by stages, train as plain PyTorch does in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex import amp
from apex.booster._whole_state import whole_model, whole_optimizer
from apex.booster.plugin import (
    GradientCheckpointConfig,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    PipelineGradientCheckpointConfig,
)
from apex.transformer import parallel_state
from apex.transformer import tensor_parallel as tp
from tests.booster import problem
from tests.booster.problem import CLASSES, FEATURES, HIDDEN, assert_equal, batch
from tests.booster.problem import booster as make
from tests.booster.process_checks import TOLERANCE, ended, precision_of
from tests.parallel.processes import Check, assert_same_everywhere
from tests.support.grids import pairs

STEPS, MICROBATCHES, BLOCKS = 3, 4, 4


class Block(nn.Module):
    """x + down(tanh(up(x))), whole or divided among tensor-parallel ranks."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        if split:
            self.up: nn.Module = tp.ColumnParallelLinear(
                HIDDEN, 2 * HIDDEN, gather_output=False, use_cpu_initialization=True
            )
            self.down: nn.Module = tp.RowParallelLinear(
                2 * HIDDEN, HIDDEN, input_is_parallel=True, use_cpu_initialization=True
            )
        else:
            self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        result = self.down(torch.tanh(hidden[0] if isinstance(hidden, tuple) else hidden))
        return x + (result[0] if isinstance(result, tuple) else result)


def model_of(split: bool, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(FEATURES, HIDDEN), *[Block(split) for _ in range(BLOCKS)], nn.Linear(HIDDEN, CLASSES)]
    return nn.Sequential(*layers).to(problem.DEVICE)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    groups = [[param for name, param in named if (param.dim() > 1) == decays] for decays in (True, False)]
    return torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "lr": 2e-3}], lr=1e-3, eps=1e-3
    )


def criterion(outputs: Tensor, inputs: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs, inputs[1])


@functools.cache
def plain(steps: int, split: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Return the weights before and after training in one process, and the losses."""
    parallel_state.destroy_model_parallel()
    start = model_of(False)
    if split:  # their biases are zero, and their weights drawn in another way
        parallel_state.initialize_model_parallel(1, 1)
        start.load_state_dict({key: value for key, value in model_of(True).state_dict().items() if value is not None})
        parallel_state.destroy_model_parallel()
    before = {name: value.detach().cpu().clone() for name, value in start.state_dict().items()}
    optimizer, losses = adam(start), []
    for step in range(steps):
        optimizer.zero_grad()
        inputs = batch(step)
        loss = criterion(start(inputs[0]), inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(start.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return before, {name: value.cpu() for name, value in start.state_dict().items()}, losses


def boosted(precision: str, seed: int = 0, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    plugin = HybridParallelPlugin(
        precision=precision if precision in ("fp32", "fp16_naive") else precision_of(precision),
        num_microbatches=MICROBATCHES if options.get("pp_size", 1) > 1 else 2,
        **{"initial_scale": 2.0**12, **options},
    )
    booster = make(plugin=plugin)
    model = model_of(options.get("tp_size", 1) > 1, seed)
    return booster, booster.boost(model, adam(model), criterion)


def train(booster: Any, parts: tuple[Any, ...], steps: range) -> list[float]:
    model, optimizer = parts[:2]
    ranks, rank = booster.plugin.data_place()
    losses = []
    for step in steps:
        optimizer.zero_grad()
        data = iter([tuple(tensor[rank::ranks] for tensor in batch(step))])
        found = booster.execute_pipeline(data, model, parts[2], optimizer, return_loss=True)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        if found["loss"] is not None:
            losses.append(found["loss"].item())
    return losses


def is_last() -> bool:
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def equality(precision: str, **options: Any) -> Check:
    def check(rank: int) -> None:
        before, after, losses = plain(STEPS, options.get("tp_size", 1) > 1)
        with ended():
            booster, parts = boosted(precision, **options)
            assert_equal(whole_model(parts[0], copies=True), before)
            found = train(booster, parts, range(STEPS))
            if booster.plugin.data_place()[0] == 1 and options.get("pp_style") != "zbv":
                assert len(found) == (STEPS if is_last() else 0)
            torch.testing.assert_close(found, losses[: len(found)], rtol=0, atol=0.5)
            weights = whole_model(parts[0])
            assert_same_everywhere(list(weights.values()))
            assert weights.keys() == after.keys()
            error = sum(float((weights[name] - after[name]).square().sum()) for name in after) ** 0.5
            length = sum(float((before[name] - after[name]).square().sum()) for name in after) ** 0.5
            assert error <= TOLERANCE[precision] * length, error / length

    return check


def resumes(precision: str, shard: bool, **options: Any) -> Check:
    """Return a check that a run resumes bit for bit, and that every other layout loads its whole checkpoint."""

    def check(rank: int) -> None:
        with ended():
            folder = Path(f"hybrid {precision} {' '.join(map(str, options.values()))}")
            booster, parts = boosted(precision, **options)
            train(booster, parts, range(2))
            booster.save_model(parts[0], folder / "model", shard=shard)
            booster.save_optimizer(parts[1], folder / "optimizer", shard=shard)
            saved = whole_model(parts[0], copies=True), whole_optimizer(parts[1], copies=True)
            train(booster, parts, range(2, STEPS))
            expected = whole_model(parts[0], copies=True), whole_optimizer(parts[1], copies=True)
            amp.shutdown()
            booster, parts = boosted(precision, seed=1, **options)
            booster.load_model(parts[0], folder / "model")
            booster.load_optimizer(parts[1], folder / "optimizer")
            train(booster, parts, range(2, STEPS))
            assert_equal((whole_model(parts[0]), whole_optimizer(parts[1])), expected)
            amp.shutdown()
            parallel_state.destroy_model_parallel()
            booster, parts = boosted(precision, seed=1)  # neither layers nor stages are split now
            booster.load_model(parts[0], folder / "model")
            booster.load_optimizer(parts[1], folder / "optimizer")
            assert_equal(whole_model(parts[0]), {name: saved[0][name] for name in whole_model(parts[0])})
            moments = [
                {
                    name: state["state"][key]["exp_avg"]
                    for group in state["param_groups"]
                    for name, key in zip(group["param_names"], group["params"], strict=True)
                }
                for state in (whole_optimizer(parts[1]), saved[1])
            ]
            assert_equal(moments[0], {name: moments[1][name] for name in moments[0]})

    return check


def overflow(precision: str, **options: Any) -> Check:
    """Check that an overflow in one process, or in its loss, skips the step in all."""

    def check(rank: int) -> None:
        with ended():
            booster, (model, optimizer, *_) = boosted(precision, **options)
            before = whole_model(model, copies=True)
            for step in range(3):
                optimizer.zero_grad()
                train_data = iter([batch(step)])
                booster.execute_pipeline(train_data, model, criterion, optimizer)
                if step < 2 and rank == dist.get_world_size() - 1:
                    params = [param for param in model.parameters() if param.grad is not None]
                    params[-1].grad.fill_(torch.inf)
                optimizer.step()
                after = whole_model(model)
                assert any(not torch.equal(after[name], before[name]) for name in before) == (step == 2), step
            state = optimizer.scaler_state()
            scale = state["amp"]["loss_scaler0"]["loss_scale"] if "amp" in state else state["scale"]
            assert_same_everywhere([torch.tensor(scale)])

    return check


def trains_without_pipelines(rank: int) -> None:
    """Train with `booster.backward`, as with every other plugin, and `no_sync`."""
    _, after, _ = plain(STEPS, True)
    for zero_stage in (0, 1):
        with ended():
            booster, (model, optimizer, *_) = boosted("fp32", tp_size=2, zero_stage=zero_stage)
            ranks, part = booster.plugin.data_place()
            for step in range(STEPS):
                optimizer.zero_grad()
                halves = [[half[part::ranks] for half in tensor.chunk(2)] for tensor in batch(step)]
                for index, inputs in enumerate(zip(*halves, strict=True)):
                    loss = criterion(model(inputs[0]), inputs) / 2
                    if index == 0:
                        with booster.no_sync(model, optimizer):
                            booster.backward(loss, optimizer)
                    else:
                        booster.backward(loss, optimizer)
                norm = optimizer.clip_grad_by_norm(1.0)
                assert_same_everywhere([norm])
                optimizer.step()
            weights = whole_model(model)
            torch.testing.assert_close({name: weights[name] for name in after}, after, rtol=0, atol=1e-5)


def evaluates(rank: int) -> None:
    with ended():
        booster, (model, _, _, _, _) = boosted("fp32", pp_size=2)
        with torch.no_grad():
            found = booster.execute_pipeline(iter([batch(0)]), model, criterion, None, True, True)
        expected = model_of(False)(batch(0)[0])
        assert (found["loss"] is None) == (found["outputs"] is None) == (not is_last())
        if is_last():
            torch.testing.assert_close(found["outputs"], expected)
            torch.testing.assert_close(found["loss"], criterion(expected, batch(0)))
        by_name = {"x": batch(0)[0], "targets": batch(0)[1]}
        named = booster.execute_pipeline(
            iter([by_name]), model, lambda outputs, inputs: nn.functional.cross_entropy(outputs, inputs["targets"])
        )
        assert (named["loss"] is None) == (not is_last())
        with pytest.raises(ValueError, match="a batch of 63 samples is not a number of microbatches"):
            booster.execute_pipeline(iter([tuple(tensor[:63] for tensor in batch(0))]), model, criterion)


def measures(rank: int) -> None:
    """Check that `get_grad_norm` returns the last step's norm and changes nothing."""
    for options in ({"tp_size": 2}, {"pp_size": 2}, {"pp_size": 2, "zero_stage": 1}):
        with ended():
            found: dict[bool, dict[str, Tensor]] = {}
            for asks in (False, True):
                booster, (model, optimizer, *_) = boosted("fp16_naive", **options)
                for step in range(2):
                    booster.execute_pipeline(iter([batch(step)]), model, criterion, optimizer)
                    before = optimizer.clip_grad_by_norm(1e6).item() if asks else 0.0
                    optimizer.step()
                    assert not asks or optimizer.get_grad_norm() == before > 0
                    optimizer.zero_grad()
                    assert not asks or optimizer.get_grad_norm() == before
                    assert_same_everywhere([torch.tensor(before)])
                found[asks] = whole_model(model, copies=True)
            assert_equal(found[True], found[False])


def saves_others_beside_stages(rank: int) -> None:
    """Save a model without stages in processes that have just trained the stages of another model."""
    with ended():
        booster, parts = boosted("fp32", pp_size=2)
        train(booster, parts, range(1))
        for precision in ("fp32", "fp16_naive"):
            other, model = make(plugin=LowLevelZeroPlugin(1, precision)), problem.net()
            pieces = other.boost(model, problem.adam(model), nn.CrossEntropyLoss())
            problem.train(other, pieces, range(1), rank, dist.get_world_size())
            folder = Path(f"beside stages {precision}")
            other.save_model(pieces[0], folder / "model", shard=True)
            other.save_optimizer(pieces[1], folder / "optimizer")
            saved = whole_model(pieces[0], copies=True), whole_optimizer(pieces[1], copies=True)
            assert saved[0].keys() == problem.net().state_dict().keys()
            problem.train(other, pieces, range(1, 2), rank, dist.get_world_size())
            other.load_model(pieces[0], folder / "model")
            other.load_optimizer(pieces[1], folder / "optimizer")
            assert_equal((whole_model(pieces[0]), whole_optimizer(pieces[1])), saved)
            with pytest.raises(RuntimeError, match=r"does not fit the model: missing .*, unexpected"):
                other.load_model(other.boost(nn.Linear(2, 2))[0], folder / "model")
        assert whole_model(parts[0]).keys() == model_of(False).state_dict().keys()


def is_refused(rank: int) -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"tp_size": 3}, ValueError, "tp_size=3 times pp_size=1 must divide"),
        ({"pp_size": 2}, ValueError, "one of num_microbatches and microbatch_size is needed"),
        ({"pp_size": 2, "num_microbatches": 2, "zero_stage": 2}, ValueError, "zero_stage=2 must be 0, 1 or 2"),
        ({"pp_style": "zbv"}, ValueError, "pp_style='zbv' with num_model_chunks=1"),
        (
            {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring"},
            ValueError,
            "needs tp_size > 1: 'ring' splits sequences",
        ),
        (
            {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn", "sp_size": 4},
            ValueError,
            "times sp_size=4 must divide the number of processes",
        ),
        ({"no_such": 1}, TypeError, "no_such"),
        ({"sp_size": 2}, ValueError, "sp_size=2 needs enable_sequence_parallelism"),
    ]
    for options, kind, message in cases:
        with pytest.raises(kind, match=message):
            HybridParallelPlugin(**options)
    with ended():
        booster = make(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2))
        with pytest.raises(ValueError, match=r"must be an nn\.Sequential, or 1 modules with set_input_tensor"):
            booster.boost(nn.Linear(2, 2))
    with ended():
        booster = make(plugin=HybridParallelPlugin(tp_size=2))
        with pytest.raises(ValueError, match="tp_size=2, but no layer of the model is split"):
            booster.boost(model_of(False))


def ranks_that_differ(rank: int) -> None:
    """Check that `boost` compares numbers of microbatches, and the first step tensor-parallel learning rates."""
    with ended():
        booster = make(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2 + 2 * rank, precision="fp32"))
        with pytest.raises(RuntimeError, match="num_microbatches of the plugin is 2 in rank 0 and 4 in rank 1"):
            booster.boost(model_of(False))
    with ended():
        booster, parts = boosted("fp32", tp_size=2)
        parts[1].param_groups[0]["lr"] = 0.25 + rank
        with pytest.raises(RuntimeError, match=r"lr of parameter group 0 is 0.25 in rank 0 and 1.25 in rank 1"):
            train(booster, parts, range(1))


def checkpoints_layers(rank: int) -> None:
    """Check that stage 0 computes one of its two layers twice, and stage 1 none of its four."""
    _, after, _ = plain(STEPS, False)
    with ended():
        config = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1, 0])
        options = {"num_layers_per_stage": [2, 4], "gradient_checkpoint_config": config}
        booster, parts = boosted("fp32", pp_size=2, **options)
        layers = list(parts[0].unwrap().children())
        assert len(layers) == (2, 4)[rank]
        assert ["forward" in vars(layer) for layer in layers] == ([True, False], [False] * 4)[rank]
        train(booster, parts, range(STEPS))
        torch.testing.assert_close(whole_model(parts[0]), after)


def _checks() -> dict[str, Check]:
    layouts: dict[str, dict[str, Any]] = {
        "tensor": {"tp_size": 2},
        "tensor zero": {"tp_size": 2, "zero_stage": 1},
        "pipeline": {"pp_size": 2},
        "pipeline zero": {"pp_size": 2, "zero_stage": 1},
    }
    checks: dict[str, Check] = {}
    precisions, scaled = tuple(TOLERANCE), ("fp16", "fp16_apex", "fp16_naive")
    for layout, precision in (*pairs(layouts, precisions, each=1), *pairs(layouts, precisions, each=1, first=2)):
        checks[f"equal {layout} {precision}"] = equality(precision, **layouts[layout])
    for precision, layout in pairs(scaled, ("tensor", "pipeline"), each=1):
        checks[f"overflow {layout} {precision}"] = overflow(precision, **layouts[layout])
    for layout in ("tensor zero", "pipeline zero"):
        checks[f"overflow {layout} fp16"] = overflow("fp16", **layouts[layout])
    for layout, precision in pairs(layouts, ("fp32", "fp16_naive"), each=1):
        checks[f"resumes {layout} {precision}"] = resumes(precision, precision == "fp32", **layouts[layout])
    checks["interleaved"] = equality("fp32", pp_size=2, pp_style="interleaved", num_model_chunks=2)
    checks["zero bubble"] = equality("fp16_naive", pp_size=2, pp_style="zbv", num_model_chunks=2)
    exchanges = {"zero_bucket_size_in_m": 0.001, "overlap_communication": False, "overlap_allgather": True}
    checks["zero with other exchanges"] = equality("fp32", zero_stage=1, **exchanges)
    half = {"communication_dtype": torch.bfloat16, "gradient_checkpoint_config": GradientCheckpointConfig(1.0)}
    checks["zero with small gradients"] = equality("bf16", tp_size=2, zero_stage=1, **half)
    checks["checkpoints layers"] = checkpoints_layers
    checks["without pipelines"] = trains_without_pipelines
    checks["evaluates"] = evaluates
    checks["measures"] = measures
    checks["saves others beside stages"] = saves_others_beside_stages
    checks["is refused"] = is_refused
    checks["ranks that differ"] = ranks_that_differ
    return checks


CHECKS: dict[str, Callable[[int], None]] = _checks()
