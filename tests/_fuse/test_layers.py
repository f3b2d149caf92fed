"""Layers and MLPs of transformers: the same numbers, by fewer passes.

The modules are stand-ins with the structure of those in transformers and timm, which these tests do not need.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import apex
from apex._fuse import lazy, vision

RULES = {"dense + activation + dense", "residual + norm", "layer norm"}


class Mlp(nn.Module):
    def __init__(self, activation: Any = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.act, self.dropout = nn.GELU() if activation is None else activation, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.fc2(self.act(self.fc1(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
        return self.proj(hidden_states.softmax(-1)), None


class PreNorm(nn.Module):
    """As in ViT."""

    def __init__(self, norm: Any = nn.LayerNorm, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention, self.mlp, self.dropout = Attention(), Mlp(), nn.Dropout(dropout)
        self.layernorm_before, self.layernorm_after = norm(8), norm(8)

    def forward(self, hidden_states: Tensor, attention_mask: Any = None) -> Tensor:
        residual = hidden_states
        hidden_states, _ = self.attention(self.layernorm_before(hidden_states), attention_mask)
        hidden_states = self.dropout(hidden_states)
        hidden_states = hidden_states + residual
        residual = hidden_states
        hidden_states = self.mlp(self.layernorm_after(hidden_states))
        return residual + self.dropout(hidden_states)


class BertOutput(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dense, self.LayerNorm, self.dropout = nn.Linear(16, 8), nn.LayerNorm(8), nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        hidden_states = self.dropout(self.dense(hidden_states))
        return self.LayerNorm(hidden_states + input_tensor)


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lambda1 = nn.Parameter(torch.rand(8))

    def forward(self, hidden_state: Tensor) -> Tensor:
        return hidden_state * self.lambda1


class Dinov2Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.layer_scale1 = nn.LayerNorm(8), Attention(), LayerScale()
        self.norm2, self.mlp, self.layer_scale2 = nn.LayerNorm(8), Mlp(), LayerScale()
        self.drop_path = nn.Identity()

    def forward(self, hidden_states: Tensor) -> Tensor:
        output, _ = self.attention(self.norm1(hidden_states))
        hidden_states = self.drop_path(self.layer_scale1(output)) + hidden_states
        output = self.layer_scale2(self.mlp(self.norm2(hidden_states)))
        return self.drop_path(output) + hidden_states


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(size)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()


class ShiftedRMSNorm(RMSNorm):
    """Gemma's."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)


class OddLayer(PreNorm):
    """The names of a layer, and a formula of its own: what cannot be fused is computed as it is written."""

    def forward(self, hidden_states: Tensor, attention_mask: Any = None) -> Tensor:
        output, _ = self.attention(self.layernorm_before(hidden_states))
        total = 0.5 * (output + hidden_states) - output / 3
        total += output * output
        self.last = total
        parts = torch.cat((self.dropout(output), self.layernorm_after(output + total)[..., :4]), -1)
        return functional.pad(parts, (0, -4)) + self.mlp(total).clamp(max=1) + output.shape[-1]


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, 8), nn.ReLU())


# how to make it, its number of tensors, calls of (dense_gelu_dense, add_norm, addcmul) in training
CASES: dict[str, tuple[Callable[[], Any], int, tuple[int, int, int]]] = {
    "exact GELU": (Mlp, 1, (1, 0, 0)),
    "tanh GELU": (lambda: Mlp(nn.GELU("tanh")), 1, (1, 0, 0)),
    "SiLU": (lambda: Mlp(functional.silu), 1, (1, 0, 0)),
    "in a row": (sequential, 1, (1, 0, 0)),
    "pre-norm": (PreNorm, 1, (1, 1, 0)),
    "pre-norm, RMS": (lambda: PreNorm(RMSNorm), 1, (1, 1, 0)),
    "pre-norm, 1 + weight": (lambda: PreNorm(ShiftedRMSNorm), 1, (1, 1, 0)),
    "pre-norm, dropout": (lambda: PreNorm(dropout=0.5), 1, (1, 0, 0)),
    "MLP, dropout": (lambda: Mlp(dropout=0.5), 1, (1, 0, 0)),
    "BERT": (BertOutput, 2, (0, 1, 0)),
    "BERT, dropout": (lambda: BertOutput(0.5), 2, (0, 0, 0)),
    "layer scale": (Dinov2Layer, 1, (1, 0, 2)),
    "odd": (OddLayer, 1, (1, 1, 0)),
}


def inputs(case: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (16, 8) if CASES[case][1] == 2 else (8,)
    return [torch.randn(2, 3, size, generator=generator).double().requires_grad_() for size in sizes]


def results(model: Any, tensors: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    output = model(*tensors)
    return [output, *torch.autograd.grad(output.sin().sum(), [*tensors, *model.parameters()])]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the fused operations that run."""
    found: list[str] = []

    def spy(place: Any, name: str) -> None:
        function = getattr(place, name)

        def run(*args: Any, **options: Any) -> Any:
            found.append(name)
            return function(*args, **options)

        monkeypatch.setattr(place, name, run)

    for place, name in (
        *((lazy, "dense_gelu_dense"), (vision, "dense_gelu_dense"), (lazy.norm, "add_norm")),
        (torch, "addcmul"),
    ):
        spy(place, name)
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_same_numbers_by_fewer_passes(case: str, calls: list[str]) -> None:
    make, _, wanted = CASES[case]
    torch.manual_seed(0)
    model = make().double()
    plain = copy.deepcopy(model)
    report = apex.fuse(model, verbose=False)
    assert not [row for row in report if row.reason], str(report)
    calls.clear()
    found = results(model, inputs(case))
    assert tuple(map(calls.count, ("dense_gelu_dense", "add_norm", "addcmul"))) == wanted
    torch.testing.assert_close(found, results(plain, inputs(case)))
    if case == "odd":
        assert isinstance(vars(model).pop("last"), Tensor)
        del plain.last
    model.eval(), plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(*inputs(case)), plain(*inputs(case)))
    assert [*model.state_dict()] == [*plain.state_dict()]
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    torch.testing.assert_close(again(*inputs(case)), plain(*inputs(case)))
    apex.unfuse(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    for one, other in zip(model.modules(), plain.modules(), strict=True):
        assert vars(one).keys() - {"last"} == vars(other).keys() - {"last"}


@pytest.mark.parametrize("case", ["pre-norm", "exact GELU"])
def test_compiled_and_recomputed_layers(case: str) -> None:
    model = CASES[case][0]().double()
    plain = copy.deepcopy(model)
    apex.fuse(model, verbose=False)
    wanted = results(plain, inputs(case))
    torch.testing.assert_close(results(torch.compile(model, backend="eager", fullgraph=True), inputs(case)), wanted)
    for reentrant in (True, False):
        tensors = inputs(case)
        output = checkpoint(model, *tensors, use_reentrant=reentrant)
        output.sin().sum().backward()
        torch.testing.assert_close(tensors[0].grad, wanted[1])


def test_children_that_must_be_called_are_called() -> None:
    """Hooks, other classes in the place of a linear layer (LoRA), another activation."""
    model = PreNorm().double()
    apex.fuse(model, verbose=False)
    plain = copy.deepcopy(model)
    apex.unfuse(plain)

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.weight, self.bias = base, base.weight, base.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + x.sum(-1, keepdim=True)

    def change(each: Any) -> None:
        each.layernorm_after.register_forward_hook(lambda module, args, output: 2 * output)
        each.mlp.fc2 = Adapted(each.mlp.fc2)
        each.mlp.fc1.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        each.mlp.act = nn.Tanh()

    change(model), change(plain)
    torch.testing.assert_close(results(model, inputs("pre-norm")), results(plain, inputs("pre-norm")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = PreNorm().to(dtype)
    exact = copy.deepcopy(model).double()
    assert {row.rule for row in apex.fuse(model, verbose=False) if not row.reason} == RULES
    (x,) = inputs("pre-norm")
    output = model(x.detach().to(dtype))
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), exact(x.detach().to(dtype).double()), rtol=5e-2, atol=5e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.float()(x.detach().float()).dtype == PreNorm()(x.detach().float()).dtype


def test_activations_that_are_not_known_are_called(calls: list[str]) -> None:
    model = Mlp(nn.Tanh()).double()
    assert apex.fuse(model, verbose=False) == []
    model = Mlp(nn.GELU(), dropout=0.5).double()
    apex.fuse(model, verbose=False)
    calls.clear()
    model.act = nn.GELU("tanh")  # of the same class, so the report's trial cannot be repeated
    model(*inputs("exact GELU"))
    assert calls == []


def test_layers_that_drop_values_run_as_they_are(calls: list[str]) -> None:
    """Joined additions are slower there, so an encoder layer of PyTorch keeps its own, too."""
    model = BertOutput()
    apex.fuse(model, verbose=False)
    model.dropout.p = 0.5
    calls.clear()
    model(torch.randn(2, 16), torch.randn(2, 8))
    assert calls == []
    model.eval()(torch.randn(2, 16), torch.randn(2, 8))
    assert calls == ["add_norm"]
    report = apex.fuse(nn.TransformerEncoderLayer(8, 2, 16), verbose=False)
    assert "residual + norm" not in {row.rule for row in report}
