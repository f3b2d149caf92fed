"""Pruned models and torchao: each accepts the other's pruned weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex.contrib.sparsity import ASP, create_mask


@pytest.fixture(scope="module")
def sparsity() -> Any:
    """Import torchao's package for these tests only, because it takes seconds."""
    return pytest.importorskip("torchao.sparsity")


@pytest.fixture(scope="module")
def training() -> Any:
    return pytest.importorskip("torchao.sparsity.training")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    ASP.reset()
    yield
    ASP.reset()


def make(width: int = 64, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, width)).to(**options)


def prune(model: nn.Module, **options: Any) -> None:
    ASP.init_model_for_pruning(model, verbosity=0, **options)
    ASP.compute_sparse_masks()


def test_the_same_weights_are_pruned(sparsity: Any) -> None:
    model, other = make(), make()
    prune(model, allow_permutation=False)
    sparsity.apply_fake_sparsity(other)
    assert torch.equal(model[0].weight, other[0].weight)
    assert torch.equal(model[2].weight, other[2].weight)


def test_weights_pruned_by_torchao_stay(sparsity: Any) -> None:
    model = make()
    sparsity.apply_fake_sparsity(model)
    before = [param.detach().clone() for param in model.parameters()]
    prune(model)  # no permutation finds more than everything
    assert all(map(torch.equal, before, model.parameters()))
    assert ASP.is_sparsity_enabled()


def test_sparsify_takes_pruned_layers(sparsity: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversion itself needs a GPU; this checks the weights that it gets."""
    given: list[Tensor] = []
    convert = lambda weight: given.append(weight) or weight.detach()  # noqa: E731
    monkeypatch.setattr("torchao.sparsity.sparse_api.to_sparse_semi_structured", convert)
    model, x = make(), torch.randn(5, 64)
    prune(model)
    expected, keys = model(x), list(model.state_dict())
    sparsity.sparsify_(model, sparsity.semi_sparse_weight(), lambda module, name: name == "2")
    assert len(given) == 1
    assert torch.equal(given[0] != 0, create_mask(given[0]) != 0)
    assert torch.equal(model(x), expected)
    assert list(model.state_dict()) == keys
    assert ASP.is_sparsity_enabled()


def test_layers_are_swapped_for_training(training: Any) -> None:
    model = make()
    weight = model[0].weight
    training.swap_linear_with_semi_sparse_linear(model, {"0": training.SemiSparseLinear})
    assert model[0].weight is weight
    assert type(model[2]) is nn.Linear
    prune(model, allow_permutation=False)  # saved weights are pruned permanently
    training.swap_semi_sparse_linear_with_linear(model)
    assert torch.equal(model[0].weight != 0, create_mask(model[0].weight) != 0)


@pytest.mark.gpu
def test_converted_layers_compute_the_same(sparsity: Any) -> None:
    model, x = make(device="cuda", dtype=torch.bfloat16), torch.randn(128, 64, device="cuda", dtype=torch.bfloat16)
    prune(model)
    with torch.no_grad():
        expected = model(x)
        sparsity.sparsify_(model, sparsity.semi_sparse_weight())
        assert type(model[0].weight) is not nn.Parameter
        torch.testing.assert_close(model(x), expected, rtol=0.05, atol=0.05)


@pytest.mark.gpu
@pytest.mark.xfail(
    torch.__version__ < "2.12", raises=RuntimeError, reason="an internal error of PyTorch 2.11 (docs/sparsity.md)"
)
def test_training_with_sparse_products(training: Any) -> None:
    # PyTorch searches tiles of 128 x 128 for the two of four to keep.
    model = make(256, device="cuda", dtype=torch.float16)
    x = torch.randn(128, 256, device="cuda", dtype=torch.float16)
    training.swap_linear_with_semi_sparse_linear(model, dict.fromkeys(("0", "2"), training.SemiSparseLinear))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(20):
        loss = (model(x).float() - x.float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]
