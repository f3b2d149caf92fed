"""Layer norms that libraries write in Python, as timm, ConvNeXt, Nemotron and Cohere have them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import apex


class LayerNorm(nn.LayerNorm):
    """timm's."""

    def __init__(self, size: int) -> None:
        super().__init__(size, eps=1e-6)
        self._fast_norm = False

    def forward(self, x: Tensor) -> Tensor:
        if self._fast_norm:
            return x
        return functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class LayerNorm2d(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = functional.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNextLayerNorm(nn.LayerNorm):
    def __init__(self, size: int, data_format: str) -> None:
        super().__init__(size)
        self.data_format = data_format

    def forward(self, features: Tensor) -> Tensor:
        if self.data_format == "channels_first":
            return super().forward(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return super().forward(features)


class LayerNorm1P(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight + 1.0, self.bias, self.eps)


class CohereLayerNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), 1e-5

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.to(torch.float32)
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return (self.weight.to(torch.float32) * (x - mean) * torch.rsqrt(variance + self.variance_epsilon)).to(
            hidden_states.dtype
        )


class SampleLayerNorm(CohereLayerNorm):
    """A norm with the names of another one, and the variance of a sample."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.to(torch.float32)
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).sum(-1, keepdim=True) / (x.shape[-1] - 1)
        return self.weight * (x - mean) * torch.rsqrt(variance + self.variance_epsilon)


CASES: dict[str, tuple[Callable[[], Any], tuple[int, ...], str]] = {
    "timm": (lambda: LayerNorm(8), (2, 3, 8), "layer norm written in Python"),
    "timm, images": (lambda: LayerNorm2d(8), (2, 8, 3, 5), "layer norm of channels"),
    "ConvNeXt": (lambda: ConvNextLayerNorm(8, "channels_last"), (2, 3, 5, 8), "layer norm written in Python"),
    "ConvNeXt, images": (lambda: ConvNextLayerNorm(8, "channels_first"), (2, 8, 3, 5), "layer norm of channels"),
    "Nemotron": (lambda: LayerNorm1P(8), (2, 3, 8), "layer norm of 1 + weight"),
    "Cohere": (lambda: CohereLayerNorm(8), (2, 3, 8), "layer norm written in Python"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_the_same_numbers(case: str, dtype: torch.dtype) -> None:
    make, shape, rule = CASES[case]
    torch.manual_seed(0)
    model = make().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5)
    plain = copy.deepcopy(model)
    assert [(row.rule, row.reason) for row in apex.fuse(model, verbose=False)] == [(rule, "")]
    results = []
    for each in (model, plain):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        output = each(x)
        assert output.dtype == dtype
        results.append([output, *torch.autograd.grad(output.sin().sum(), [x, *each.parameters()])])
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)  # Cohere computes float64 in float32


def test_other_formulas_stay() -> None:
    (row,) = apex.fuse(SampleLayerNorm(8), verbose=False)
    assert "computes something else" in row.reason
    norm = LayerNorm(8)
    norm._fast_norm = True
    (row,) = apex.fuse(norm, verbose=False)
    assert row.reason
    norm = CohereLayerNorm(8)
    norm.weight = nn.Parameter(torch.ones(2, 8))
    (row,) = apex.fuse(norm, verbose=False)
    assert row.reason == "it has other parameters than one vector named weight"
