"""Modules that resemble a kind that `apex.fuse` knows: they compute the same numbers after it as before.

Causal language models and attentions are stand-ins with the structure of those in transformers, which these tests
do not need.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import apex

from .test_fuse import Bottleneck, GatedMLP, RMSNorm, TimmBlock


class ClampedRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-64, 64))


class NestedRMSNorm(RMSNorm):
    """The clamp is in a function inside of `forward`."""

    def forward(self, x: Tensor) -> Tensor:
        def limited(x: Tensor) -> Tensor:
            return x.clamp(-64, 64)

        x = limited(x)
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


class HelpedRMSNorm(RMSNorm):
    """The clamp is in a method that `forward` calls."""

    def _norm(self, x: Tensor) -> Tensor:
        x = x.clamp(-64, 64)
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self._norm(x)


class TrainingRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        eps = 1e-2 if self.training else self.eps
        return self.weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


class GatesLargeRMSNorm(RMSNorm):
    """A norm whose code names nothing unusual, but which drops large numbers."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * (x < 64)
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


class GatesTinyRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x * (x.square() > 1e-6)
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


class GatesNegativeRMSNorm(RMSNorm):
    """A norm that gives zero if all its inputs are negative."""

    def forward(self, x: Tensor) -> Tensor:
        factor = (x > 0).sum() > 0
        return factor * self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


class LimitedSiLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(x).clamp(max=8)


class TrainingSiLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(x) if self.training else functional.relu(x)


class LimitedMLP(GatedMLP):
    """The names of a gated MLP, with a limit written as an operator."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(self.act_fn(gate * (gate < 8)) * self.up_proj(x))


class StandardisedConv(nn.Conv2d):
    """A convolution that overrides what `nn.Conv2d.forward` calls, not `forward`."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight - weight.mean(), bias)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: ClampedRMSNorm(8), "its forward also uses"),
        (lambda: NestedRMSNorm(8), "its forward also uses clamp"),
        (lambda: HelpedRMSNorm(8), "its forward also uses clamp"),
        (lambda: TrainingRMSNorm(8), "its forward also uses training"),
        (lambda: GatesLargeRMSNorm(8), "for large inputs"),
        (lambda: GatesTinyRMSNorm(8), "for tiny inputs"),
        (lambda: GatesNegativeRMSNorm(8), "for negative inputs"),
        (lambda: GatedMLP(LimitedSiLU()), "its activation is none of"),
        (lambda: GatedMLP(TrainingSiLU()), "its activation is none of"),
        (lambda: LimitedMLP(nn.SiLU()), "for large inputs"),
        (lambda: StandardisedConv(3, 16, 3, 2, 1), "its class has a _conv_forward of its own"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_modules_with_another_formula_are_not_fused(make: Callable[[], nn.Module], reason: str, training: bool) -> None:
    model = make().train(training)
    kind, flags = type(model), [module.training for module in model.modules()]
    (row,) = apex.fuse(model, verbose=False)
    assert reason in row.reason
    assert type(model) is kind
    assert [module.training for module in model.modules()] == flags


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "make", [lambda: RMSNorm(64), lambda: GatedMLP(nn.SiLU()), lambda: Bottleneck(8, True), lambda: TimmBlock(8)]
)
def test_trials_refuse_nothing_that_is_right(make: Callable[[], nn.Module], dtype: torch.dtype, training: bool) -> None:
    torch.manual_seed(0)
    model = make().to(dtype).train(training)
    assert [row.reason for row in apex.fuse(model, verbose=False)] == [""]
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_a_written_norm_follows_its_epsilon() -> None:
    norm = RMSNorm(8)
    plain, x = copy.deepcopy(norm), torch.randn(2, 8)
    apex.fuse(norm, verbose=False)
    norm.eps = plain.eps = 0.5
    torch.testing.assert_close(norm(x), plain(x))


def test_the_name_of_a_fused_module_is_its_own() -> None:
    """Trainers look models up by `_get_name()`; only `repr` says that a module is fused."""
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    apex.fuse(model, verbose=False)
    assert model[0]._get_name() == type(model[0]).__name__ == "LayerNorm"
    assert "(0): FusedLayerNorm((4,)" in repr(model)


@pytest.mark.parametrize("compile", [torch.jit.script, lambda model: torch.jit.trace(model, torch.randn(2, 4))])
def test_modules_compiled_by_torch_jit_stay(compile: Callable[[nn.Module], nn.Module]) -> None:
    compiled = compile(nn.Sequential(nn.LayerNorm(4), nn.ReLU()))
    (row,) = apex.fuse(compiled, verbose=False)
    assert (row.name, row.kind) == ("", "Sequential")
    assert "compiled by torch.jit" in row.reason
    report = apex.fuse(nn.Sequential(nn.LayerNorm(4), compiled, nn.RMSNorm(4)), verbose=False)
    assert [(row.name, bool(row.reason)) for row in report] == [("0", False), ("1", True), ("2", False)]


def ForCausalLMLoss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **options: Any,
) -> Tensor:
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    target = shift_labels.reshape(-1)
    loss = functional.cross_entropy(logits.view(-1, vocab_size), target, ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def old_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    **options: Any,
) -> Tensor:
    """The loss of older releases, which ignores `shift_labels`."""
    return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index)


old_loss.__name__ = "ForCausalLMLoss"


class TinyForCausalLM(nn.Module):
    """A causal language model that gives `vocab_size` by position, as some of transformers do."""

    def __init__(self, loss_function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=13)
        self.vocab_size = 13
        self.model, self.lm_head = nn.Embedding(13, 8), nn.Linear(8, 13, bias=False)
        self.loss_function = loss_function

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, return_dict: bool = True, **kwargs: Any) -> Any:
        past_key_values = hidden_states = self.model(input_ids)
        logits = self.lm_head(hidden_states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        if not return_dict:
            return (logits, past_key_values) if loss is None else (loss, logits, past_key_values)
        return {"loss": loss, "logits": logits, "past_key_values": past_key_values}


@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("loss_function", [ForCausalLMLoss, old_loss])
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 3}, {"shift_labels": torch.tensor([[1, 2, -100, 3]])}])
def test_a_head_with_its_loss(loss_function: Callable[..., Tensor], options: dict[str, Any], return_dict: bool) -> None:
    model = TinyForCausalLM(loss_function)
    plain = copy.deepcopy(model)
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "labels": torch.tensor([[-100, 2, 3, -100]])}
    inputs |= {"return_dict": return_dict, **options}
    assert [row.reason for row in apex.fuse(model, check=inputs, verbose=False)] == [""]
    found, wanted = model(**inputs), plain(**inputs)
    assert len(found) + return_dict == len(wanted)
    key = "loss" if return_dict else 0
    torch.testing.assert_close(found[key], wanted[key])
    if not return_dict:
        assert found[1] is None
        assert torch.equal(found[2], wanted[2])
    torch.testing.assert_close(model.eval()(**inputs), plain.eval()(**inputs))


def rotated(t: Tensor) -> Tensor:
    first, second = t.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Rotate as transformers 4.47 does, where the fifth argument is one that nothing reads."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]
    (q, q_rest), (k, k_rest) = ((t[..., :width], t[..., width:]) for t in (q, k))
    q, k = q * cos + rotated(q) * sin, k * cos + rotated(k) * sin
    return torch.cat((q, q_rest), -1), torch.cat((k, k_rest), -1)


class Attention(nn.Module):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        self.args, self.options = args, options

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(q, k, cos, sin, *self.args, **self.options)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize(
    ("args", "options"),
    [((), {}), ((None,), {}), ((torch.arange(5),), {}), ((), {"unsqueeze_dim": 2}), ((None, 2), {})],
)
def test_rotations_with_every_argument(
    args: tuple[Any, ...], options: dict[str, Any], width: int, batches: int
) -> None:
    model = Attention(*args, **options)
    plain = copy.deepcopy(model)
    assert [row.reason for row in apex.fuse(model, verbose=False)] == [""]
    heads_first = 2 not in (*options.values(), *args[1:])
    q, k = (torch.randn(2, 3, 5, 8) if heads_first else torch.randn(2, 5, 3, 8) for _ in range(2))
    cos, sin = torch.randn(2, batches, 5, width)
    torch.testing.assert_close(model(q, k, cos, sin), plain(q, k, cos, sin))


def test_a_table_per_row_is_rotated_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that differ within a batch, as in packed or padded batches, need no other function."""
    model = Attention()
    apex.fuse(model, verbose=False)
    monkeypatch.setitem(globals(), "rotated", None)  # what the original function calls
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
    cos, sin = torch.randn(2, 2, 5, 4)
    one_by_one = [model(q[i : i + 1], k[i : i + 1], cos[i : i + 1], sin[i : i + 1]) for i in range(2)]
    for found, wanted in zip(model(q, k, cos, sin), zip(*one_by_one, strict=True), strict=True):
        torch.testing.assert_close(found, torch.cat(wanted))


def _rotated_by_half_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return apply_rotary_pos_emb(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))


def test_tables_for_half_of_the_channels() -> None:
    """GPT-OSS has tables for one of the two halves, and rotates all channels."""
    names = {"apply_rotary_pos_emb": _rotated_by_half_tables}
    forward = FunctionType(Attention.forward.__code__, {**globals(), **names}, "forward")
    model = type("HalfTables", (Attention,), {"forward": forward})()
    plain = copy.deepcopy(model)
    assert [row.reason for row in apex.fuse(model, verbose=False)] == [""]
    q, k, (cos, sin) = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 1, 5, 4)
    torch.testing.assert_close(model(q, k, cos, sin), plain(q, k, cos, sin))
