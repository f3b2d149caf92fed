"""Mixtures of experts on one GPU: equal to float64, without waiting for the device, captured and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex.graphs import capture
from apex.optimizers import FusedAdam
from apex.transformer import finalize_model_grads, moe
from apex.transformer.testing.standalone_gpt import gpt_model_provider
from apex.transformer.testing.standalone_transformer_lm import TransformerConfig
from tests.support.harness import assert_equal_bits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("alone")]

DEVICE = "cuda"
EXPERTS, HIDDEN, WIDTH, SEQUENCE, BATCH = 8, 64, 48, 48, 2
LOSSES = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "losses": LOSSES,
    "one of all": {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.0},
    "bias": {**BIAS, **LOSSES, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
    "capacity": {"moe_expert_capacity_factor": 0.6, **LOSSES},
    "first ones": {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position"},
    "padded": {"moe_expert_capacity_factor": 0.6, "moe_pad_expert_input_to_capacity": True},
    "shared": {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True},
    "sequences": {**LOSSES, "moe_router_load_balancing_type": "seq_aux_loss"},
    "replicas": {**LOSSES, "moe_router_load_balancing_type": "global_aux_loss"},
}
# Relative to a tensor's norm. Operators of a CPU are at most 4.6e-7 and 0.0048 off.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
every_option = pytest.mark.parametrize("name", OPTIONS)
every_dispatcher = pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])


def config(name: str, **options: Any) -> TransformerConfig:
    defaults: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "vocab_size": 96,
        "max_position_embeddings": SEQUENCE,
        "position_embedding": "rope",
        "attention": "sdpa",
        "activation": "swiglu",
        "init_method_std": 0.2,
        "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": WIDTH,
        "moe_router_dtype": "fp32",
    }
    return TransformerConfig(**{**defaults, **OPTIONS[name], **options})


def results(layer: moe.MoELayer, call: Callable[[Tensor], Any], x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """Return the output, all gradients, and the tokens that a router with a bias counts."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    output, _ = call(x)
    output.backward(gradient)
    found = {"output": output.detach(), "x": x.grad}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    if layer.router.expert_bias is not None:
        found["counts"] = layer.router.local_tokens_per_expert
    layer.router.finish_step()
    return {name: value.clone() for name, value in found.items()}


def pair(name: str, dtype: torch.dtype, **options: Any) -> tuple[moe.MoELayer, moe.MoELayer, Tensor, Tensor]:
    """Return a layer on the GPU, the same one in float64 on the host, an input and a gradient for it."""
    layer = moe.MoELayer(config(name, params_dtype=dtype, **options)).to(DEVICE)
    exact = moe.MoELayer(config(name, params_dtype=torch.float64, **{**options, "moe_router_dtype": None}))
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(torch.linspace(-0.02, 0.02, EXPERTS))
    exact.load_state_dict({key: value.cpu() for key, value in layer.state_dict().items() if value is not None})
    generator = torch.Generator().manual_seed(3)
    shape = (2, SEQUENCE, BATCH, HIDDEN)
    x, gradient = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).double()
    return layer, exact, x, gradient


@every_option
@every_dispatcher
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_equal_float64(name: str, dispatcher: str, dtype: torch.dtype) -> None:
    layer, exact, x, gradient = pair(name, dtype, moe_token_dispatcher_type=dispatcher)
    expected = results(exact, exact, x, gradient)
    found = results(layer, layer, x.to(DEVICE, dtype), gradient.to(DEVICE, dtype))
    for key, value in found.items():
        assert value.dtype == (torch.float32 if key == "counts" else dtype), key
        wanted = expected[key].double()
        assert (value.cpu().double() - wanted).norm() <= TOLERANCES[dtype] * wanted.norm(), key
    if "counts" in found:
        assert torch.equal(found["counts"].cpu(), expected["counts"])


@every_option
@every_dispatcher
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_waits_for_the_device(name: str, dispatcher: str, dtype: torch.dtype) -> None:
    layer, _, x, gradient = pair(name, dtype, moe_token_dispatcher_type=dispatcher)
    x, gradient = x.to(DEVICE, dtype), gradient.to(DEVICE, dtype)
    first = results(layer, layer, x, gradient)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = results(layer, layer, x, gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal_bits(list(first.values()), list(again.values()))


@pytest.mark.parametrize("name", ["losses", "bias", "capacity", "padded", "shared", "replicas"])
def test_compiled_layers_equal_float64(name: str) -> None:
    layer, exact, x, gradient = pair(name, torch.bfloat16)
    expected = results(exact, exact, x, gradient)
    call = torch.compile(layer, fullgraph=True)
    found = results(layer, call, x.to(DEVICE, torch.bfloat16), gradient.to(DEVICE, torch.bfloat16))
    for key, value in found.items():
        wanted = expected[key].double()
        assert (value.cpu().double() - wanted).norm() <= TOLERANCES[torch.bfloat16] * wanted.norm(), key


def train(way: Callable[[Any], Any], model: nn.Module, batches: list[Any], loss_of: Any) -> tuple[list[Any], Any]:
    """Return all numbers that a training run changes, and its step."""
    optimizer = FusedAdam(model.parameters(), lr=1e-2)

    def train_step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        finalize_model_grads(model)
        optimizer.step()
        return loss

    step = way(train_step)
    losses = [step(*batch).detach().clone() for batch in batches]
    state = [value for value in model.state_dict().values() if isinstance(value, Tensor)]
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [*losses, *state, *moments], step


def assert_captured_equals_eager(make: Callable[[], nn.Module], batches: list[Any], loss_of: Any) -> list[Any]:
    eager, _ = train(lambda step: step, make(), batches, loss_of)
    found, step = train(capture, make(), batches, loss_of)
    assert step.reason is None
    assert step.graphs == 1, step.report()
    assert_equal_bits(eager, found)
    return found


@every_option
@every_dispatcher
def test_captured_steps_have_the_bits_of_eager_ones(name: str, dispatcher: str) -> None:
    def make() -> nn.Module:
        options = {"params_dtype": torch.bfloat16, "moe_router_bias_update_rate": 0.1}
        return moe.MoELayer(config(name, moe_token_dispatcher_type=dispatcher, **options)).to(DEVICE)

    generator = torch.Generator(DEVICE).manual_seed(5)
    shape = (SEQUENCE, BATCH, HIDDEN)
    batches = [(torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16),) for _ in range(8)]
    found = assert_captured_equals_eager(make, batches, lambda layer, x: (layer(x)[0] - x).float().square().mean())
    assert torch.stack(found[:8]).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_dispatcher
def test_a_captured_gpt_has_the_bits_of_an_eager_one(dtype: torch.dtype, dispatcher: str) -> None:
    def make() -> nn.Module:
        options = {"params_dtype": dtype, "moe_token_dispatcher_type": dispatcher, "moe_layer_freq": [0, 1]}
        return gpt_model_provider(config=config("bias", **options)).to(DEVICE)

    generator = torch.Generator(DEVICE).manual_seed(6)
    words = torch.randint(96, (BATCH, SEQUENCE + 1), generator=generator, device=DEVICE)
    found = assert_captured_equals_eager(
        make, [(words,)] * 12, lambda model, words: model(words[:, :-1], labels=words[:, 1:]).float().mean()
    )
    assert found[11] < found[0] - 0.1
