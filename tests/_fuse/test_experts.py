"""Experts of mixtures: one rule for all classes that transformers 5 decorates, by their flags.

The modules are stand-ins with the structure of those in transformers, which these tests do not need.
"""

from __future__ import annotations

import copy
import functools
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import apex

RULE = "experts of a mixture"


def decorated(**flags: bool) -> Any:
    """Return a decorator as transformers has it: it sets flags, and gives the class a forward that looks up another."""

    def wrapper(kind: Any) -> Any:
        first_init, first_forward = kind.__init__, kind.forward

        @functools.wraps(first_init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            first_init(self, *args, **kwargs)
            self.config = SimpleNamespace(_experts_implementation="eager")
            settings = dict(has_gate=True, has_bias=False, is_transposed=False, is_concatenated=True) | flags
            self.__dict__.update(settings)

        @functools.wraps(first_forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            assert self.config._experts_implementation == "eager"
            return first_forward(self, *args, **kwargs)

        if not hasattr(kind, "_apply_gate"):
            kind._apply_gate = lambda self, x: self.act_fn(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
        kind.__init__, kind.forward = __init__, forward
        return kind

    return wrapper


def eager(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute the experts one by one, with the flags of the module."""
    output = torch.zeros_like(hidden)
    for expert in range(module.num_experts):
        token, k = torch.where(index == expert)
        first, second = (each[expert] for each in (module.gate_up_proj, module.down_proj))
        first, second = (first, second) if module.is_transposed else (first.t(), second.t())
        pre = hidden[token] @ first + (module.gate_up_proj_bias[expert] if module.has_bias else 0)
        rows = module._apply_gate(pre) @ second + (module.down_proj_bias[expert] if module.has_bias else 0)
        output = output.index_add(0, token, (rows * weights[token, k, None]).to(hidden.dtype))
    return output


class Experts(nn.Module):
    """As in Mixtral, Qwen3-MoE and DeepSeek-V3."""

    def __init__(self, experts: int = 5, hidden: int = 24, width: int = 40, activation: Any = functional.silu) -> None:
        super().__init__()
        self.num_experts, self.hidden_dim, self.intermediate_dim = experts, hidden, width
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * width, hidden) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, width) * 0.3)
        self.act_fn = activation

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return eager(self, hidden_states, top_k_index, top_k_weights)


class GptOssExperts(nn.Module):
    """As in gpt-oss."""

    def __init__(self, experts: int = 4, hidden: int = 20, width: int = 20) -> None:
        super().__init__()
        self.num_experts, self.hidden_size, self.intermediate_size, self.limit = experts, hidden, width, 7.0
        self.gate_up_proj = nn.Parameter(torch.randn(experts, hidden, 2 * width) * 0.3)
        self.gate_up_proj_bias = nn.Parameter(torch.randn(experts, 2 * width))
        self.down_proj = nn.Parameter(torch.randn(experts, width, hidden) * 0.3)
        self.down_proj_bias = nn.Parameter(torch.randn(experts, hidden))

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x[..., ::2].clamp(max=self.limit), x[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * 1.702)

    def forward(self, hidden_states: Tensor, router_indices: Any = None, routing_weights: Any = None) -> Tensor:
        return eager(self, hidden_states, router_indices, routing_weights)


class OtherUnit(Experts):
    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)


class OtherForward(Experts):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return 2 * eager(self, hidden_states, top_k_index, top_k_weights)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16)


MixtralExperts = decorated()(Experts)
OssExperts = decorated(is_transposed=True, is_concatenated=False, has_bias=True)(GptOssExperts)


class Subclass(MixtralExperts):
    """A class that inherits the decorated forward."""


def arguments(module: Any, tokens: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    hidden = module.gate_up_proj.shape[1 if module.is_transposed else 2]
    weights, index = torch.rand(tokens, module.num_experts).topk(2)
    return torch.randn(tokens, hidden, requires_grad=True), index, weights.requires_grad_()


def results(module: Any, given: tuple[Tensor, ...], **named: Tensor) -> list[Tensor]:
    output = module(*given, **named)
    floats = [t for t in (*given, *named.values()) if t.requires_grad]
    return [output, *torch.autograd.grad(output.square().sum(), [*floats, *module.parameters()])]


@pytest.mark.parametrize("kind", [MixtralExperts, OssExperts, Subclass, functools.partial(MixtralExperts, 1, 8, 6)])
@pytest.mark.parametrize("keywords", [False, True])
def test_fused_experts_compute_the_same(kind: Any, keywords: bool) -> None:
    torch.manual_seed(0)
    module = kind()
    if module.num_experts == 1:
        given = (torch.randn(3, 8, requires_grad=True), torch.zeros(3, 1).long(), torch.rand(3, 1).requires_grad_())
    else:
        given = arguments(module)
    names = {}
    if keywords:
        given, rest = given[:1], given[1:]
        last = ("router_indices", "routing_weights") if kind is OssExperts else ("top_k_index", "top_k_weights")
        names = dict(zip(last, rest, strict=True))
    before = results(module, given, **names)
    (row,) = apex.fuse(module, verbose=False)
    assert (row.rule, row.reason) == (RULE, "")
    module.config._experts_implementation = "set later"  # has no effect on a fused module
    for actual, expected in zip(results(module, given, **names), before, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert "FusedExperts" in repr(module) or "FusedGptOss" in repr(module) or "FusedSubclass" in repr(module)
    apex.unfuse(module)
    module.config._experts_implementation = "eager"
    assert torch.equal(results(module, given, **names)[0], before[0])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: decorated()(OtherUnit)(), "_apply_gate is none of the units"),
        (lambda: decorated()(OtherForward)(), "computes something else"),
        (lambda: decorated(has_gate=False)(type("NoGate", (Experts,), {}))(), "have no gate"),
        (lambda: decorated(has_post_expert_norm=True)(type("Norm", (Experts,), {}))(), "end with a norm"),
        (lambda: MixtralExperts().to(torch.float8_e4m3fn), "float8"),
        (lambda: nn.ModuleList([Mlp(), Mlp()]), "separate modules"),
        (lambda: MixtralExperts(activation=torch.tanh), "none of the units"),
    ],
    ids=["unit", "forward", "no gate", "norm", "float8", "list", "tanh"],
)
def test_other_experts_are_reported(make: Any, reason: str) -> None:
    report = [row for row in apex.fuse(make(), verbose=False) if row.rule == RULE]
    assert len(report) == 1
    assert reason in report[0].reason


def test_half_precision_copies_and_autocast() -> None:
    torch.manual_seed(0)
    module = MixtralExperts().bfloat16()
    (row,) = apex.fuse(module, verbose=False)
    assert row.reason == ""
    hidden, index, weights = arguments(module)
    assert module(hidden.bfloat16(), index, weights).dtype == torch.bfloat16
    module.float()
    expected = module(hidden, index, weights)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(hidden, index, weights), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = module(hidden, index, weights)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05 * float(expected.detach().abs().max()))


def test_calls_of_another_form_reach_the_original() -> None:
    module = MixtralExperts()
    apex.fuse(module, verbose=False)
    hidden, index, weights = arguments(module)
    with pytest.raises(TypeError):
        module(hidden, index)
    with pytest.raises(IndexError):  # the original's error, not ours
        module(hidden, index, weights[:, :0])


def test_a_trial_takes_little_memory() -> None:
    """The copy that is compared is cut out of the module, whatever its sizes are."""
    sizes: list[int] = []
    forward = Experts.forward.__wrapped__  # type: ignore[attr-defined]

    class Watched(Experts):
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            sizes.append(self.gate_up_proj.numel())
            return forward(self, hidden_states, top_k_index, top_k_weights)

    kind = decorated()(Watched)
    (row,) = apex.fuse(kind(64, 96, 32), verbose=False)
    assert row.reason == ""
    assert sizes
    assert max(sizes) == 3 * 32 * 16
    (row,) = apex.fuse(kind(20, 20, 24), verbose=False)  # as many experts as the hidden size has elements
    assert row.reason == ""
