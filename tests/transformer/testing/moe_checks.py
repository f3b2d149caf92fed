"""A GPT with experts divided over processes beside one process that runs the same microbatches."""

from __future__ import annotations

import contextlib
import functools
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.contrib.optimizers import DistributedFusedAdam
from apex.optimizers import FusedAdam
from apex.transformer import checkpoint, finalize_model_grads, parallel_state, tensor_parallel
from apex.transformer._resharding.gathered import full_shape, full_tensor, local_part
from apex.transformer.moe import MoELayer
from apex.transformer.pipeline_parallel import build_model, get_forward_backward_func, utils
from apex.transformer.testing.standalone_gpt import gpt_model_provider
from tests.support.grids import full_grids
from tests.transformer.small_gpt import parts, whole

from .gpt import LENGTH, WORDS, Layout, config_of, groups, reference, step_function, train_in, worst_difference

TOLERANCE = 1e-12
EXPERTS = {
    "num_layers": 2,
    "activation": "swiglu",
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 12,
    "params_dtype": torch.float64,
}
FOUR = {"num_layers": 4}
# Losses that parts of a sequence add up to, and a shared expert.
SOFTMAX = {
    **EXPERTS,
    "moe_aux_loss_coeff": 0.05,
    "moe_z_loss_coeff": 0.01,
    "moe_shared_expert_intermediate_size": 16,
    "moe_shared_expert_gate": True,
    "moe_layer_freq": 2,
}
# Experts in groups, chosen with a bias; tokens of recomputed layers must not count twice.
SIGMOID = {
    **EXPERTS,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.02,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk": 4,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.05,
    "recompute": "full",
}
# Tokens of a microbatch are dropped; every rank must route whole sequences.
CAPACITY = {**EXPERTS, "moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": "position"}
PADDED = {**CAPACITY, "moe_pad_expert_input_to_capacity": True, "moe_token_drop_policy": "probs"}
TO_ALL = {"moe_token_dispatcher_type": "alltoall"}

LAYOUTS: dict[int, list[tuple[Layout, dict[str, Any], dict[str, Any]]]] = {
    2: [
        (Layout(expert=2), SOFTMAX, {}),
        (Layout(expert=2), SIGMOID, TO_ALL),
        (Layout(expert_tensor=2), SOFTMAX, TO_ALL),
        (Layout(2, sequence=True), SIGMOID, {}),
        (Layout(1, 2, "1f1b"), SIGMOID, {}),
    ],
    4: [
        (Layout(expert=4), CAPACITY, TO_ALL),
        (Layout(expert=2), CAPACITY, {}),
        (Layout(expert=2, expert_tensor=2), PADDED, TO_ALL),
        (Layout(2, sequence=True, expert=2), SOFTMAX, TO_ALL),
        (Layout(2, sequence=True, expert=4, expert_tensor=1), SIGMOID, TO_ALL),
        (Layout(1, 2, "zb_h1", expert=2), SOFTMAX, TO_ALL),
        (Layout(1, 2, "interleaved", 2, expert=2), {**SIGMOID, **FOUR}, {}),
        (Layout(context=2, expert=4), SOFTMAX, TO_ALL),
    ],
    8: [
        (Layout(2, 2, "1f1b", 1, True, expert=2), SIGMOID, TO_ALL),
        (Layout(2, 2, "zb_v", 2, True, expert=4, expert_tensor=1), {**SOFTMAX, **FOUR}, {}),
    ],
}


def check(number: int, rank: int) -> None:
    """Compare losses, gradients of each step, final parameters and biases."""
    cases = LAYOUTS[dist.get_world_size()]
    if number >= len(cases):
        return
    layout, options, dispatcher = cases[number]
    alone = reference(layout.layers, **options)
    with groups(layout):
        worst, name = worst_difference(train_in(layout, **options, **dispatcher), alone)
    assert worst <= TOLERANCE, f"{layout}, {name}: off by {worst:.2g} of its largest number"
    if "moe_router_enable_expert_bias" in options:
        biases = [value for name, value in alone.parameters.items() if name.endswith("expert_bias")]
        assert len(biases) == options["num_layers"]
        assert all(bias.dtype == torch.float32 and bias.abs().max() > 0.015 for bias in biases)


class Saved(NamedTuple):
    """A model and its optimizer or optimizers, as `parts` takes them."""

    model: list[nn.Module]
    optimizer: Any

    @classmethod
    def of(cls, layout: Layout, several: bool = False) -> Saved:
        options = {**SIGMOID, **TO_ALL, "recompute": None, "moe_layer_freq": 2}
        config = config_of(2, sequence_parallel=layout.sequence, **options)
        model = build_model(gpt_model_provider, False, config=config)
        if not several:
            return cls(model, FusedAdam([p for chunk in model for p in chunk.parameters()], lr=0.01))
        named = [pair for chunk in model for pair in chunk.named_parameters()]
        groups = (parallel_state.get_data_parallel_group(True), parallel_state.get_expert_data_parallel_group())
        return cls(
            model,
            [
                DistributedFusedAdam(
                    [p for name, p in named if (".experts." in name) == experts], lr=rate, process_group=group
                )
                for experts, rate, group in zip((False, True), (0.01, 0.02), groups, strict=True)
            ],
        )

    def step(self, forward_only: bool) -> Tensor:
        """Run two microbatches, the same in every replica, and return their losses in every stage."""
        replicas = parallel_state.get_data_parallel_world_size()
        utils._reconfigure_microbatch_calculator(1, None, 2 * replicas, 1, replicas)
        words = torch.randint(0, WORDS, (2, LENGTH + 1), generator=torch.Generator().manual_seed(6))
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        schedule = get_forward_backward_func(None, stages)
        several = self.optimizer if isinstance(self.optimizer, list) else []
        with contextlib.ExitStack() as unreduced:
            for each in several:
                unreduced.enter_context(each.no_sync())
            losses = schedule(step_function, [words], self.model, forward_only=forward_only)
            if not forward_only:
                finalize_model_grads(self.model, data_parallel=False if several else None)
        for each in (several or [self.optimizer]) if not forward_only else ():
            each.step()
            each.zero_grad()
        total = torch.stack(losses) if losses else torch.zeros(2, dtype=torch.float64)
        dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        return total


def resharding(rank: int) -> None:
    """Experts, biases and their optimizer state load into other splits of experts, and the model computes the same."""
    if dist.get_world_size() != 4:
        return
    layouts = (Layout(expert=2), Layout(2, sequence=True, expert=4, expert_tensor=1), Layout(1, 2, expert=2), Layout())
    before = None
    for number, layout in enumerate(layouts):
        with groups(layout):
            run = Saved.of(layout)
            if number:
                checkpoint.load(f"saved{number - 1}", run.model, run.optimizer)
            else:
                run.step(forward_only=False)
                run.step(forward_only=False)
            checkpoint.save(f"saved{number}", run.model, run.optimizer)
            saved = whole(Path(f"saved{number}"))
            loss = run.step(forward_only=True)
            for key, view, place in parts(run):
                assert torch.equal(view, saved[key][place]), key
            for name, parameter in run.model[0].named_parameters():
                assert full_shape(parameter, parameter) == saved[f"model.{name}"].shape, name
                assert torch.equal(full_tensor(parameter, parameter, False), saved[f"model.{name}"]), name
                assert torch.equal(local_part(saved[f"model.{name}"], parameter, parameter), parameter), name
        if before is not None:
            assert saved.keys() == before[0].keys()
            assert all(torch.equal(value, before[0][key]) for key, value in saved.items())
            torch.testing.assert_close(loss, before[1], rtol=TOLERANCE, atol=0)
        before = saved, loss
    experts = "language_model.encoder.layers.0.mlp.experts.weight1"
    assert saved[f"model.{experts}"].shape == saved[f"optimizer.exp_avg.{experts}"].shape == (8, 24, 32)
    assert saved["model.language_model.encoder.layers.0.mlp.router.expert_bias"].any()


def several_optimizers(rank: int) -> None:
    """ZeRO optimizers of dense parameters and of experts have one checkpoint, which other splits of experts load."""
    if dist.get_world_size() != 4:
        return
    before: dict[str, Tensor] = {}
    for number, layout in enumerate((Layout(expert=2), Layout(2, sequence=True, expert=4, expert_tensor=1), Layout())):
        with groups(layout):
            run = Saved.of(layout, several=True)
            if number:
                checkpoint.load(f"several{number - 1}", run.model, run.optimizer)
            else:
                run.step(forward_only=False)
                run.step(forward_only=False)
            assert [each.param_groups[0]["lr"] for each in run.optimizer] == [0.01, 0.02]
            checkpoint.save(f"several{number}", run.model, run.optimizer)
            saved = whole(Path(f"several{number}"))
            for key, view, place in parts(run):
                assert torch.equal(view, saved[key][place]), key
            loss = run.step(forward_only=False)
            if number == 1:
                for optimizers, words in (
                    (run.optimizer[::-1], "was in the optimizer 0's group 0, and is in group None"),
                    (run.optimizer[:1], "saved with 2 optimizers, and is loaded with 1"),
                    ([*run.optimizer, object()], "list of optimizers, got object"),
                    ([run.optimizer[0]] * 2, "parameters are in several optimizers"),
                ):
                    with pytest.raises(RuntimeError, match=words):
                        checkpoint.load("several0", run.model, optimizers)
        if number:
            assert saved.keys() == before.keys()
            assert all(torch.equal(value, before[key]) for key, value in saved.items())
        before = saved
        if number == 0:
            expected = loss
        torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=0)
    moments = {key for key in saved if key.startswith("optimizer.exp_avg.") and saved[key].any()}
    assert len(moments) == sum(key.startswith("optimizer.exp_avg.") for key in saved) > 10


def refusals(rank: int) -> None:
    """Sizes that do not fit, and ranks with other numbers of tokens, are errors in every rank."""
    if dist.get_world_size() > 4 and not full_grids():
        return
    with groups(Layout(expert=dist.get_world_size())):
        with pytest.raises(ValueError, match=r"num_moe_experts=9 is not divisible by . expert-parallel ranks"):
            MoELayer(config_of(2, **{**EXPERTS, "num_moe_experts": 9}))
        layer = MoELayer(config_of(2, **EXPERTS))
        with pytest.raises(ValueError, match=r'"alltoall" takes other numbers on each rank.*, got rank 0'):
            layer(torch.zeros(3 + rank, 1, 32, dtype=torch.float64))
        layer = MoELayer(config_of(2, **{**EXPERTS, **PADDED, **TO_ALL}))
        with pytest.raises(ValueError, match=r"padded to capacity.*same dtype and shape, got rank 0"):
            layer(torch.zeros(3 + rank, 1, 32, dtype=torch.float64))
    words = "the width 13 of an expert is not divisible by . expert-tensor"
    with groups(Layout(expert_tensor=dist.get_world_size())), pytest.raises(ValueError, match=words):
        MoELayer(config_of(2, **{**EXPERTS, "moe_ffn_hidden_size": 13}))
    with groups(Layout(2)), pytest.raises(ValueError, match="need sequence_parallel=True"):
        MoELayer(config_of(2, **EXPERTS))


SPLITS = (Layout(expert=2), Layout(expert_tensor=2))


def tokens(rank: int, count: int) -> Tensor:
    return torch.arange(count * 32, dtype=torch.float64).add(1000.0 * rank).sin().view(count, 1, 32)


def uneven_tokens(rank: int) -> None:
    """The all-to-all dispatcher takes other numbers of tokens on each rank, also none."""
    if dist.get_world_size() != 2:
        return
    for layout, sizes in itertools.product(SPLITS, ((3, 5), (0, 4), (0, 0))):
        whole = MoELayer(config_of(2, **{**EXPERTS, **TO_ALL}))
        inputs = [tokens(number, size).requires_grad_() for number, size in enumerate(sizes)]
        expected = [whole(x)[0] for x in inputs]
        sum(each.square().sum() for each in expected).backward()
        with groups(layout):
            layer, x = MoELayer(config_of(2, **{**EXPERTS, **TO_ALL})), tokens(rank, sizes[rank]).requires_grad_()
            output = layer(x)[0]
            output.square().sum().backward()
            for name, parameter in layer.experts.named_parameters():
                gradient = local_part(whole.experts.get_parameter(name).grad, parameter, parameter)
                torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12)
        torch.testing.assert_close(output, expected[rank], rtol=0, atol=1e-12)
        torch.testing.assert_close(x.grad, inputs[rank].grad, rtol=0, atol=1e-12)


def gradients_that_some_ranks_need(rank: int) -> None:
    """Ranks that need gradients of their input, of their parameters or of both find them; only all may need none."""
    if dist.get_world_size() != 2:
        return
    for layout, kind in itertools.product(SPLITS, ("allgather", "alltoall")):
        options = config_of(2, **{**EXPERTS, "moe_token_dispatcher_type": kind})
        whole = MoELayer(options)
        inputs = [tokens(number, 4).requires_grad_() for number in range(2)]
        sum(whole(x)[0].square().sum() for x in inputs).backward()
        with groups(layout):
            for needs in itertools.product(("input", "parameters", "both", "neither"), repeat=2):
                layer, x = MoELayer(options), tokens(rank, 4)
                layer.requires_grad_(needs[rank] in ("parameters", "both"))
                x.requires_grad_(needs[rank] in ("input", "both"))
                if "neither" in needs and len(set(needs)) > 1:
                    with pytest.raises(ValueError, match=r"must need gradients, or none, got rank 0 needs (some|none)"):
                        layer(x)
                    continue
                output = layer(x)[0]
                assert output.requires_grad == ("neither" not in needs)  # frozen layers cost no backward pass
                if not output.requires_grad:
                    continue
                output.square().sum().backward()
                assert (x.grad is not None) == x.requires_grad
                if x.requires_grad:
                    torch.testing.assert_close(x.grad, inputs[rank].grad, rtol=0, atol=1e-12, msg=str(needs))
                for name, parameter in layer.experts.named_parameters():
                    assert (parameter.grad is not None) == parameter.requires_grad
                    gradient = local_part(whole.experts.get_parameter(name).grad, parameter, parameter)
                    if parameter.requires_grad:
                        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-12, msg=str(needs))
            with torch.no_grad():
                assert not layer(x)[0].requires_grad


def fully_sharded(rank: int) -> None:
    """Router, experts and layer may each be sharded by FSDP2."""
    if dist.get_world_size() != 2:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, x = init_device_mesh("cpu", (2,)), torch.arange(8 * 32, dtype=torch.float64).sin().view(2, 4, 1, 32)
    for kind in ("allgather", "alltoall"):
        options = {**EXPERTS, "moe_token_dispatcher_type": kind}
        whole, layer = (MoELayer(config_of(2, **options)) for _ in range(2))
        for module in (layer.router, layer.experts, layer):
            fully_shard(module, mesh=mesh)
        torch.stack([whole(each)[0].sum() for each in x]).mean().backward()
        output = layer(x[rank])[0]
        output.sum().backward()
        torch.testing.assert_close(output, whole(x[rank])[0], rtol=0, atol=1e-12)
        for (name, parameter), expected in zip(layer.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, rtol=0, atol=1e-12, msg=name)


def losses_without_a_schedule(rank: int) -> None:
    """Losses of routers do not depend on the split of sequences in a loop that calls `backward` itself."""
    if dist.get_world_size() > 4 and not full_grids():
        return
    from apex.transformer.context_parallel import get_batch_on_this_cp_rank
    from apex.transformer.testing.standalone_gpt import GPTModel

    words = torch.randint(0, WORDS, (2, LENGTH + 1), generator=torch.Generator().manual_seed(6))
    batch, found = {"words": words[:, :-1], "labels": words[:, 1:]}, []
    for ranks in (1, 2):
        with groups(Layout(context=ranks)):
            model = GPTModel(config=config_of(2, **{**EXPERTS, "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}))
            part = get_batch_on_this_cp_rank(batch)
            model(part["words"], labels=part["labels"]).mean().backward()
            finalize_model_grads(model)
            found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def random_streams(rank: int) -> None:
    """Ranks with the same part of the same experts share a stream; others have their own."""
    with groups(Layout(expert=2, expert_tensor=1)):
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        with tensor_parallel.get_cuda_rng_tracker().fork(tensor_parallel.get_expert_parallel_rng_tracker_name()):
            drawn = torch.rand(2)
        expert = parallel_state.get_expert_model_parallel_rank()
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(7 + 1024 + 100 * expert)))


def jitter(rank: int) -> None:
    """Ranks with different parts of a sequence multiply their tokens by different random numbers."""
    if dist.get_world_size() == 8:
        return
    x, options = tokens(0, 6), {**EXPERTS, "moe_input_jitter_eps": 0.1}
    layouts = [Layout(context=2), Layout(2, sequence=True)]
    if dist.get_world_size() == 4:
        layouts = [Layout(context=4), Layout(2, sequence=True, context=2)]
    for layout in layouts:
        with groups(layout):
            tensor_parallel.model_parallel_cuda_manual_seed(7)
            router = MoELayer(config_of(2, sequence_parallel=layout.sequence, **options)).router
            before = torch.get_rng_state()
            first, second = (router(x)[0].detach() for _ in range(2))
            assert torch.equal(torch.get_rng_state(), before)  # which ranks with the same tokens share
        assert not torch.equal(first, second)
        found: list[Any] = [torch.empty_like(first) for _ in range(dist.get_world_size())]
        dist.all_gather(found, first)
        assert not any(map(torch.equal, found, found[1:] + found[:1]))


CHECKS: dict[str, Any] = {
    f"case {number}": functools.partial(check, number) for number in range(max(map(len, LAYOUTS.values())))
}
CHECKS |= {
    each.__name__: each
    for each in (
        *(resharding, several_optimizers, refusals, uneven_tokens, gradients_that_some_ranks_need),
        *(fully_sharded, losses_without_a_schedule, random_streams, jitter),
    )
}
