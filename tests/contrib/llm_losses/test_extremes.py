"""Losses of nearly certain and hopeless sequences, against the formulas in float64 and their limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from apex.contrib import llm_losses
from apex.contrib.llm_losses import FusedLinearORPOLoss
from apex.contrib.llm_losses.policy import LOSS_TYPES
from apex.contrib.llm_losses.preference import DIVERGENCES, DPO_LOSSES, SMOOTHED

DTYPES = (torch.float32, torch.float16)
LOG_PROBS = (0.0, -1e-9, -1e-4, -1.0, -30.0, -300.0, -900.0)
RATIOS = (-1e4, -900.0, -30.0, 0.0, 30.0, 900.0)
Loss = Callable[[Tensor, Tensor], Tensor]


def with_gradients(loss: Loss, first: float, second: float, dtype: torch.dtype) -> list[Tensor]:
    """Return the loss of one pair and its gradients."""
    leaves = [torch.tensor([value], dtype=dtype, requires_grad=True) for value in (first, second)]
    found = loss(*leaves)
    assert found.dtype == dtype, f"a loss of {dtype} log-probabilities is {found.dtype}: a constant has its own dtype"
    return [found.detach(), *torch.autograd.grad(found, leaves, materialize_grads=True)]


def compare(loss: Loss, exact: Loss, values: tuple[float, ...] = LOG_PROBS, rtol: float = 1e-4) -> None:
    for pair in itertools.product(values, values):
        rounded = [torch.tensor(value).item() for value in pair]
        expected = with_gradients(exact, *rounded, torch.float64)
        for actual, wanted in zip(with_gradients(loss, *pair, torch.float32), expected, strict=True):
            assert math.isclose(actual.item(), wanted.item(), rel_tol=rtol, abs_tol=1e-6), (pair, actual, wanted)


def no_nan(loss: Loss, pairs: Any, dtype: torch.dtype) -> None:
    for pair in pairs:
        found = with_gradients(loss, *pair, dtype)
        assert not any(each.isnan().any() for each in found), (pair, dtype, found)


BETA, EPS, LENGTHS = 0.1, 0.1, (2, 3)
DPO: dict[str, Loss] = {
    "sigmoid": lambda w, r: -logsigmoid(BETA * (w - r)),
    "hinge": lambda w, r: (1 - BETA * (w - r)).relu(),
    "ipo": lambda w, r: (w / 2 - r / 3 - 1 / (2 * BETA)) ** 2,
    "robust": lambda w, r: (-(1 - EPS) * logsigmoid(BETA * (w - r)) + EPS * logsigmoid(BETA * (r - w))) / (1 - 2 * EPS),
    "exo_pair": lambda w, r: (
        (BETA * (w - r)).sigmoid() * (logsigmoid(BETA * (w - r)) - math.log(1 - EPS))
        + (BETA * (r - w)).sigmoid() * (logsigmoid(BETA * (r - w)) - math.log(EPS))
    ),
    "nca_pair": lambda w, r: -logsigmoid(BETA * w) - 0.5 * logsigmoid(-BETA * w) - 0.5 * logsigmoid(-BETA * r),
    "bco_pair": lambda w, r: -logsigmoid(BETA * w) - logsigmoid(-BETA * r),
    "sppo_hard": lambda w, r: (w - 0.5 / BETA) ** 2 + (r + 0.5 / BETA) ** 2,
    "aot": lambda w, r: -(1 - EPS) * logsigmoid(BETA * (w - r)) - EPS * logsigmoid(BETA * (r - w)),
    "apo_zero": lambda w, r: (-BETA * w).sigmoid() + (BETA * r).sigmoid(),
    "apo_down": lambda w, r: (BETA * w).sigmoid() + (BETA * (r - w)).sigmoid(),
    "discopop": lambda w, r: (
        -logsigmoid(BETA * (w - r)) * (BETA * (r - w) / 0.05).sigmoid()
        + (BETA * (r - w)).exp() * (BETA * (w - r) / 0.05).sigmoid()
    ),
    "sft": lambda w, r: -w,
    "sigmoid_norm": lambda w, r: -logsigmoid(BETA * (w / 2 - r / 3)),
}
DPO["aot_unpaired"] = DPO["aot"]


def dpo(name: str, **options: Any) -> Loss:
    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        lengths = dict(zip(("chosen_lengths", "rejected_lengths"), torch.tensor(LENGTHS)[:, None], strict=True))
        smoothing = EPS if name in SMOOTHED else 0.0
        given = {"loss_type": name, "label_smoothing": smoothing, "nll_loss": -chosen[0], **lengths, **options}
        return llm_losses.dpo_loss(chosen, rejected, beta=BETA, **given)[0]

    return loss


@pytest.mark.parametrize("name", DPO_LOSSES)
def test_dpo(name: str) -> None:
    compare(dpo(name), lambda w, r: DPO[name](w, r).mean())
    for divergence, dtype in itertools.product(DIVERGENCES, DTYPES):
        loss = dpo(name, f_divergence_type=divergence, f_alpha_divergence_coef=0.5)
        no_nan(loss, itertools.product(RATIOS, RATIOS), dtype)


def exact_orpo(chosen: Tensor, rejected: Tensor) -> Tensor:
    odds = chosen - rejected - ((-chosen.expm1()).log() - (-rejected.expm1()).log())
    return -0.1 * logsigmoid(odds).mean()


def test_orpo() -> None:
    compare(lambda w, r: llm_losses.orpo_loss(w, r)[0], exact_orpo, LOG_PROBS[1:])
    for dtype in (*DTYPES, torch.bfloat16):
        for pair in itertools.product(LOG_PROBS, LOG_PROBS):
            tensors = [torch.tensor([value], dtype=dtype) for value in pair]
            found = [*with_gradients(lambda w, r: llm_losses.orpo_loss(w, r)[0], *pair, dtype)]
            found += llm_losses.orpo_loss(*tensors)
            assert all(each.isfinite().all() for each in found), (pair, dtype, found)


@pytest.mark.parametrize("rejected", LOG_PROBS[1:])
def test_the_limit_of_orpo_for_a_certain_chosen_sequence(rejected: float) -> None:
    """The loss goes to 0, its derivative for the chosen sequence to -beta times the odds of the rejected one."""
    found = with_gradients(lambda w, r: llm_losses.orpo_loss(w, r)[0], 0.0, rejected, torch.float32)
    odds = 1 / math.expm1(-torch.tensor(rejected).item()) if rejected > -300 else 0.0
    for actual, wanted in zip(found, (0.0, -0.1 * odds, 0.0), strict=True):
        assert math.isclose(actual.item(), wanted, rel_tol=1e-4, abs_tol=1e-6)


def test_orpo_of_a_rejected_sequence_that_is_certain() -> None:
    """The loss has no limit: it counts as the greatest probability below 1."""
    edge = math.log1p(-torch.finfo(torch.float32).eps / 2)
    found, wanted = (
        with_gradients(lambda w, r: llm_losses.orpo_loss(w, r)[0], -1.0, value, torch.float32) for value in (0.0, edge)
    )
    torch.testing.assert_close(found, wanted)


def test_orpo_of_a_head_that_is_sure_of_the_chosen_tokens() -> None:
    input = torch.eye(4).reshape(2, 2, 4).requires_grad_()
    weight = (60 * torch.eye(4)).requires_grad_()
    target = torch.tensor([[0, 1], [0, 1]])  # the head is sure of the first two rows, and of others than the last two
    loss, metrics = FusedLinearORPOLoss()(weight, input, target)
    assert metrics[0].item() == 0.0
    gradients = torch.autograd.grad(loss, (input, weight))
    assert all(each.isfinite().all() for each in (loss, *metrics, *gradients))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_simpo_and_cpo(smoothing: float) -> None:
    for gamma, function in ((0.5, llm_losses.simpo_loss), (0.0, llm_losses.cpo_loss)):

        def exact(w: Tensor, r: Tensor, gamma: float = gamma) -> Tensor:
            z = 0.1 * (w - r) - gamma
            return (-(1 - smoothing) * logsigmoid(z) - smoothing * logsigmoid(-z)).mean()

        compare(lambda w, r: function(w, r, label_smoothing=smoothing)[0], exact)  # noqa: B023
        for dtype in DTYPES:
            no_nan(lambda w, r: function(w, r)[0], itertools.product(RATIOS, RATIOS), dtype)  # noqa: B023


@pytest.mark.parametrize("desirable", [True, False])
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto(loss_type: str, desirable: bool) -> None:
    label, kl = torch.tensor([desirable]), 0.25 if loss_type == "kto" else 0.0
    options: dict[str, Any] = {"desirable_weight": 1.3, "undesirable_weight": 0.6, "loss_type": loss_type}

    def loss(logps: Tensor, ref: Tensor) -> Tensor:
        return llm_losses.kto_loss(logps, label, ref, torch.tensor(0.25, dtype=logps.dtype), **options)[0]

    def exact(logps: Tensor, ref: Tensor) -> Tensor:
        z = 0.1 * (logps - ref - kl)
        return (1.3 * (-z).sigmoid() if desirable else 0.6 * z.sigmoid()).mean()

    compare(loss, exact)
    for dtype in DTYPES:
        no_nan(loss, itertools.product(RATIOS, RATIOS), dtype)


def exact_policy(ratio: Tensor, a: float, log_probs: Tensor, o: dict[str, Any]) -> Tensor:
    rho = ratio.exp()
    if o["loss_type"] == "cispo":
        return -rho.clamp(max=1.2).detach() * a * log_probs
    if o["loss_type"] == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return -a * 4 / tau * (tau * (rho - 1)).sigmoid()
    loss = -torch.minimum(rho.clamp(max=o.get("delta", math.inf)) * a, rho.clamp(0.8, 1.2) * a)
    return torch.minimum(loss, torch.tensor(-o["dual_clip"] * a)) if "dual_clip" in o and a < 0 else loss


@pytest.mark.parametrize("more", [{}, {"delta": 1.5}, {"dual_clip": 3.0}, {"beta": 0.04}], ids=str)
@pytest.mark.parametrize(
    ("loss_type", "level"),
    [*((name, "token") for name in LOSS_TYPES), ("grpo", "sequence"), ("grpo", "sequence_token")],
)
def test_policies(loss_type: str, level: str, more: dict[str, Any]) -> None:
    """A clipped ratio that overflows has no gradient, not NaN; without a bound, loss and gradient may be infinite."""
    options: dict[str, Any] = {"loss_type": loss_type, "importance_sampling_level": level, **more}
    high = {"epsilon_high": 1.2} if loss_type == "cispo" else {}
    for advantage in (1.5, -1.5, 0.0):

        def loss(log_probs: Tensor, old: Tensor) -> Tensor:
            old = old.detach()[:, None]
            given = (torch.ones(1, 1), log_probs.new_tensor([advantage]), old)  # noqa: B023
            reference = old if "beta" in more else None
            settings = {**options, **high, "max_completion_length": 1}
            return llm_losses.grpo_loss(log_probs[:, None], *given, reference, **settings)[0]

        for dtype in DTYPES:
            no_nan(loss, itertools.product(RATIOS, RATIOS), dtype)
            no_nan(loss, [(-1.0, -math.inf)], dtype)  # the old policy never took this token
        if loss_type == "vespo" or level == "sequence_token":
            continue

        def exact(log_probs: Tensor, old: Tensor) -> Tensor:
            ratio = log_probs - old.detach()
            kl = (-ratio).exp() + ratio - 1
            return (exact_policy(ratio, advantage, log_probs, options) + more.get("beta", 0.0) * kl).sum()  # noqa: B023

        compare(loss, exact, (0.0, -1e-9, -1e-4, -1.0, -30.0, -70.0))
        if advantage >= 0 and "beta" not in more:  # bounded
            compare(loss, exact, (0.0, -30.0, -300.0))


def test_kl_estimates() -> None:
    for kind, dtype in itertools.product(("k1", "k2", "k3", "abs", "k1+", "k3+"), DTYPES):
        no_nan(lambda own, ref: llm_losses.kl_estimate(own, ref, kind).sum(), [(0.0, -900.0), (-900.0, 0.0)], dtype)  # noqa: B023
    ratio = torch.tensor([1e-4, -3e-4, 1e-3])
    exact = (-ratio.double()).exp() + ratio.double() - 1
    torch.testing.assert_close(llm_losses.kl_estimate(ratio, torch.zeros(3)).double(), exact, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_divergences_of_certain_rows(beta: float, dtype: torch.dtype) -> None:
    student = torch.tensor([[300.0, 0.0, -900.0], [0.0, 0.0, -math.inf]], dtype=dtype).log_softmax(-1).requires_grad_()
    teacher = torch.tensor([[0.0, 200.0, -900.0], [1.0, 0.0, -math.inf]], dtype=dtype).log_softmax(-1)
    found = llm_losses.divergence(student, teacher, beta)
    rest = llm_losses.top_k_log_probs(student, torch.tensor([[0, 1], [0, 1]]))
    assert found.dtype == rest.dtype == dtype
    total = found.sum() + rest[:, -1].sum()
    (gradient,) = torch.autograd.grad(total, student)
    assert total.isfinite()
    assert gradient.isfinite().all()


def test_weights_of_sorted_pairs_are_refused() -> None:
    """A sorted loss belongs to no pair."""
    ones = torch.ones(2)
    for name in ("aot", "aot_unpaired"):
        with pytest.raises(ValueError, match=f"{name!r} sorts the pairs: it takes no pair_weights"):
            llm_losses.dpo_loss(ones, ones, loss_type=name, pair_weights=ones)
        with pytest.raises(ValueError, match="nor use_weighting"):
            llm_losses.FusedLinearDPOLoss(loss_type=["sigmoid", name], use_weighting=True)
