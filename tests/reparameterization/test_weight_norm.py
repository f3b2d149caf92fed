"""Weight normalization against PyTorch's, and the rules for when a weight is computed again."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex import RNN
from apex.reparameterization import (
    Reparameterization,
    WeightNorm,
    apply_reparameterization,
    apply_weight_norm,
    remove_reparameterization,
    remove_weight_norm,
)

MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(6, 4).double(), (3, 6)),
    "Conv2d": (lambda: nn.Conv2d(3, 5, 3).double(), (2, 3, 6, 6)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(3, 5, 3).double(), (2, 3, 6)),
}


@pytest.mark.parametrize("dim", [0, 1, -1, None])
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trains_as_pytorchs(kind: str, dim: int | None) -> None:
    make, shape = MODULES[kind]
    ours = make()
    theirs = nn.utils.weight_norm(copy.deepcopy(ours), dim=dim if dim is None else dim % ours.weight.dim())
    assert apply_weight_norm(ours, "weight", dim) is ours
    assert {name: value.shape for name, value in ours.state_dict().items()} == {
        name: value.shape for name, value in theirs.state_dict().items()
    }
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    for _ in range(3):
        x = torch.randn(shape, dtype=torch.float64)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    expected = ours(x)
    assert remove_weight_norm(ours, "weight") is ours
    assert sorted(dict(ours.named_parameters())) == ["bias", "weight"]
    torch.testing.assert_close(ours(x), expected)


def test_all_weights_but_vectors_and_embeddings() -> None:
    model = nn.Sequential(
        nn.Embedding(5, 4), nn.Linear(4, 3), nn.LayerNorm(3), nn.Sequential(nn.Linear(3, 2, bias=False))
    )
    model.register_buffer("table", torch.ones(2, 2))
    names = {name for name, _ in apply_weight_norm(model).named_parameters()}
    assert names == {
        "0.weight", "1.weight_g", "1.weight_v", "1.bias", "2.weight", "2.bias", "3.0.weight_g", "3.0.weight_v",
    }  # fmt: skip
    weight = model[1].weight
    assert "1.weight" in {name for name, _ in remove_weight_norm(model).named_parameters()}
    assert torch.equal(model[1].weight, weight)
    assert not any(
        isinstance(hook, WeightNorm) for each in model.modules() for hook in each._forward_pre_hooks.values()
    )


def test_hooks_of_the_parent() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    x = torch.randn(2, 4)
    expected = model(x)
    apply_weight_norm(model, hook_child=False)
    assert [hook.name for hook in model._forward_pre_hooks.values()] == ["0.weight", "1.weight"]
    assert not model[0]._forward_pre_hooks
    torch.testing.assert_close(model(x), expected)
    remove_weight_norm(model, "1.weight")
    assert [hook.name for hook in model._forward_pre_hooks.values()] == ["0.weight"]
    torch.testing.assert_close(remove_weight_norm(model)(x), expected)


@pytest.mark.parametrize("hook_child", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_call_changes_nothing(hook_child: bool, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)
    x = torch.randn(2, 4, dtype=dtype)
    expected = model(x)
    names = list(apply_weight_norm(model, hook_child=hook_child).state_dict())
    assert list(apply_weight_norm(model, hook_child=hook_child).state_dict()) == names
    torch.testing.assert_close(model(x), expected)
    model(x).sum().backward()
    torch.testing.assert_close(remove_weight_norm(model)(x), expected)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    computed = []
    compute = WeightNorm.compute_weight

    def counting(self: WeightNorm, module: Any = None, name: Any = None) -> Tensor:
        computed.append(name)
        return compute(self, module, name)

    monkeypatch.setattr(WeightNorm, "compute_weight", counting)
    return computed


def test_weight_is_computed_again_only_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = apply_weight_norm(nn.Linear(4, 3))
    computed, x = counted(monkeypatch), torch.randn(2, 4)
    (model(x) + model(x)).sum().backward()  # one weight for both calls
    assert len(computed) == 1
    model(x).sum().backward()  # its graph is gone
    assert len(computed) == 2
    with torch.no_grad():
        before = model(x)
    assert model(x).requires_grad
    assert len(computed) == 4
    with torch.no_grad():
        model.weight_g.mul_(2)
        torch.testing.assert_close(model(x) - model.bias, 2 * (before - model.bias))
    model.weight_v.requires_grad_(False)
    assert model(x).requires_grad
    model.double()
    assert model(x.double()).dtype == torch.float64


def test_updates_through_data_count_without_gradients() -> None:
    model, x = apply_weight_norm(nn.Linear(4, 3)), torch.randn(2, 4)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            before = model(x)
            model.weight_g.data.mul_(2)  # as implementations of moving averages write
            torch.testing.assert_close(model(x) - model.bias, 2 * (before - model.bias))
    model(x).sum().backward()
    assert model.weight_g.grad is not None


@pytest.mark.parametrize("kind", ["LSTM", "mLSTM"])
@pytest.mark.parametrize("hook_child", [True, False])
def test_recurrent_networks(kind: str, hook_child: bool) -> None:
    model = nn.LSTM(4, 5) if kind == "LSTM" else RNN.mLSTM(4, 5, 1)
    x = torch.randn(3, 2, 4)
    expected = model(x)[0]
    apply_weight_norm(model, hook_child=hook_child)
    if kind == "mLSTM":
        model.reset_hidden(2)
    output = model(x)[0]
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for name, p in model.named_parameters() if "_v" in name)
    remove_weight_norm(model)
    if kind == "mLSTM":
        model.reset_hidden(2)
    torch.testing.assert_close(model(x)[0], expected)


def test_copies_pickles_and_state_dicts() -> None:
    model = apply_weight_norm(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    x = torch.randn(2, 4)
    model(x).sum().backward()
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for other in copy.deepcopy(model), torch.load(stream, weights_only=False):
        torch.testing.assert_close(other(x), model(x))
        with torch.no_grad():
            other[0].weight_g.mul_(3)
        assert not torch.allclose(other(x), model(x))
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(other(x), model(x))


def test_compiled() -> None:
    model = apply_weight_norm(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(2, 4)
    torch.testing.assert_close(compiled(x), model(x))
    with torch.no_grad():
        model[0].weight_g.mul_(2)
    torch.testing.assert_close(compiled(x), model(x))


class Doubled(Reparameterization):
    """A weight that is twice its parameter."""

    def compute_weight(self, module: Any = None, name: Any = None) -> Tensor:
        return 2 * getattr(module, f"{name}_half")

    def reparameterize(self, name: str, weight: Tensor, dim: int | None) -> tuple[list[str], list[nn.Parameter]]:
        return [f"{name}_half"], [nn.Parameter(weight.detach() / 2)]


def test_reparameterization_of_the_user() -> None:
    model = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    expected = model(x)
    apply_reparameterization(model, Doubled)
    assert sorted(model.state_dict()) == ["bias", "weight_half"]
    torch.testing.assert_close(model(x), expected)
    assert remove_weight_norm(model) is model  # another kind stays
    assert "weight_half" in model.state_dict()
    torch.testing.assert_close(remove_reparameterization(model)(x), expected)


def test_refusals_change_nothing() -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(ValueError, match="'wieght' is no parameter of Linear"):
        apply_weight_norm(model, "wieght")
    with pytest.raises(TypeError, match="subclass of Reparameterization"):
        apply_reparameterization(model, nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no reparameterization of 'weight' in Linear"):
        remove_weight_norm(model, "weight")
    with pytest.raises(NotImplementedError):
        apply_reparameterization(model, Reparameterization)
    with pytest.raises(ValueError, match=r"dim=2 is not a dimension of 'weight', whose shape is \[3, 4\]"):
        apply_weight_norm(model, "weight", dim=2)
    several = nn.Sequential(nn.Conv1d(3, 4, 2), nn.Linear(3, 4), nn.LazyLinear(4))
    for dim, kind, name in ((2, ValueError, "'1.weight'"), (0, TypeError, "'2.weight' has no values")):
        with pytest.raises(kind, match=name):
            apply_weight_norm(several, dim=dim)
    assert isinstance(several[0].weight, nn.Parameter)
    apply_weight_norm(model, "bias")
    assert sorted(model.state_dict()) == ["bias", "weight"]
    assert not model._forward_pre_hooks
    assert WeightNorm.get_module_and_name(model, "") == (None, None)


def test_modules_that_are_used_twice() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    expected = model(x)
    apply_weight_norm(model)
    assert [name for name, _ in model.named_parameters()] == ["0.bias", "0.weight_g", "0.weight_v"]
    torch.testing.assert_close(model(x), expected)


def test_shared_weights_warn() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with pytest.warns(UserWarning, match="'0.weight' is shared by 2 modules"):
        apply_weight_norm(model)
