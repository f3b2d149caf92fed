"""Losses of linear heads against float64 on all logits, and against Liger's where it is installed."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from apex.contrib import llm_losses
from apex.contrib.llm_losses import (
    FusedLinearCPOLoss,
    FusedLinearDistillationLoss,
    FusedLinearDPOLoss,
    FusedLinearGRPOLoss,
    FusedLinearKTOLoss,
    FusedLinearORPOLoss,
    FusedLinearSimPOLoss,
)
from apex.contrib.llm_losses.preference import DPO_LOSSES, SMOOTHED
from apex.ops.xentropy import chunks

BATCH, TOKENS, FEATURES, CLASSES = 4, 5, 6, 23
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def problem(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    target = torch.randint(0, CLASSES, (BATCH, TOKENS), generator=generator)
    target[0, :2], target[3, 3:] = -100, -100
    return {
        "input": draw(BATCH, TOKENS, FEATURES).requires_grad_(),
        "weight": draw(CLASSES, FEATURES).requires_grad_(),
        "bias": draw(CLASSES).requires_grad_(),
        "ref_input": draw(BATCH, TOKENS, FEATURES),
        "ref_weight": draw(CLASSES, FEATURES),
        "target": target,
        "labels": torch.tensor([True, False, False, True]),
        "advantages": torch.tensor([0.5, -1.0, 2.0, -0.3], dtype=torch.float64).to(dtype),
    }


def log_probs(input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, temperature: float = 1.0) -> Tensor:
    logits = functional.linear(input, weight, bias) / temperature
    own = logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return own.masked_fill(target == -100, 0.0)


def sequences(p: dict[str, Any], leaves: list[Tensor], average: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of policy and reference for each sequence, and the tokens' number."""
    lengths = (p["target"] != -100).sum(-1)
    found = log_probs(*leaves, p["target"]).sum(-1)
    ref = log_probs(p["ref_input"].double(), p["ref_weight"].double(), None, p["target"]).sum(-1)
    return (found / lengths, ref / lengths, lengths) if average else (found, ref, lengths)


def compare(found: Tensor, expected: Tensor, leaves: list[Tensor], wide: list[Tensor], dtype: torch.dtype) -> None:
    """Holds a loss and its gradients against those in float64, by norms."""
    gradients = torch.autograd.grad(found * 1.7, leaves), torch.autograd.grad(expected * 1.7, wide)
    pairs = [(found, expected), *zip(*gradients, strict=True)]
    for actual, wanted in pairs:
        error = (actual.double() - wanted).norm() / wanted.norm().clamp(min=1e-3)
        assert error < BOUNDS[dtype], f"off by {error:.2g}"


def with_leaves(dtype: torch.dtype) -> tuple[dict[str, Any], list[Tensor], list[Tensor]]:
    p = problem(dtype)
    leaves = [p["input"], p["weight"], p["bias"]]
    return p, leaves, [leaf.detach().double().requires_grad_() for leaf in leaves]


# Rounded log-probabilities of sequences move the other losses by more than a bound can say.
SMOOTH = ("sigmoid", "robust", "nca_pair", "bco_pair", "apo_zero", "apo_down", "sft", "sigmoid_norm", "aot")


@pytest.mark.parametrize(
    ("loss_type", "dtype"),
    [(name, dtype) for name in DPO_LOSSES for dtype in BOUNDS if dtype != torch.bfloat16 or name in SMOOTH],
)
def test_dpo(loss_type: str, dtype: torch.dtype) -> None:
    p, leaves, wide = with_leaves(dtype)
    beta, eps, half = 0.3, 0.1, BATCH // 2
    module = FusedLinearDPOLoss(beta=beta, loss_type=loss_type, label_smoothing=eps if loss_type in SMOOTHED else 0.0)
    found, metrics = module(leaves[1], leaves[0], p["target"], leaves[2], p["ref_input"], p["ref_weight"])
    logps, ref, lengths = sequences(p, wide, average=False)
    ratio = logps - ref
    w, l = ratio[:half], ratio[half:]  # noqa: E741
    z = beta * (w - l)
    means = ratio / lengths
    log_s = functional.logsigmoid
    aot = (logps[:half] - logps[half:]).sort()[0] - (ref[:half] - ref[half:]).sort()[0]
    unpaired = w.sort()[0] - l.sort()[0]
    share = (z / 0.05).sigmoid()
    chosen_tokens = log_probs(*wide, p["target"])[:half].sum() / lengths[:half].sum()
    expected = {
        "sigmoid": -log_s(z),
        "hinge": (1 - z).relu(),
        "ipo": (means[:half] - means[half:] - 1 / (2 * beta)) ** 2,
        "robust": (-(1 - eps) * log_s(z) + eps * log_s(-z)) / (1 - 2 * eps),
        "exo_pair": z.sigmoid() * (log_s(z) - math.log(1 - eps)) + (-z).sigmoid() * (log_s(-z) - math.log(eps)),
        "nca_pair": -log_s(beta * w) - 0.5 * log_s(-beta * w) - 0.5 * log_s(-beta * l),
        "bco_pair": -log_s(beta * w) - log_s(-beta * l),
        "sppo_hard": (w - 0.5 / beta) ** 2 + (l + 0.5 / beta) ** 2,
        "aot": -(1 - eps) * log_s(beta * aot) - eps * log_s(-beta * aot),
        "aot_unpaired": -(1 - eps) * log_s(beta * unpaired) - eps * log_s(-beta * unpaired),
        "apo_zero": 1 - (beta * w).sigmoid() + (beta * l).sigmoid(),
        "apo_down": (beta * w).sigmoid() + 1 - z.sigmoid(),
        "discopop": -log_s(z) * (1 - share) + (-z).exp() * share,
        "sft": -chosen_tokens,
        "sigmoid_norm": -log_s(beta * (means[:half] - means[half:])),
    }[loss_type].mean()
    compare(found, expected, leaves, wide, dtype)
    assert len(metrics) == 7
    torch.testing.assert_close(metrics[0].double(), logps[:half].detach(), rtol=0.02, atol=0.1)
    torch.testing.assert_close(metrics[5].double(), beta * w.detach(), rtol=0.02, atol=0.1)
    assert not any(metric.requires_grad for metric in metrics)


def test_dpo_options_of_trl() -> None:
    p, leaves, wide = with_leaves(torch.float64)
    half, mask = BATCH // 2, p["target"] != -100
    module = FusedLinearDPOLoss(
        loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.2], ld_alpha=0.5, use_weighting=True,
        f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.5,
    )  # fmt: skip
    found, _ = module(leaves[1], leaves[0], p["target"], leaves[2], p["ref_input"], p["ref_weight"])
    tokens = log_probs(*wide, p["target"])
    ref = log_probs(p["ref_input"], p["ref_weight"], None, p["target"])
    lengths = mask.sum(-1)
    shared = torch.minimum(lengths[:half], lengths[half:]).repeat(2)
    factors = torch.where(mask.cumsum(1) <= shared[:, None], 1.0, 0.5)
    ratio = ((tokens - ref) * factors).sum(-1)
    score = torch.exp(-0.5 * ratio) / -0.5
    logits = functional.linear(*wide).detach()
    squares = logits.softmax(-1).square().sum(-1).log()
    weights = (((tokens.detach() - squares) * mask).sum(-1) / lengths).exp()
    pair = weights[:half] * weights[half:]
    nll = -tokens[:half].sum() / lengths[:half].sum()
    expected = (-functional.logsigmoid(0.1 * (score[:half] - score[half:])) * pair).mean() + 0.2 * (nll * pair).mean()
    compare(found, expected, leaves, wide, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["cpo", "simpo", "orpo"])
def test_losses_without_a_reference(name: str, dtype: torch.dtype) -> None:
    p, leaves, wide = with_leaves(dtype)
    half, target = BATCH // 2, p["target"]
    module: Any = {"cpo": FusedLinearCPOLoss, "simpo": FusedLinearSimPOLoss, "orpo": FusedLinearORPOLoss}[name]()
    found, metrics = module(leaves[1], leaves[0], target, leaves[2])
    logps, _, lengths = sequences(p, wide, average=name != "cpo")
    w, l = logps[:half], logps[half:]  # noqa: E741
    nll = -log_probs(*wide, target)[:half].sum() / lengths[:half].sum()
    if name == "orpo":
        odds = (w - l) - (torch.log1p(-w.exp()) - torch.log1p(-l.exp()))
        expected = nll - 0.1 * functional.logsigmoid(odds).mean()
        assert len(metrics) == 9
    else:
        expected = -functional.logsigmoid(0.1 * (w - l) - (0.5 if name == "simpo" else 0.0)).mean() + nll
        assert len(metrics) == 7
    compare(found, expected, leaves, wide, dtype)
    without = module.__class__(compute_nll_loss=False)(leaves[1], leaves[0], target, leaves[2])[0]
    torch.testing.assert_close(without, found - metrics[4])


def test_orpo_of_nearly_certain_sequences_is_finite() -> None:
    chosen = torch.tensor([-1e-9, -1e-4, -50.0], requires_grad=True)
    loss, *_ = llm_losses.orpo_loss(chosen, torch.tensor([-2.0, -1e-8, -1e-3]))
    (gradient,) = torch.autograd.grad(loss, chosen)
    assert loss.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto(loss_type: str, dtype: torch.dtype) -> None:
    p, leaves, wide = with_leaves(dtype)
    kl = llm_losses.kto_kl(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 2.0]))
    assert kl == 0.5
    options = {"desirable_weight": 2.0, "undesirable_weight": 0.5, "loss_type": loss_type}
    module = FusedLinearKTOLoss(use_ref_model=True, beta=0.2, **options)
    arguments = (leaves[0], leaves[1], p["target"], leaves[2], p["labels"], p["ref_input"], p["ref_weight"], None, kl)
    found, metrics = module(*arguments)
    logps, ref, _ = sequences(p, wide, average=False)
    shifted = 0.2 * (logps - ref - (kl if loss_type == "kto" else 0.0))
    losses = torch.where(p["labels"], 2.0 * (1 - shifted.sigmoid()), 0.5 * (1 - (-shifted).sigmoid()))
    compare(found, losses.mean(), leaves, wide, dtype)
    torch.testing.assert_close(metrics[0].double(), logps.detach()[p["labels"]].sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        metrics[5].double(), 0.2 * (logps - ref).detach()[~p["labels"]].sum(), rtol=1e-5, atol=1e-5
    )


POLICIES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "bnpo": {"delta": 1.3},
    "dr_grpo": {"max_completion_length": 7},
    "dapo": {"use_bias_correction_kl": True},
    "cispo": {"epsilon_high": 1.1},
    "sapo": {},
    "luspo": {"importance_sampling_level": "sequence"},
    "vespo": {},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "gspo-token": {"loss_type": "grpo", "importance_sampling_level": "sequence_token"},
}


def exact_policy(
    p: dict[str, Any], wide: list[Tensor], old: Tensor | None, ref: Tensor, vllm: Tensor, o: dict
) -> Tensor:
    """The losses written out, in float64."""
    mask = (p["target"] != -100).double()
    tokens = log_probs(*wide, p["target"], 0.8)
    kind, level, high = o["loss_type"], o.get("importance_sampling_level", "token"), o.get("epsilon_high", 0.2)
    a = p["advantages"].double()[:, None]
    lengths = mask.sum(-1, keepdim=True)
    log_ratio = (tokens - (tokens.detach() if old is None else old)) * mask
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True) / lengths
    elif level == "sequence_token":
        log_ratio = log_ratio.sum(-1, keepdim=True).detach() / lengths + tokens - tokens.detach()
    rho = log_ratio.exp()
    if kind == "cispo":
        loss = -rho.clamp(max=high).detach() * a * tokens
    elif kind == "sapo":
        tau = torch.where(a > 0, a.new_tensor(1.0), a.new_tensor(1.05))
        loss = -a * 4 / tau * (tau * (rho - 1)).sigmoid()
    elif kind == "vespo":
        total = (log_ratio.detach().sum(-1) + vllm.log().sum(-1))[:, None].clamp(min=-18.420680743952367, max=20)
        k, rate = torch.where(a >= 0, 2.0, 3.0), torch.where(a >= 0, 3.0, 2.0)
        loss = -(rate + k * total - rate * total.exp()).exp() * a * tokens
    else:
        loss = -torch.minimum(rho.clamp(max=o.get("delta", 1e9)) * a, rho.clamp(0.8, 1 + high) * a)
    loss = loss if kind == "vespo" else loss * vllm
    kl = (ref - tokens).exp() - (ref - tokens) - 1
    loss = (loss + 0.04 * kl * (rho if o.get("use_bias_correction_kl") else 1.0)) * mask
    if kind in ("grpo", "sapo"):
        return (loss.sum(-1) / lengths[:, 0]).mean()
    if kind == "luspo":
        return loss.sum(-1).mean()
    return loss.sum() / {"bnpo": mask.sum(), "dr_grpo": BATCH * 7}.get(kind, torch.tensor(13.0))


# In bfloat16 a rounded log-probability may lie on the other side of a bound of the ratio to an old one.
@pytest.mark.parametrize(
    ("with_old", "dtype"),
    [(old, dtype) for dtype in BOUNDS for old in (True, False) if not (old and dtype.itemsize == 2)],
)
@pytest.mark.parametrize("name", POLICIES)
def test_grpo(name: str, with_old: bool, dtype: torch.dtype) -> None:
    p, leaves, wide = with_leaves(dtype)
    options = {"loss_type": name, **POLICIES[name]}
    generator = torch.Generator().manual_seed(1)
    near = log_probs(*[w.detach() for w in wide], p["target"], 0.8)
    shape = near.shape
    old = near + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) if with_old else None
    ref = near + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    vllm = 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
    module = FusedLinearGRPOLoss(temperature=0.8, **options)
    mask = p["target"] != -100
    found, metrics = module(
        leaves[0], leaves[1], p["target"].clamp(min=0), mask.long(), p["advantages"], leaves[2],
        ref_per_token_logps=ref, old_per_token_logps=old, vllm_is_ratio=vllm.masked_fill(~mask, 1.0),
        num_items_in_batch=13,
    )  # fmt: skip
    assert len(metrics) == 2
    expected = exact_policy(p, wide, old, ref, vllm.masked_fill(~mask, 1.0), options)
    compare(found, expected, leaves, wide, dtype)
    settings = {k: v for k, v in options.items() if k != "max_completion_length"}
    tokens = log_probs(*wide, p["target"], 0.8)
    plain, same = llm_losses.grpo_loss(
        tokens, mask, p["advantages"].double(), old, ref, vllm.masked_fill(~mask, 1.0), beta=0.04,
        max_completion_length=7, num_items_in_batch=13, **settings,
    )  # fmt: skip
    torch.testing.assert_close(plain, expected)
    for actual, wanted in zip(metrics, same, strict=True):
        torch.testing.assert_close(actual.double(), wanted.double(), rtol=0.1, atol=0.05)


def test_policies_of_verl() -> None:
    """The loss of negative advantages is bounded by -c A, and the logarithm of a ratio by a limit."""
    p, leaves, wide = with_leaves(torch.float64)
    mask = p["target"] != -100
    tokens = log_probs(*wide, p["target"])
    old = tokens.detach() + torch.linspace(-9.0, 9.0, mask.numel(), dtype=torch.float64).view_as(tokens)
    settings = {"loss_type": "bnpo", "beta": 0.0, "dual_clip": 3.0, "log_ratio_limit": 5.0}
    ids = p["target"].clamp(min=0)
    module = FusedLinearGRPOLoss(**settings)
    found, _ = module(leaves[0], leaves[1], ids, mask, p["advantages"], leaves[2], old_per_token_logps=old)
    rho, a = (tokens - old).clamp(-5.0, 5.0).exp(), p["advantages"][:, None]
    losses = -torch.minimum(rho * a, rho.clamp(0.8, 1.2) * a)
    losses = torch.where(a < 0, torch.minimum(losses, -3.0 * a), losses)
    assert (losses == -3.0 * a).any()
    expected = losses[mask].mean()
    compare(found, expected, leaves, wide, torch.float64)
    for name in ("dual_clip", "log_ratio_limit"):
        with pytest.raises(ValueError, match=f"{name}=0.0 must be positive"):
            FusedLinearGRPOLoss(**{name: 0.0})


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_values_of_tokens_that_do_not_count_are_not_read(level: str) -> None:
    p, leaves, _ = with_leaves(torch.float64)
    mask, ids = p["target"] != -100, p["target"].clamp(min=0)
    clean = [torch.full(mask.shape, value, dtype=torch.float64) for value in (0.5, -3.0, -2.5, 1.1)]
    results = []
    for filler in (1.0, math.nan):
        given = [each.masked_fill(~mask, filler) for each in clean]
        module = FusedLinearGRPOLoss(importance_sampling_level=level)
        advantages, old, ref, vllm = given
        loss, _ = module(leaves[0], leaves[1], ids, mask, advantages, leaves[2], ref, old, vllm_is_ratio=vllm)
        plain, _ = llm_losses.grpo_loss(
            log_probs(*leaves, p["target"]),
            mask,
            advantages,
            old,
            ref,
            vllm,
            beta=0.04,
            importance_sampling_level=level,
        )
        results += [loss, plain]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_token_losses_take_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """And hold one chunk of logits; ratios of sequences keep the logits or compute them again."""
    p, leaves, _ = with_leaves(torch.float32)
    seen: list[tuple] = []
    original = chunks.walk
    monkeypatch.setattr(
        chunks, "walk", lambda *a, **k: seen.append((a[4], k.get("filled", False))) or original(*a, **k)
    )
    arguments = (leaves[0], leaves[1], p["target"].clamp(min=0), p["target"] != -100, p["advantages"])
    for options, passes in (
        ({}, [((True, True, False), False)]),
        ({"importance_sampling_level": "sequence"}, [((False,) * 3, False), ([True, True, False], True)]),
        (
            {"importance_sampling_level": "sequence", "keep_logits": False},
            [((False,) * 3, False), ([True, True, False], False)],
        ),
    ):
        seen.clear()
        FusedLinearGRPOLoss(beta=0.0, **options)(*arguments)[0].backward()
        assert seen == passes


def test_one_pass_is_differentiable_once_and_through_a_retained_graph_twice() -> None:
    p, leaves, _ = with_leaves(torch.float32)
    module = FusedLinearGRPOLoss(beta=0.0)
    arguments = (leaves[0], leaves[1], p["target"].clamp(min=0), p["target"] != -100, p["advantages"])
    loss, _ = module(*arguments)
    first = torch.autograd.grad(loss, leaves[:2], retain_graph=True)
    again = torch.autograd.grad(loss, leaves[:2])
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
    (gradient,) = torch.autograd.grad(module(*arguments)[0], leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "beta", "teacher"),
    [
        (kind, beta, teacher)
        for kind, beta in (("jsd", 0.0), ("jsd", 1.0), ("jsd", 0.3), ("tvd", 0.5))
        for teacher in ("head", "logits", "top_k", "larger", "smaller")
        if (beta, teacher) not in ((0.0, "larger"), (1.0, "smaller"))  # infinite
    ],
)
def test_distillation(kind: str, beta: float, teacher: str, dtype: torch.dtype) -> None:
    p, leaves, wide = with_leaves(dtype)
    labels = p["target"].reshape(-1)
    classes = {"larger": CLASSES + 4, "smaller": CLASSES - 4}.get(teacher, CLASSES)
    generator = torch.Generator().manual_seed(2)
    head = torch.randn(classes, 3, generator=generator, dtype=torch.float64).to(dtype)
    states = torch.randn(BATCH, TOKENS, 3, generator=generator, dtype=torch.float64).to(dtype)
    logits = functional.linear(states, head)
    options = {"beta": beta, "temperature": 1.7, "kind": kind}
    module = FusedLinearDistillationLoss(
        weight_hard_loss=0.3, weight_soft_loss=0.6, chunk_size=3, return_soft_hard_loss=True, **options
    )
    top = (logits.double() / 1.7).log_softmax(-1).topk(4)
    given: dict[str, Any] = {"logits": {"teacher_logits": logits}, "top_k": {"teacher_top_k": tuple(top)}}.get(
        teacher, {}
    )
    network = (None, None) if given else (states, head)
    found, soft, hard = module(leaves[0], leaves[1], *network, labels, leaves[2], **given)
    z = functional.linear(*wide).reshape(-1, CLASSES)
    t = functional.linear(states.double(), head.double()).reshape(-1, classes)
    student, other = (z / 1.7).softmax(-1), (t / 1.7).softmax(-1)
    student = functional.pad(student, (0, max(0, classes - CLASSES)))
    other = functional.pad(other, (0, max(0, CLASSES - classes)))
    if teacher == "top_k":
        index = top.indices.reshape(-1, 4)
        student, other = (
            torch.cat([each.gather(-1, index), 1 - each.gather(-1, index).sum(-1, keepdim=True)], -1)
            for each in (student, other)
        )

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a > 0, a * (a.clamp(min=1e-300).log() - b.clamp(min=1e-300).log()), 0.0).sum(-1)

    if kind == "tvd":
        losses = 0.5 * (student - other).abs().sum(-1)
    elif beta in (0.0, 1.0):
        losses = kl(other, student) if beta == 0.0 else kl(student, other)
    else:
        mix = beta * other + (1 - beta) * student
        losses = beta * kl(other, mix) + (1 - beta) * kl(student, mix)
    count = (labels != -100).sum()
    expected_soft = losses[labels != -100].sum() / count
    expected_hard = functional.cross_entropy(z, labels)
    compare(found, 0.3 * expected_hard + 0.6 * expected_soft, leaves, wide, dtype)
    torch.testing.assert_close(soft.double(), expected_soft.detach(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(hard.double(), expected_hard.detach(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FusedLinearDPOLoss(loss_type="dpo"), "loss_type 'dpo' is not known; use sigmoid, hinge"),
        (lambda: FusedLinearDPOLoss(loss_type="exo_pair"), "label_smoothing=0.0 must be between 0 and 1"),
        (lambda: FusedLinearDPOLoss(loss_type="robust", label_smoothing=0.5), "below 0.5"),
        (lambda: FusedLinearGRPOLoss(loss_type="ppo"), "loss_type 'ppo' is not known; use grpo"),
        (lambda: FusedLinearGRPOLoss(loss_type="sapo", importance_sampling_level="sequence"), "needs importance"),
        (lambda: FusedLinearGRPOLoss(delta=0.0), "delta=0.0 must be positive"),
        (lambda: FusedLinearDistillationLoss(temperature=0.0), "temperature=0.0 must be positive"),
        (lambda: FusedLinearDistillationLoss(kind="l2"), "kind 'l2' is not known; use jsd, tvd"),
        (lambda: llm_losses.divergence(torch.zeros(2), torch.zeros(2), 1.5), "beta=1.5 must be between 0 and 1"),
        (lambda: llm_losses.token_weights(torch.ones(2, 2), "dr_grpo"), "needs max_completion_length"),
        (lambda: llm_losses.token_weights(torch.ones(2, 2), "mean"), "'mean' is not known; use grpo"),
        (lambda: llm_losses.kl_estimate(torch.ones(2), torch.ones(2), "k4"), "'k4' is not known"),
        (lambda: llm_losses.dpo_loss(torch.ones(2), torch.ones(2), loss_type="ipo"), "needs chosen_lengths"),
        (lambda: llm_losses.dpo_loss(torch.ones(2), torch.ones(2), loss_weights=[1.0, 2.0]), "one for each loss_type"),
        (lambda: llm_losses.kto_loss(torch.ones(2), torch.ones(2), loss_type="bco"), "use kto, apo_zero_unpaired"),
        (lambda: llm_losses.dpo_loss(torch.ones(2), torch.ones(2), torch.ones(2)), "give both, or neither"),
        (lambda: llm_losses.grpo_loss(*torch.ones(3, 2, 2), beta=0.1), "ref_log_probs is missing"),
        (lambda: llm_losses.distillation_loss(*torch.ones(2, 3, 4), reduction="batchmean"), "use mean, sum, none"),
        (lambda: llm_losses.distillation_loss(*torch.ones(2, 3, 4), temperature=-1.0), "temperature=-1.0 must be"),
    ],
)
def test_bad_arguments_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


COLUMN, ROW = torch.full((3, 1), -2.0), torch.full((3,), -1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: llm_losses.dpo_loss(ROW, COLUMN),
        lambda: llm_losses.dpo_loss(ROW, ROW, ROW, ROW, pair_weights=COLUMN),
        lambda: llm_losses.cpo_loss(ROW, COLUMN),
        lambda: llm_losses.orpo_loss(ROW, COLUMN),
        lambda: llm_losses.kto_loss(ROW, COLUMN.bool()),
        lambda: llm_losses.kto_kl(ROW, COLUMN),
    ],
)
def test_sequences_are_not_compared_with_all_others(make: Any) -> None:
    """Shapes [B] and [B, 1] broadcast to all pairs, and the mean over these is a number, too."""
    with pytest.raises(ValueError, match=r"\[3\].*\[3, 1\].*must have one shape"):
        make()


def test_tokens_of_one_sequence_are_not_those_of_all() -> None:
    """A mask, old log-probabilities or ids of one sequence broadcast to all."""
    tokens, mask, advantages = torch.zeros(3, 2), torch.ones(3, 2), torch.ones(3)
    head = FusedLinearGRPOLoss(beta=0.0)
    ids = torch.zeros(3, 2, dtype=torch.int64)
    for make in (
        lambda: llm_losses.grpo_loss(tokens, mask[:1], advantages),
        lambda: llm_losses.grpo_loss(tokens, mask, advantages, tokens[:1]),
        lambda: llm_losses.sequence_log_probs(tokens, mask[:1]),
        lambda: head(torch.ones(3, 2, 4), torch.ones(5, 4), ids[:1], mask, advantages),
        lambda: head(torch.ones(3, 2, 4), torch.ones(5, 4), ids, mask, advantages, old_per_token_logps=tokens[:1]),
    ):
        with pytest.raises(ValueError, match=r"\[1, 2\].*must have one shape"):
            make()


def test_rows_of_teachers_and_labels_fit() -> None:
    student = torch.zeros(2, 3, 5)
    with pytest.raises(ValueError, match="the teacher"):
        llm_losses.distillation_loss(student, torch.zeros(1, 3, 5))
    with pytest.raises(ValueError, match="labels have shape"):
        llm_losses.distillation_loss(student, student, torch.zeros(3, dtype=torch.int64))


def test_settings_without_effect_warn() -> None:
    with pytest.warns(UserWarning, match="no effect on loss_type sigmoid") as caught:
        module = FusedLinearDPOLoss(use_ref_model=False, label_smoothing=0.1)
    assert caught[0].filename == __file__
    weight, hidden, target = torch.ones(4, 3), torch.ones(2, 2, 3), torch.ones(2, 2, dtype=torch.int64)
    with pytest.warns(UserWarning, match="use_ref_model=True"):
        module(weight, hidden, target, None, hidden, weight)
    with pytest.warns(UserWarning, match=r"beta=0\.04 has no effect") as caught:
        FusedLinearGRPOLoss(use_ref_model=False)
    assert caught[0].filename == __file__


def test_estimates_of_kl() -> None:
    own, ref = torch.tensor([-1.0, -3.0], requires_grad=True), torch.tensor([-2.0, -2.5])
    r = torch.tensor([1.0, -0.5])
    values = {"k1": r, "abs": r.abs(), "k2": r.square() / 2, "k3": (-r).exp() + r - 1}
    for name, expected in values.items():
        torch.testing.assert_close(llm_losses.kl_estimate(own, ref, name), expected)
        straight = llm_losses.kl_estimate(own, ref, name + "+")
        torch.testing.assert_close(straight, expected)
        torch.testing.assert_close(torch.autograd.grad(straight.sum(), own)[0], r)


def test_verls_aggregations() -> None:
    losses, mask = torch.tensor([[1.0, 2.0], [4.0, 8.0]]), torch.tensor([[1, 1], [1, 0]])
    for name, expected in (
        ("token-mean", 7 / 3),
        ("token-sum", 7.0),
        ("seq-mean-token-sum", 3.5),
        ("seq-mean-token-sum-norm", 3.5 / 10),
        ("seq-mean-token-mean", (1.5 + 4) / 2),
    ):
        weights = llm_losses.token_weights(mask, name, max_completion_length=10)
        torch.testing.assert_close((weights * losses).sum().item(), expected)


def liger(name: str, **options: Any) -> Any:
    module = pytest.importorskip("liger_kernel.chunked_loss")
    return getattr(module, f"Liger{name}")(compiled=False, **options)


@pytest.mark.parametrize(
    ("ours", "options", "arguments"),
    [
        *(
            (FusedLinearDPOLoss, {"loss_type": name}, "reference")
            for name in ("sigmoid", "hinge", "apo_down", "discopop")
        ),
        (FusedLinearDPOLoss, {"loss_type": "robust", "label_smoothing": 0.1, "compute_nll_loss": True}, "reference"),
        (FusedLinearDPOLoss, {"loss_type": "exo_pair", "label_smoothing": 0.1}, "reference"),
        (FusedLinearCPOLoss, {"label_smoothing": 0.1}, "pairs"),
        (FusedLinearSimPOLoss, {"label_smoothing": 0.1}, "pairs"),
        (FusedLinearORPOLoss, {}, "pairs"),
        (FusedLinearKTOLoss, {"use_ref_model": True}, "kto"),
        *((FusedLinearGRPOLoss, {"loss_type": name}, "policy") for name in ("grpo", "bnpo", "dapo", "sapo", "vespo")),
        (FusedLinearGRPOLoss, {"loss_type": "cispo", "epsilon_high": 1.1}, "policy"),
        (FusedLinearGRPOLoss, {"loss_type": "dr_grpo", "max_completion_length": 9}, "policy"),
        (FusedLinearGRPOLoss, {"loss_type": "grpo", "importance_sampling_level": "sequence", "delta": 1.2}, "policy"),
        (FusedLinearDistillationLoss, {"beta": 0.3, "temperature": 2.0, "chunk_size": 7}, "teacher"),
    ],
)
def test_as_ligers(ours: Any, options: dict, arguments: str) -> None:
    """Where the definitions agree: losses, gradients, and the metrics that do not count ignored tokens."""
    p, leaves, _ = with_leaves(torch.float32)
    name = ours.__name__.replace("Distillation", "JSD")
    theirs = liger(name, **options)
    near = log_probs(*[leaf.detach() for leaf in leaves], p["target"])
    old, ref = near + 0.3 * torch.sin(torch.arange(near.numel())).view(near.shape), near - 0.2
    unpaired, kl, mask = leaves[:2], torch.tensor(0.3), p["target"] != -100
    flat = leaves[0].flatten(0, 1), p["ref_input"].flatten(0, 1)
    given = {
        "reference": (leaves[1], leaves[0], p["target"], leaves[2], p["ref_input"], p["ref_weight"]),
        "pairs": (leaves[1], leaves[0], p["target"], leaves[2]),
        "kto": (*unpaired, p["target"], leaves[2], p["labels"], p["ref_input"], p["ref_weight"], None, kl),
        "policy": (*unpaired, p["target"].clamp(min=0), mask.long(), p["advantages"], leaves[2], ref, old),
        "teacher": (flat[0], leaves[1], flat[1], p["ref_weight"], p["target"].flatten(), leaves[2]),
    }[arguments]  # fmt: skip
    results = [module(*given) for module in (ours(**options), theirs)]
    losses = [result[0] if isinstance(result, tuple) else result for result in results]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    for actual, wanted in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
    if arguments in ("reference", "pairs", "policy"):
        assert len(results[0][1]) == len(results[1][1])
        for place, (actual, wanted) in enumerate(zip(results[0][1], results[1][1], strict=True)):
            if arguments == "policy" or (
                place not in (2, 3) and not (place == 4 and not options.get("compute_nll_loss", True))
            ):
                torch.testing.assert_close(actual, torch.as_tensor(wanted), rtol=1e-4, atol=1e-5)


def test_compiled_without_graph_breaks() -> None:
    p, leaves, _ = with_leaves(torch.float32)
    modules = [FusedLinearDPOLoss(), FusedLinearGRPOLoss(beta=0.0), FusedLinearDistillationLoss()]

    def step(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        target = p["target"]
        first = modules[0](weight, input, target, bias, p["ref_input"], p["ref_weight"])[0]
        second = modules[1](input, weight, target.clamp(min=0), target != -100, p["advantages"], bias)[0]
        third = modules[2](input, weight, p["ref_input"], p["ref_weight"], target.flatten(), bias)
        return first + second + third

    torch._dynamo.reset()
    expected = step(*leaves)
    wanted = torch.autograd.grad(expected, leaves)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(found, expected)
    for actual, gradient in zip(torch.autograd.grad(found, leaves), wanted, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_memory_is_one_chunk(name: str) -> None:
    batch, tokens, features, classes = 4, 1024, 256, 65536
    input = torch.randn(batch, tokens, features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(classes, features, device="cuda", dtype=torch.bfloat16) * 0.05).requires_grad_()
    target = torch.randint(0, classes, (batch, tokens), device="cuda")
    if name == "dpo":
        run = functools.partial(FusedLinearDPOLoss(use_ref_model=False), weight, input, target)
    else:
        advantages = torch.randn(batch, device="cuda")
        run = functools.partial(FusedLinearGRPOLoss(beta=0.0), input, weight, target, target >= 0, advantages)
    chunk = batch * tokens * classes  # half of all logits, in bytes
    torch.autograd.grad(run()[0], (input, weight))  # cuBLAS takes a workspace of each thread at its first product
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(run()[0], (input, weight))
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 2 * (input.numel() + weight.numel()) + 1.2 * chunk
