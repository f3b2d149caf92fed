"""Mixtures of experts in one process: routers, losses, permutations, experts and refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from apex import amp
from apex.booster import Booster
from apex.transformer import moe, tensor_parallel
from apex.transformer.finalize_grads import _update_routers
from apex.transformer.moe import moe_utils
from apex.transformer.moe._groups import ExpertGroups
from apex.transformer.moe._routing import dense, sparse
from apex.transformer.moe.token_dispatcher import DISPATCHERS
from apex.transformer.testing.standalone_transformer_lm import TransformerConfig

EXPERTS, HIDDEN, WIDTH = 4, 8, 6


def config(**options: Any) -> TransformerConfig:
    defaults: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "vocab_size": 16,
        "max_position_embeddings": 8,
        "activation": "swiglu",
        "params_dtype": torch.float64,
        "init_method_std": 0.5,
        "num_moe_experts": EXPERTS,
        "moe_ffn_hidden_size": WIDTH,
    }
    return TransformerConfig(**{**defaults, **options})


def numbers(*shape: int, seed: int = 0, requires_grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)


def of_every_expert(layer: moe.MoELayer, x: Tensor, probs: Tensor) -> Tensor:
    """Return the layer's output if every expert computes every token."""
    tokens, total = x.reshape(-1, HIDDEN), 0.0
    for expert, (up, down) in enumerate(zip(layer.experts.weight1, layer.experts.weight2, strict=True)):
        gate, value = (tokens @ up.t()).chunk(2, -1)
        total = total + probs[:, expert, None] * ((F.silu(gate) * value) @ down.t())
    return total.view_as(x)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.0, "moe_router_topk": 1},
    {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp64"},
    {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_token_dispatcher_type": "alltoall"},
    {"moe_expert_capacity_factor": 0.5, "moe_token_dispatcher_type": "alltoall"},
    {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"},
    {
        "moe_expert_capacity_factor": 0.5,
        "moe_pad_expert_input_to_capacity": True,
        "moe_token_dispatcher_type": "alltoall",
    },
    {"moe_router_topk": 4, "moe_expert_capacity_factor": 5.0, "moe_token_dispatcher_type": "alltoall"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layer_is_the_weighted_sum_of_experts(options: dict[str, Any]) -> None:
    layer, x = moe.MoELayer(config(**options)), numbers(5, 3, HIDDEN, requires_grad=True)
    inputs = (x, *layer.parameters())
    probs, routing_map = layer.router(x)
    assert routing_map.dtype == torch.bool
    assert not probs[~routing_map].any()
    output, bias = layer(x)
    assert bias is None
    expected = of_every_expert(layer, x, probs)
    weights = numbers(*x.shape, seed=1)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-13)
    found = torch.autograd.grad(output, inputs, weights)
    right = torch.autograd.grad(expected, inputs, weights)
    torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-12)


def test_steps_of_dispatchers_match_the_layer() -> None:
    """Megatron's six steps with the router's dense results give the output of `MoELayer.forward`."""
    for kind in ("allgather", "alltoall"):
        options = config(moe_token_dispatcher_type=kind)
        layer, x = moe.MoELayer(options), numbers(5, 3, HIDDEN)
        assert isinstance(layer.token_dispatcher, moe.MoEAllGatherTokenDispatcher)  # one rank waits for no counts
        probs, routing_map = layer.router(x)
        steps = DISPATCHERS[kind](EXPERTS, range(EXPERTS), options)
        rows, counts, weights = steps.dispatch_postprocess(
            *steps.token_dispatch(*steps.dispatch_preprocess(x, routing_map, probs))
        )
        assert torch.equal(counts, routing_map.sum(0))
        results = steps.token_combine(steps.combine_preprocess(layer.experts(rows, counts, weights)[0]))
        torch.testing.assert_close(steps.combine_postprocess(results), layer(x)[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_steps_of_dispatchers_take_maps_that_are_padded_to_capacity(kind: str) -> None:
    """Tokens of weight zero, which fill an expert's capacity, displace none of a token's own experts."""
    options = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    layer, x = moe.MoELayer(config(moe_token_dispatcher_type=kind, **options)), numbers(5, 3, HIDDEN)
    probs, routing_map = layer.router(x)
    assert (routing_map.sum(1) > 2).any()  # more than moe_router_topk
    steps = DISPATCHERS[kind](EXPERTS, range(EXPERTS), layer.config)
    rows, counts, weights = steps.dispatch_postprocess(
        *steps.token_dispatch(*steps.dispatch_preprocess(x, routing_map, probs))
    )
    results = steps.token_combine(steps.combine_preprocess(layer.experts(rows, counts, weights)[0]))
    torch.testing.assert_close(steps.combine_postprocess(results), layer(x)[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", [(0, 3, HIDDEN), (3, 0, HIDDEN)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"moe_token_dispatcher_type": "alltoall", "moe_z_loss_coeff": 0.1},
        {"moe_token_dispatcher_type": "alltoall", "moe_expert_capacity_factor": 1.0},
        *(
            {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": kind}
            for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss")
        ),
    ],
    ids=str,
)
def test_no_tokens(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    layer = moe.MoELayer(config(**options))
    x = numbers(*shape, requires_grad=True)
    output, _ = layer(x)
    output.sum().backward()
    assert output.shape == shape
    assert x.grad is not None
    assert all(not param.grad.any() for param in layer.parameters())
    tokens = numbers(5, 2, HIDDEN)
    expected = moe.MoELayer(config(**options))
    for each in (layer, expected):  # nothing of the empty batch remains
        each.zero_grad()
        each(tokens)[0].sum().backward()
    torch.testing.assert_close(
        [param.grad for param in layer.parameters()], [param.grad for param in expected.parameters()]
    )


@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_hooks_of_router_and_experts_run(kind: str) -> None:
    layer, seen = moe.MoELayer(config(moe_token_dispatcher_type=kind)), []
    for name in ("router", "experts"):
        getattr(layer, name).register_forward_hook(lambda *_, name=name: seen.append(name))
    layer(numbers(5, 3, HIDDEN))
    assert seen == ["router", "experts"]


def test_a_subclass_of_the_experts_computes_as_it_says() -> None:
    class Halved(moe.GroupedMLP):
        def forward(self, rows: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
            return super().forward(rows, tokens_per_expert, probs)[0] / 2, None

    x = numbers(5, 3, HIDDEN)
    found = moe.MoELayer(config(), moe.MoESubmodules(experts=Halved))(x)[0]
    torch.testing.assert_close(found, moe.MoELayer(config())(x)[0] / 2)


class NothingOnTheHost(TorchDispatchMode):
    """Raise for operators whose results, or their shapes, the host must read from the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique_dim", "_unique2"):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2], OPTIONS[5], OPTIONS[6]], ids=str)
def test_nothing_waits_for_the_device(options: dict[str, Any]) -> None:
    layer = moe.MoELayer(config(**options, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.1))
    layer.experts.routed = lambda x, index, weight: x * weight.sum(1, keepdim=True)  # its kernels have their own tests
    with NothingOnTheHost():
        layer(numbers(5, 3, HIDDEN, requires_grad=True))[0].sum().backward()
    with pytest.raises(AssertionError, match="nonzero waits"), NothingOnTheHost():
        moe_utils.permute(numbers(2, 3), numbers(2, 4) > 0)


def test_choices() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0, 0.0, 2.5]], dtype=torch.float64, requires_grad=True)
    probs, chosen = moe_utils.topk_routing_with_score_function(logits, 2)
    assert chosen.tolist() == [[False, True, False, False, False, True]]
    torch.testing.assert_close(probs[chosen], logits[0, [1, 5]].softmax(0))
    probs, _ = moe_utils.topk_routing_with_score_function(logits, 2, use_pre_softmax=True, scaling_factor=3.0)
    torch.testing.assert_close(probs[chosen], 3 * logits[0].softmax(0)[[1, 5]])
    # Groups {1, 3}, {2, -1}, {0, 2.5}: the best single one of each decides, then the last group lost to nobody.
    _, chosen = moe_utils.topk_routing_with_score_function(logits, 2, num_groups=3, group_topk=1)
    assert chosen.nonzero()[:, 1].tolist() == [0, 1]
    bias = torch.tensor([0.0, -9.0, 0.0, 9.0, 0.0, 0.0])
    probs, chosen = moe_utils.topk_routing_with_score_function(logits, 2, score_function="sigmoid", expert_bias=bias)
    assert chosen.nonzero()[:, 1].tolist() == [3, 5]
    scores = logits[0, [3, 5]].sigmoid()
    torch.testing.assert_close(probs[chosen], scores / scores.sum())
    with pytest.raises(ValueError, match="score_function must be"):
        moe_utils.topk_routing_with_score_function(logits, 2, score_function="sqrtsoftplus")
    index, weight = sparse(chosen, probs, 3)
    assert index.tolist() == [[3, 5, 6]]
    assert all(torch.equal(a, b) for a, b in zip(dense(index, weight, 6), (probs, chosen), strict=True))
    half, _ = moe_utils.topk_routing_with_score_function(logits.bfloat16(), 2)
    assert half.dtype == torch.bfloat16


def test_functions_refuse_to_choose_wrong_experts() -> None:
    logits = numbers(3, 6)
    for topk, groups, best in ((1, 3, 2), (3, 3, 2), (2, 4, 1), (4, 3, 1), (2, 3, 4), (2, 3, 0)):
        with pytest.raises(ValueError, match=f"num_groups={groups} must divide 6 experts, and group_topk={best}"):
            moe_utils.topk_routing_with_score_function(logits, topk, num_groups=groups, group_topk=best)
    for topk in (0, 7):
        with pytest.raises(ValueError, match=f"at least topk={topk} experts"):
            moe_utils.topk_routing_with_score_function(logits, topk)
    with pytest.raises(TypeError, match="logits"):  # all weights were rounded to zero
        moe_utils.topk_routing_with_score_function(logits.long(), 2)
    for factor in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="capacity_factor must be positive and finite"):
            moe_utils.apply_router_token_dropping(logits.softmax(1), logits > 0, 2, factor)


@pytest.mark.parametrize("frozen", [("weight1", "weight2"), ("weight1",), ("weight2",)], ids=str)
def test_frozen_experts_need_no_main_grad(frozen: tuple[str, ...]) -> None:
    layers = [moe.MoELayer(config(gradient_accumulation_fusion=fusion)) for fusion in (False, True)]
    for layer in layers:
        for name in ("weight1", "weight2"):
            weight = getattr(layer.experts, name)
            weight.requires_grad_(name not in frozen)
            if name not in frozen:
                weight.main_grad = torch.zeros_like(weight)
        layer(numbers(5, 3, HIDDEN))[0].square().sum().backward()
    torch.testing.assert_close(layers[1].router.weight.grad, layers[0].router.weight.grad)
    for name in {"weight1", "weight2"} - set(frozen):
        torch.testing.assert_close(
            getattr(layers[1].experts, name).main_grad, getattr(layers[0].experts, name).grad, rtol=1e-6, atol=1e-6
        )


def test_functions_refuse_what_does_not_fit() -> None:
    logits, tokens, chosen, probs = numbers(3, 4), numbers(3, 2), numbers(3, 4) > 0, numbers(3, 4)
    rows, _, token = moe_utils.permute(tokens, chosen, probs)
    number = len(rows)
    calls: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("routing_map has shape", moe_utils.permute, (tokens, numbers(4, 4) > 0)),
        ("probs has shape", moe_utils.permute, (tokens, chosen, probs[:, :3])),
        (f"num_out_tokens={number + 1}", moe_utils.permute, (tokens, chosen, None, number + 1)),
        ("num_out_tokens=-1", moe_utils.permute, (tokens, chosen, None, -1)),
        ("permuted_tokens has shape", moe_utils.unpermute, (rows, token[:-1], (3, 2))),
        ("permuted_tokens has shape", moe_utils.unpermute, (rows, token, (3, 1, 2))),
        ("routing_map has shape", moe_utils.unpermute, (rows, token, (4, 2), probs, chosen)),
        ("must name each of 3 chunks once", moe_utils.sort_chunks_by_idxs, (tokens, [1, 1, 1], [1, 0])),
        ("must name each of 3 chunks once", moe_utils.sort_chunks_by_idxs, (tokens, [1, 1, 1], [1, 0, 1])),
        ("score_function must be", moe_utils.compute_routing_scores_for_aux_loss, (logits, 2, "sqrtsoftplus")),
        ("at least topk=5", moe_utils.compute_routing_scores_for_aux_loss, (logits, 5, "softmax")),
        ("num_groups=0", moe_utils.group_limited_topk, (logits, 2, 3, 4, 0, 1)),
    ]
    for message, function, given in calls:
        with pytest.raises(ValueError, match=message):
            function(*given)
    with pytest.raises(ValueError, match=r"expert_bias has shape \[1\], expected \[4\]"):
        moe_utils.topk_routing_with_score_function(logits, 2, score_function="sigmoid", expert_bias=torch.ones(1))
    assert moe_utils.z_loss_func(logits[:0], 0.1) == 0
    assert moe_utils.sort_chunks_by_idxs(tokens[:0], [], [])[0].shape == (0, 2)
    moved = moe_utils.get_updated_expert_bias(torch.tensor([1, 2, 3]), torch.zeros(3), 0.5)
    assert moved.tolist() == [0.5, 0.0, -0.5]


def test_capacity() -> None:
    assert moe_utils.get_capacity(10, 4, 1.0) == 3
    assert moe_utils.get_capacity(10, 4, 0.1, min_capacity=2) == 2
    probs = torch.tensor([[0.3, 0.7], [0.6, 0.4], [0.9, 0.1], [0.8, 0.2]])
    chosen = torch.tensor([[True, True], [True, False], [True, False], [True, False]])
    given = (probs * chosen, chosen, 1, 1.0)  # two rows for each expert
    kept, routing_map = moe_utils.apply_router_token_dropping(*given)
    assert routing_map.tolist() == [[False, True], [False, False], [True, False], [True, False]]
    assert torch.equal(kept, probs * routing_map)
    _, routing_map = moe_utils.apply_router_token_dropping(*given, drop_policy="position")
    assert routing_map[:, 0].tolist() == [True, True, False, False]
    kept, routing_map = moe_utils.apply_router_token_dropping(*given, pad_to_capacity=True)
    assert routing_map.sum(0).tolist() == [2, 2]
    assert torch.equal(kept, probs * routing_map * chosen)
    with pytest.raises(ValueError, match='drop_policy must be "probs" or "position"'):
        moe_utils.apply_router_token_dropping(*given, drop_policy="first")


def test_permutations() -> None:
    tokens, probs, chosen = numbers(6, 3), numbers(6, 4, seed=1).abs(), numbers(6, 4, seed=2) > 0
    chosen[2] = False  # a token of nobody
    rows, own, token = moe_utils.permute(tokens, chosen, probs)
    expected = [(t, e) for e in range(4) for t in range(6) if chosen[t, e]]
    assert token.tolist() == [t for t, _ in expected]
    assert torch.equal(rows, tokens[token])
    assert own is not None
    assert own.tolist() == [probs[t, e].item() for t, e in expected]
    for one, other in zip(moe_utils.permute(tokens, chosen, probs, len(expected)), (rows, own, token), strict=True):
        assert torch.equal(one, other)
    back = moe_utils.unpermute(rows, token, tokens.shape, probs, chosen)
    torch.testing.assert_close(back, tokens * (probs * chosen).sum(1, keepdim=True))
    assert moe_utils.unpermute(rows.bfloat16(), token, tokens.shape).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="probs needs routing_map"):
        moe_utils.unpermute(rows, token, tokens.shape, probs)
    with pytest.raises(ValueError, match="drop_and_pad needs num_out_tokens"):
        moe_utils.permute(tokens, chosen, drop_and_pad=True)
    values = torch.arange(6.0)
    found, _ = moe_utils.sort_chunks_by_idxs(values, [1, 2, 3], [2, 0, 1])
    assert found.tolist() == [3.0, 4.0, 5.0, 0.0, 1.0, 2.0]


def gradient_of_losses(x: Tensor, batches: int = 1, **options: Any) -> Tensor:
    """Return the gradient of the router's weight from its losses alone."""
    router = moe.TopKRouter(config(**options))
    for batch in x.chunk(batches, 1):
        (router.route(batch)[1].sum() * 0).backward()
    assert router.weight.grad is not None
    return router.weight.grad


def losses_of(x: Tensor, score_function: str = "softmax") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a router's weight, and logits, scores and choices of x [tokens, hidden]."""
    weight = moe.TopKRouter(config()).weight
    logits = x @ weight.t()
    scores = logits.softmax(-1)
    if score_function == "sigmoid":
        scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    return weight, logits, scores, F.one_hot(scores.topk(2).indices, EXPERTS).sum(1)


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_losses_follow_their_formulas(score_function: str) -> None:
    x, options = numbers(6, 4, HIDDEN), {"moe_router_score_function": score_function}
    balanced = {**options, "moe_aux_loss_coeff": 0.3}
    weight, logits, scores, chosen = losses_of(x.reshape(-1, HIDDEN), score_function)
    whole = 0.3 * EXPERTS / (2 * 24**2) * (chosen.sum(0) * scores.sum(0)).sum()
    (expected,) = torch.autograd.grad(whole, weight, retain_graph=True)
    torch.testing.assert_close(gradient_of_losses(x, **balanced), expected)
    of_sequences = [
        0.3 * EXPERTS / (2 * 6**2) * (n.sum(0) * s.sum(0)).sum()
        for n, s in zip(chosen.view(6, 4, -1).unbind(1), scores.view(6, 4, -1).unbind(1), strict=True)
    ]
    (expected,) = torch.autograd.grad(sum(of_sequences) / 4, weight, retain_graph=True)
    found = gradient_of_losses(x, moe_router_load_balancing_type="seq_aux_loss", **balanced)
    torch.testing.assert_close(found, expected)
    (expected,) = torch.autograd.grad(0.2 * torch.logsumexp(logits, -1).square().mean(), weight)
    found = gradient_of_losses(x, moe_z_loss_coeff=0.2, moe_router_load_balancing_type="none", **balanced)
    torch.testing.assert_close(found, expected)


def test_global_loss_counts_the_microbatches_of_a_step() -> None:
    x = numbers(6, 4, HIDDEN)
    total, seen = 0.0, []
    for batch in x.chunk(2, 1):
        weight, _, scores, chosen = losses_of(batch.reshape(-1, HIDDEN))
        seen.append(chosen.sum(0))
        counts = sum(seen) / len(seen)
        (part,) = torch.autograd.grad(0.3 * EXPERTS / (2 * 12**2) * (counts * scores.sum(0)).sum(), weight)
        total = total + part
    options: dict[str, Any] = {"moe_aux_loss_coeff": 0.3, "moe_router_load_balancing_type": "global_aux_loss"}
    torch.testing.assert_close(gradient_of_losses(x, 2, **options), total)


def test_loss_scale() -> None:
    x = numbers(6, 4, HIDDEN)
    expected = gradient_of_losses(x, moe_aux_loss_coeff=0.3)
    moe.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([8.0]))
    try:
        torch.testing.assert_close(gradient_of_losses(x, moe_aux_loss_coeff=0.3), 8 * expected)
    finally:
        moe.MoEAuxLossAutoScaler.set_loss_scale(None)
    router = moe.TopKRouter(config(moe_aux_loss_coeff=0.3)).eval()
    with pytest.raises(RuntimeError, match="does not require grad"):
        (router.route(x)[1].detach().sum() * 0).backward()
    (router.route(x)[1].sum() * 0).backward()  # not in training
    assert not router.weight.grad.any()


BIASED: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.25,
}


@pytest.mark.parametrize("precision", ["fp16", "fp16_naive"])
def test_the_booster_scales_losses_like_the_main_loss(precision: str) -> None:
    x = numbers(6, 4, HIDDEN)
    expected = gradient_of_losses(x, moe_aux_loss_coeff=0.3).float()
    layer = moe.MoELayer(config(params_dtype=torch.float32, moe_aux_loss_coeff=0.3))
    booster = Booster("cpu", mixed_precision=precision)
    model, optimizer, *_ = booster.boost(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
    booster.backward(0.0 * model(x.float())[0].float().sum(), optimizer)
    optimizer.unscale_grad()
    found = optimizer.parameters[0].grad.float()
    assert (found - expected).norm() <= 0.05 * expected.norm()  # half precision


def test_amp_scales_losses_like_the_main_loss() -> None:
    x = numbers(6, 4, HIDDEN)
    expected = gradient_of_losses(x, moe_aux_loss_coeff=0.3).float()
    layer = moe.MoELayer(config(params_dtype=torch.float32, moe_aux_loss_coeff=0.3))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer, optimizer = amp.initialize(layer, optimizer, opt_level="O1", loss_scale=128.0, verbosity=0)
    try:
        for outer in (contextlib.nullcontext(), amp.scale_loss(torch.zeros(()), optimizer, delay_unscale=True)):
            optimizer.zero_grad()
            with outer, amp.scale_loss(0.0 * layer(x.float())[0].sum(), optimizer, delay_unscale=True) as scaled:
                scaled.backward()
            found = layer.router.weight.grad / 128.0
            assert (found - expected).norm() <= 0.05 * expected.norm()  # half precision
    finally:
        amp.shutdown()
    assert moe_utils.MoEAuxLossAutoScaler.loss_scale() is None


def test_bias_follows_the_tokens_of_backward_passes() -> None:
    """Recomputation, and passes without a backward pass, count nothing."""
    layer, x = moe.MoELayer(config(**BIASED)), numbers(6, 4, HIDDEN, requires_grad=True)
    router = layer.router
    expected = torch.zeros(EXPERTS)

    def run(x: Tensor) -> Tensor:
        return layer(x)[0]

    def reentrant(x: Tensor) -> Tensor:
        return torch_checkpoint(run, x, use_reentrant=True)

    def not_reentrant(x: Tensor) -> Tensor:
        return torch_checkpoint(run, x, use_reentrant=False)

    for forward in (run, reentrant, not_reentrant, lambda x: tensor_parallel.checkpoint(run, False, x)):
        layer(x)
        with torch.no_grad():
            layer(x)
        counts = router.route(x)[0].flatten().bincount(minlength=EXPERTS).float()
        for _ in range(2):
            forward(x).sum().backward()
        assert torch.equal(router.local_tokens_per_expert, 2 * counts)
        _update_routers([router])
        expected = expected + 0.25 * (counts.mean() - counts).sign()
        assert torch.equal(router.expert_bias, expected)
        assert (counts != counts.mean()).any()
    _update_routers([router])  # nothing was counted
    assert torch.equal(router.expert_bias, expected)
    assert "router.expert_bias" in layer.state_dict()
    assert not any("tokens" in name for name in layer.state_dict())


def test_bias_of_a_router_without_gradients_follows_the_tokens() -> None:
    layer, x = moe.MoELayer(config(**BIASED)), numbers(6, 4, HIDDEN)
    layer.router.requires_grad_(False)
    counts = layer.router.route(x)[0].flatten().bincount(minlength=EXPERTS).float()
    layer.router.finish_step()
    layer(x)[0].sum().backward()
    _update_routers([layer.router])
    assert torch.equal(layer.router.expert_bias, 0.25 * (counts.mean() - counts).sign())


def test_biases_move_at_their_own_rates() -> None:
    rates, routers = (0.25, 0.5), []
    for rate in rates:
        router = moe.TopKRouter(config(**{**BIASED, "moe_router_bias_update_rate": rate}))
        router.local_tokens_per_expert = torch.tensor([0.0, 1.0, 2.0, 9.0])
        routers.append(router)
    _update_routers(routers)
    for rate, router in zip(rates, routers, strict=True):
        assert router.expert_bias.tolist() == [rate, rate, rate, -rate]


def test_bias_stays_in_float32() -> None:
    layer = moe.MoELayer(config(params_dtype=torch.float32, **BIASED))
    layer.router.expert_bias += 1.0 + 2.0**-20
    kept = layer.router.expert_bias.clone()
    for cast in (layer.bfloat16, layer.half, layer.double, lambda: layer.to(torch.float32)):
        cast()
        assert layer.router.expert_bias.dtype == torch.float32
        assert torch.equal(layer.router.expert_bias, kept)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    cast_layer, _ = amp.initialize(layer, optimizer, opt_level="O5", verbosity=0)
    try:
        assert torch.equal(layer.router.expert_bias, kept)
        assert layer.experts.weight1.dtype == torch.bfloat16
        cast_layer(torch.randn(5, 2, HIDDEN))[0].float().sum().backward()
    finally:
        amp.shutdown()


def test_half_precision_and_autocast() -> None:
    x = numbers(7, 2, HIDDEN)
    layer = moe.MoELayer(config(params_dtype=torch.float32, moe_router_dtype="fp32"))
    exact = moe.MoELayer(config(moe_router_dtype="fp32"))
    expected = exact(x)[0]
    low = moe.MoELayer(config(params_dtype=torch.bfloat16, moe_router_dtype="fp32"))
    low.router.weight.data = layer.router.weight.data.clone()  # the same experts
    found = low(x.bfloat16())[0]
    assert found.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer(x.float())[0]
    for result in (found, cast):
        error = (result.double() - expected).abs().max() / expected.abs().max()
        assert error < 4 * math.sqrt(HIDDEN) * 2**-8
    with pytest.raises(ValueError, match=r"hidden_states is torch.float64 and the weight of the experts torch.float32"):
        layer(x)
    with pytest.raises(ValueError, match=r"the weight of the router torch.float64: convert one"):
        moe.MoELayer(config())(x.float())


def test_shapes_on_meta() -> None:
    layer = moe.MoELayer(config(**BIASED, moe_aux_loss_coeff=0.1)).to("meta")
    x = torch.empty(5, 2, HIDDEN, device="meta", dtype=torch.float64, requires_grad=True)
    with torch.autocast("cpu"):  # PyTorch has no autocast on meta
        output = layer(x)[0]
    output.sum().backward()
    assert x.grad is not None
    assert output.shape == x.grad.shape == x.shape


def test_jitter() -> None:
    router, x = moe.TopKRouter(config(moe_input_jitter_eps=0.5)), numbers(6, 4, HIDDEN)
    torch.manual_seed(0)
    first = router.route(x)[1]
    assert not torch.equal(router.route(x)[1], first)
    torch.manual_seed(0)
    assert torch.equal(router.route(x)[1], first)
    plain = moe.TopKRouter(config()).route(x)[1]
    assert torch.equal(router.eval().route(x)[1], plain)


def test_experts_load_megatrons_layout() -> None:
    experts, other = (moe.GroupedMLP(EXPERTS, config(seed=seed)) for seed in (1, 2))
    assert moe.TEGroupedMLP is moe.SequentialMLP is moe.GroupedMLP
    saved = {
        "weight1": experts.weight1.detach().transpose(1, 2).reshape(HIDDEN, -1),
        "weight2": experts.weight2.detach().transpose(1, 2).reshape(-1, HIDDEN),
    }
    assert saved["weight1"].shape == (HIDDEN, EXPERTS * 2 * WIDTH)
    other.load_state_dict(saved)
    for name, value in experts.named_parameters():
        assert torch.equal(other.get_parameter(name), value)
    other.load_state_dict(experts.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch for weight2"):
        other.load_state_dict({**saved, "weight2": saved["weight2"][:-1]})


def test_gradients_in_main_grad() -> None:
    plain, fused = (moe.MoELayer(config(gradient_accumulation_fusion=fusion)) for fusion in (False, True))
    x = numbers(5, 3, HIDDEN)
    with torch.no_grad():
        assert torch.equal(plain(x)[0], fused(x)[0])  # needs no main_grad
    for weight in fused.experts.parameters():
        weight.main_grad = torch.ones_like(weight)
    for layer in (plain, fused):
        layer(x)[0].square().sum().backward()
    for name, weight in fused.experts.named_parameters():
        assert weight.grad is None
        torch.testing.assert_close(weight.main_grad - 1, plain.experts.get_parameter(name).grad)
    torch.testing.assert_close(fused.router.weight.grad, plain.router.weight.grad)


def test_experts_of_sorted_rows() -> None:
    experts, rows, probs = moe.GroupedMLP(EXPERTS, config()), numbers(9, HIDDEN), numbers(9, seed=1)
    output, bias = experts(rows, torch.tensor([2, 0, 5, 1]), probs)
    assert bias is None
    for row, expert in enumerate([0, 0, 2, 2, 2, 2, 2, 3]):
        gate, value = (experts.weight1[expert] @ rows[row]).chunk(2)
        torch.testing.assert_close(output[row], probs[row] * (experts.weight2[expert] @ (F.silu(gate) * value)))
    assert not output[8].any()  # past the last expert's
    assert experts(rows[:0], torch.zeros(EXPERTS, dtype=torch.int64), probs[:0])[0].shape == (0, HIDDEN)
    for counts in ([2, 0, 5], [2, 0, 5, 1, 1]):  # rows past the last of too few went to the next expert
        with pytest.raises(ValueError, match="expected a number for each of 4 experts"):
            experts(rows, torch.tensor(counts), probs)
    for counts in ([2, 0, 5, 3], [3, -1, 2, 1]):
        with pytest.raises(ValueError, match=r"tokens_per_expert=\[.*does not fit 9 rows"):
            experts(rows, torch.tensor(counts), probs)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(moe.MoEOptions)])
def test_options_of_the_wrong_type_are_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be "):
        config(**{name: torch.ones(2)})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"moe_router_topk": 5}, "moe_router_topk=5 must be from 1 to num_moe_experts=4"),
        ({"moe_router_topk": 1}, "set moe_router_pre_softmax"),
        ({"num_moe_experts": 0}, "num_moe_experts must be a positive integer or None, got 0"),
        ({"activation": "gelu"}, "activation='gelu' has no gate"),
        ({"moe_router_enable_expert_bias": True}, 'needs moe_router_score_function="sigmoid"'),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type must be one of"),
        ({"moe_router_load_balancing_type": "quantile_balancing"}, "got 'quantile_balancing'"),
        ({"moe_router_score_function": "sqrtsoftplus"}, "moe_router_score_function must be one of"),
        ({"moe_router_dtype": "bf16"}, "moe_router_dtype must be one of"),
        ({"moe_token_dispatcher_type": "ring"}, "moe_token_dispatcher_type must be one of"),
        ({"moe_token_drop_policy": "last"}, "moe_token_drop_policy must be one of"),
        ({"moe_pad_expert_input_to_capacity": True}, "needs moe_expert_capacity_factor"),
        ({"moe_expert_capacity_factor": 0.0}, "moe_expert_capacity_factor must be positive"),
        ({"moe_expert_capacity_factor": math.nan}, "moe_expert_capacity_factor must be positive and finite, got nan"),
        ({"moe_expert_capacity_factor": math.inf}, "moe_expert_capacity_factor must be positive and finite, got inf"),
        ({"moe_shared_expert_gate": True}, "needs moe_shared_expert_intermediate_size"),
        ({"moe_router_num_groups": 2}, "need each other"),
        ({"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "groups must divide experts"),
        ({"moe_router_num_groups": 4, "moe_router_group_topk": 1}, "which they must hold"),
        ({"moe_layer_freq": [1, 2]}, "moe_layer_freq must have a 0 or 1 for each of 2 layers"),
        ({"moe_layer_freq": 0}, "moe_layer_freq must be positive"),
        ({"moe_ffn_hidden_size": 0}, "moe_ffn_hidden_size must be an integer of at least 1"),
        ({"moe_shared_expert_intermediate_size": 0}, "moe_shared_expert_intermediate_size must be an integer of at le"),
        ({"moe_router_num_groups": 0, "moe_router_group_topk": 1}, "moe_router_num_groups must be an integer of at le"),
        ({"moe_aux_loss_coeff": math.nan}, "moe_aux_loss_coeff must be finite and at least 0, got nan"),
        ({"moe_z_loss_coeff": -0.1}, "moe_z_loss_coeff must be finite and at least 0"),
        ({"moe_input_jitter_eps": -0.1}, "moe_input_jitter_eps must be finite and at least 0"),
        ({"moe_router_topk_scaling_factor": math.inf}, "moe_router_topk_scaling_factor must be finite"),
        ({"moe_router_bias_update_rate": -1e-3}, "moe_router_bias_update_rate must be finite and at least 0"),
    ],
    ids=str,
)
def test_refused_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**options)


def test_other_refusals() -> None:
    with pytest.raises(TypeError, match="moe_grouped_gem"):
        config(moe_grouped_gem=True)
    with pytest.raises(ModuleNotFoundError, match="DeepEP"):
        moe.MoELayer(config(moe_token_dispatcher_type="flex"))
    for shape in ((5, 2, HIDDEN + 1), ()):
        with pytest.raises(ValueError, match=r"hidden_states has shape \[.*expected \[..., 8\]"):
            moe.MoELayer(config())(torch.zeros(shape, dtype=torch.float64))
    with pytest.raises(ValueError, match="num_moe_experts is None"):
        moe.MoELayer(config(num_moe_experts=None))
    with pytest.raises(TypeError, match=r"pg_collection must have the process groups tp, ep.*it lacks \['tp', 'ep'"):
        moe.TopKRouter(config(), pg_collection=object())
    with pytest.raises(ValueError, match="must be 2 consecutive numbers"):
        moe.MoEAlltoAllTokenDispatcher(2, [0, 2], config(), ExpertGroups())
    assert [config(moe_layer_freq=freq).has_experts(1) for freq in (1, 2, [0, 1], [1, 0])] == [True, False, True, False]


@pytest.mark.parametrize(
    "options",
    [
        {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1, "moe_expert_capacity_factor": 0.5},
        {**BIASED, "moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1},
        {
            "moe_expert_capacity_factor": 0.5,
            "moe_pad_expert_input_to_capacity": True,
            "moe_token_dispatcher_type": "alltoall",
        },
    ],
    ids=["losses", "bias", "padded"],
)
def test_compiled(options: dict[str, Any]) -> None:
    """One graph, also of a capacity, with the gradients of losses and the tokens that are counted."""
    x, found = numbers(6, 2, HIDDEN, requires_grad=True), []
    for compiles in (False, True):
        layer = moe.MoELayer(config(**options))
        run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiles else layer
        output = run(x)[0]
        found.append((output, *torch.autograd.grad(output.square().sum(), (x, *layer.parameters()))))
        if options.get("moe_router_enable_expert_bias"):
            found[-1] += (layer.router.local_tokens_per_expert,)
    torch.testing.assert_close(*found)
