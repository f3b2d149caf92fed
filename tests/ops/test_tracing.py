"""torch.jit.trace records operators of PyTorch, where kernels would run as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.mlp import MLP
from apex.ops import _library, norm
from apex.ops.batch_norm import batch_norm
from apex.ops.group_norm import group_norm
from apex.transformer.functional import fused_apply_rotary_pos_emb, scaled_upper_triang_masked_softmax
from tests.support.harness import Route, routes


def _functions(device: str) -> dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]]:
    """Functions of one tensor, and its shape."""
    weight = torch.rand(8, device=device)
    labels = torch.arange(4, device=device)
    perceptron = MLP([8, 6, 8]).to(device)
    freqs = torch.rand(4, 1, 1, 8, device=device)
    return {
        "norm": (lambda x: norm.layer_norm(x, 8, weight, weight), (4, 8)),
        "group_norm": (lambda x: group_norm(x, 2, weight, weight), (2, 8, 3, 3)),
        "batch_norm": (lambda x: batch_norm(x, None, None, weight, weight, relu=True), (2, 8, 3, 3)),
        "softmax": (lambda x: scaled_upper_triang_masked_softmax(x, None, 1.0), (2, 8, 8)),
        "dense": (perceptron, (4, 8)),
        "xentropy": (lambda x: SoftmaxCrossEntropyLoss.apply(x, labels), (4, 8)),
        "rope": (lambda x: fused_apply_rotary_pos_emb(x, freqs), (4, 2, 3, 8)),
    }


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("name", list(_functions("cpu")))
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_computes_with_what_it_is_given(name: str, route: Route) -> None:
    function, shape = _functions(route.device)[name]
    first, second = (torch.randn(shape, device=route.device) for _ in range(2))
    with _library.implementation(route.implementation):
        function(first)  # so that there is a plan for such a tensor
        traced = torch.jit.trace(function, (first,), check_trace=False)
        expected = function(second)
    torch.testing.assert_close(traced(second), expected, rtol=1e-4, atol=1e-4)
