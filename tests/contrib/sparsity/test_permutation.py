"""Permuted models compute the same results, and all permutable parameters are permuted."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from apex.contrib.sparsity.permutation_lib import Permutation
from apex.contrib.sparsity.permutation_search_kernels import call_permutation_search_kernels, sum_after_2_to_4
from apex.contrib.sparsity.sparse_masklib import as_matrix
from tests.contrib.sparsity.networks import NETWORKS


@pytest.fixture(autouse=True)
def quick_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_permutation_search_kernels, "ESCAPE_ATTEMPTS", 1)


def prunable(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    found = []
    for name, module in model.named_modules():
        for key in ("weight", "in_proj_weight"):
            weight = getattr(module, key, None)
            layer = isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.MultiheadAttention)
            if layer and isinstance(weight, nn.Parameter) and weight.shape[1] % 8 == 0:
                found.append((name, module, key))
    return found


def kept(model: nn.Module) -> float:
    return sum(sum_after_2_to_4(as_matrix(getattr(module, key).detach())) for _, module, key in prunable(model))


def randomize(model: nn.Module) -> None:
    """Fill all parameters and statistics with random numbers, so that a missed tensor changes the result."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.copy_(
                torch.rand_like(tensor) * 0.2 + 0.05 if tensor.dim() == 1 else torch.randn_like(tensor) / 8
            )


def permute(model: nn.Module, examples=None) -> bool:
    Permutation.set_permutation_params_from_asp(model, prunable(model), [], 0)
    return Permutation.permute_model(model, example_inputs=examples)


WITH_EXAMPLES = ["concatenated input", "flattened image", "BERT", "ViT"]


@pytest.mark.parametrize(
    ("name", "with_examples"), [*((name, False) for name in NETWORKS), *((name, True) for name in WITH_EXAMPLES)]
)
def test_outputs_stay(name: str, with_examples: bool) -> None:
    torch.manual_seed(0)
    model = NETWORKS[name]().double()
    randomize(model)
    examples = model.example()
    model.eval()
    expected, before = model(*examples), kept(model)
    model.train()
    assert permute(model, examples if with_examples else None)
    assert all(module.training for module in model.modules())
    model.eval()
    torch.testing.assert_close(model(*examples), expected, rtol=1e-10, atol=1e-10)
    columns, rows, missed = Permutation.get_permutation_stats()
    wanted = (model.columns, model.rows) if with_examples else model.without_examples or (model.columns, model.rows)
    assert (len(columns), len(rows), missed) == (*wanted, []), (columns, rows)
    assert kept(model) > before or not columns


def test_one_dense_sibling_is_permuted_with_the_pruned_ones() -> None:
    torch.manual_seed(0)
    model = NETWORKS["forks"]().double()
    examples = model.example()
    expected = model(*examples)
    sparse = [entry for entry in prunable(model) if entry[0] == "left"]
    Permutation.set_permutation_params_from_asp(model, sparse, [], 0)
    assert Permutation.permute_model(model)
    torch.testing.assert_close(model(*examples), expected, rtol=1e-10, atol=1e-10)
    assert "right.weight" in Permutation.get_permutation_stats()[0]


def test_untraceable_models_stay_with_a_warning() -> None:
    class Branches(nn.Sequential):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    model = Branches(nn.Linear(16, 32), nn.Linear(32, 16))
    before = [param.clone() for param in model.parameters()]
    with pytest.warns(
        UserWarning, match=r"without permuting its channels: torch.fx cannot trace Branches \(TraceError"
    ):
        assert not permute(model)
    assert all(map(torch.equal, before, model.parameters()))


def decorated(forward: Any) -> Any:
    """Wrap a forward as transformers does: the wrapper's own code names no argument."""

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    @decorated
    def forward(self, x: Any, mask: Any = None, *more: Any, scale: float = 2.0, **options: Any) -> Any:
        hidden = self.first(x) if mask is None else self.first(x) * mask
        for each in more:
            hidden = hidden * each
        return self.second(hidden.relu()) * scale


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_forward_behind_a_decorator_is_traced(count: int) -> None:
    torch.manual_seed(0)
    model = Decorated().double()
    randomize(model)
    examples = (torch.randn(4, 16).double(), torch.rand(4, 1).double(), torch.rand(4, 1).double())
    before, kept_before = model(*examples), kept(model)
    assert permute(model, examples[:count] or None)
    torch.testing.assert_close(model(*examples), before)
    assert kept(model) > kept_before


def test_branches_of_training_are_followed_too() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 16)

        def forward(self, x):
            x = self.first(x)
            return (self.last(x), self.head(x)) if self.training else self.last(x)

    torch.manual_seed(0)
    model, x = Auxiliary().double(), torch.randn(3, 16, dtype=torch.float64)
    expected = model(x)
    assert permute(model)
    assert Permutation.get_permutation_stats()[0] == ["last.weight", "head.weight"]
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)


def test_a_group_that_changes_the_output_is_put_back() -> None:
    """A layer treats channels differently, which the graph does not show."""

    class Hidden(nn.ReLU):
        def forward(self, x):
            return super().forward(x) * self.other[0].weight[:, 0]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), Hidden(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)).double()
    model[1].other = [nn.Linear(16, 32).double()]
    Hidden.__module__ = "torch.nn"  # so that the graph takes it for a ReLU
    x = torch.randn(3, 16, dtype=torch.float64)
    expected, weight = model(x), model[0].weight.clone()
    assert permute(model, x)
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(model[0].weight, weight)
    assert Permutation.get_permutation_stats()[0] == ["4.weight"]


def test_a_group_with_a_tensor_that_cannot_be_permuted_stays() -> None:
    """The dry run finds it: this group is unchanged, the other group is permuted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 48), nn.Linear(48, 16)).double()
    before = [param.clone() for param in model.parameters()]
    strange = model[1].bias  # of the group between the last two layers
    Permutation.set_permutation_params_from_asp(model, prunable(model), [], 0)
    tied = lambda tensor: [tensor.detach(), *([torch.ones(7)] if tensor is strange else [])]  # noqa: E731
    assert Permutation.permute_model(model, tied=tied)
    assert Permutation.get_permutation_stats()[0] == ["1.weight"]
    assert torch.equal(model[2].weight, before[4])
    assert torch.equal(model[1].bias, before[3])
    assert not torch.equal(model[0].bias, before[1])


def test_sparse_models_are_left_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)).double()
    for layer in model:
        layer.weight.data.view(-1, 4)[:, ::2] = 0
    before = [param.clone() for param in model.parameters()]
    assert permute(model)
    assert all(map(torch.equal, before, model.parameters()))
    assert Permutation.get_permutation_stats() == ([], [], [])


def test_a_permutation_is_reproducible(tmp_path) -> None:
    found = []
    for seed in (0, 1):
        torch.manual_seed(7)
        model = NETWORKS["forks"]()
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        permute(model)
        assert torch.equal(torch.get_rng_state(), state)
        found.append([param.clone() for param in model.parameters()])
    assert all(map(torch.equal, *found))


def test_files_describe_the_permutation(tmp_path) -> None:
    import json

    tmp_path = tmp_path / "of one run" / "permutation"  # neither folder exists
    Permutation.set_permutation_saving_params(True, True, str(tmp_path))
    try:
        model = NETWORKS["1-d"]()
        permute(model)
    finally:
        Permutation.set_permutation_saving_params()
    groups = json.loads((tmp_path / "model_graph_permutation_graph.json").read_text())
    assert groups == [{"C": ["second.weight"], "K": ["first.weight", "first.bias"]}]
    parents = json.loads((tmp_path / "model_graph_find_real_parent.json").read_text())
    assert parents == {"second.weight": ["first.weight", "first.bias"]}
    nodes = json.loads((tmp_path / "model_offline_permutation_graph.json").read_text())
    assert [node[0] for node in nodes] == ["x", "first", "gelu", "second", "output"]
