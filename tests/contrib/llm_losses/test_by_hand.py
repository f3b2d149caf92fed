"""VESPO, LD-DPO and weighted preferences against the papers' formulas, one sequence and token at a time in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from apex.contrib import llm_losses
from apex.contrib.llm_losses import FusedLinearDPOLoss, FusedLinearGRPOLoss

PAIRS, TOKENS, FEATURES, CLASSES = 2, 6, 5, 11


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens_of(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return log-probabilities of the targets."""
    return (input @ weight.T).log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]


def preference_problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return input, weight, targets with prompts in front and padding behind, and the reference's input."""
    target = torch.randint(0, CLASSES, (2 * PAIRS, TOKENS), generator=torch.Generator().manual_seed(1))
    target[0, :1], target[1, 4:], target[2, 2:], target[3, :3] = -100, -100, -100, -100
    shape = (2 * PAIRS, TOKENS, FEATURES)
    return draw(*shape, seed=2).requires_grad_(), draw(CLASSES, FEATURES, seed=3), target, draw(*shape, seed=4)


@pytest.mark.parametrize("use_weighting", [False, True])
@pytest.mark.parametrize("ld_alpha", [None, 0.0, 0.3, 1.0])
def test_ld_alpha_and_use_weighting(ld_alpha: float | None, use_weighting: bool) -> None:
    """LD-DPO: a sequence's tokens beyond its partner's length count alpha times. WPO: a pair's loss is multiplied by

    both sequences' exp of the mean of log p(token) - log sum of p squared, as a constant.
    """
    input, weight, target, ref_input = preference_problem()
    module = FusedLinearDPOLoss(beta=0.3, ld_alpha=ld_alpha, use_weighting=use_weighting)
    found, _ = module(weight, input, target, None, ref_input, weight)
    tokens, ref = tokens_of(input, weight, target), tokens_of(ref_input, weight, target)
    squares = (input.detach() @ weight.T).softmax(-1).square().sum(-1).log()
    expected = torch.zeros((), dtype=torch.float64)
    for pair in range(PAIRS):
        places = [[t for t in range(TOKENS) if target[row, t] != -100] for row in (pair, pair + PAIRS)]
        shared = min(map(len, places))
        ratios, factor = [], 1.0
        for row, mine in zip((pair, pair + PAIRS), places, strict=True):
            alpha = 1.0 if ld_alpha is None else ld_alpha
            ratios.append(
                sum((1.0 if n < shared else alpha) * (tokens[row, t] - ref[row, t]) for n, t in enumerate(mine))
            )
            factor *= math.exp(sum(tokens[row, t].item() - squares[row, t].item() for t in mine) / len(mine))
        loss = (1 + (-0.3 * (ratios[0] - ratios[1])).exp()).log()
        expected = expected + loss * (factor if use_weighting else 1.0) / PAIRS
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, input)[0] for loss in (found, expected)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_sequences_are_counted_exactly(dtype: torch.dtype) -> None:
    """Bfloat16 counts to 256."""
    mask = torch.ones(2, 1000, dtype=torch.bool)
    mask[0, :5], mask[1, :5], mask[1, 985:] = False, False, False
    log_probs = torch.zeros(2, 1000, dtype=dtype)
    log_probs[:, 985:] = -1.0
    for kind in (mask, mask.int(), mask.to(dtype)):
        found = llm_losses.sequence_log_probs(log_probs, kind, ld_alpha=0.25)
        assert found.tolist() == [-15 / 4, 0.0]
        means = llm_losses.sequence_log_probs(log_probs - 1.0, kind, average=True)
        torch.testing.assert_close(means.float(), torch.tensor([-1010 / 995, -1.0]), rtol=0.01, atol=0)


def test_values_of_tokens_that_do_not_count_are_not_read() -> None:
    log_probs, squares = torch.tensor([[-1.0, math.nan], [-2.0, -3.0]]), torch.tensor([[-0.5, -1.0], [math.inf, -2.0]])
    weights = llm_losses.wpo_weights(log_probs, squares, torch.tensor([[1, 0], [0, 1]]))
    torch.testing.assert_close(weights, torch.tensor([-0.5, -1.0]).exp())
    with pytest.raises(ValueError, match="ld_alpha needs chosen and rejected sequences, log_probs has 3 rows"):
        llm_losses.sequence_log_probs(torch.zeros(3, 2), torch.ones(3, 2), ld_alpha=0.5)


def vespo(own: Tensor, old: Tensor, mask: Tensor, a: Tensor, vllm: Tensor | None, s: dict[str, float]) -> Tensor:
    """Return the loss: -sg[exp(rate) w^k exp(-rate w)] A log p, w the ratio of the whole sequence, sums / tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(own)):
        places = [t for t in range(own.shape[1]) if mask[row, t]]
        log_w = sum(max(-20.0, min(20.0, (own - old)[row, t].item())) for t in places)
        if vllm is not None:
            log_w += sum(max(math.log(1e-8), min(20.0, math.log(vllm[row, t].item()))) for t in places)
        w = math.exp(max(math.log(1e-8), min(20.0, log_w)))
        for t in places:
            side = "pos" if a[row, t] >= 0 else "neg"
            k, rate = s[f"vespo_k_{side}"], s[f"vespo_lambda_{side}"]
            phi = math.exp(rate - rate * w) * w**k
            total = total - phi * a[row, t] * own[row, t]
    return total / mask.sum()


@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0], ids="spread={}".format)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("with_vllm", [False, True])
def test_vespo(with_vllm: bool, per_token: bool, spread: float) -> None:
    settings = {"vespo_k_pos": 1.7, "vespo_lambda_pos": 2.6, "vespo_k_neg": 2.9, "vespo_lambda_neg": 1.3}
    input, weight, target, _ = preference_problem()
    mask, ids = target != -100, target.clamp(min=0)
    old = tokens_of(input, weight, ids).detach() + spread * draw(*mask.shape, seed=7)
    a = draw(*mask.shape, seed=8) if per_token else draw(len(mask), seed=8)
    vllm = (0.3 * draw(*mask.shape, seed=9)).exp() if with_vllm else None
    found, _ = FusedLinearGRPOLoss(beta=0.0, loss_type="vespo", **settings)(
        input, weight, ids, mask, a, old_per_token_logps=old, vllm_is_ratio=vllm
    )
    own = tokens_of(input, weight, ids)
    expected = vespo(own, old, mask, a if per_token else a[:, None].expand_as(mask), vllm, settings)
    plain, _ = llm_losses.grpo_loss(own, mask, a, old, None, vllm, loss_type="vespo", **settings)  # type: ignore[arg-type]
    for actual in (found, plain):
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(
            *(torch.autograd.grad(loss, input, retain_graph=True)[0] for loss in (actual, expected))
        )


def test_fewer_items_than_ranks() -> None:
    """Ranks' losses are averaged: the sum over the ranks divided by the items, of which there is at least one."""
    mask = torch.ones(1, 2)
    for items, wanted in ((3.0, 8 / 3), (0.0, 8.0)):
        for number in (items, torch.tensor(items)):
            weights: Any = llm_losses.token_weights(mask, "dapo", num_items_in_batch=number, world_size=8)
            torch.testing.assert_close(weights, torch.full((1, 2), wanted))
