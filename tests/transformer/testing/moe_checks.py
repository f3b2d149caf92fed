"""A GPT with experts divided over processes beside one process that runs the same microbatches."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from .gpt import Layout, groups, reference, train_in, worst_difference

TOLERANCE = 1e-12
EXPERTS = {"activation": "swiglu", "num_moe_experts": 8, "moe_ffn_hidden_size": 12, "params_dtype": torch.float64}
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
        (Layout(1, 2, "interleaved", 2, expert=2), SIGMOID, {}),
        (Layout(context=2, expert=4), SOFTMAX, TO_ALL),
    ],
    8: [
        (Layout(2, 2, "1f1b", 1, True, expert=2), SIGMOID, TO_ALL),
        (Layout(2, 2, "zb_v", 2, True, expert=4, expert_tensor=1), SOFTMAX, {}),
    ],
}


def check(number: int, rank: int) -> None:
    """Compare losses, gradients of five steps, final parameters and biases."""
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
        assert len(biases) == layout.layers
        assert all(bias.dtype == torch.float32 and bias.abs().max() > 0.015 for bias in biases)


CHECKS = {f"case {number}": functools.partial(check, number) for number in range(max(map(len, LAYOUTS.values())))}
