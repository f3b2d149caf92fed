"""apex.contrib.torchsched: the order of gradients, and the default backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from apex.contrib.torchsched import backend as module
from apex.contrib.torchsched import get_backend, set_default_backend


@pytest.fixture(autouse=True)
def own_compile_afterwards() -> Iterator[None]:
    yield
    set_default_backend("inductor")


@pytest.mark.parametrize(("scheme", "order"), [("dwb", "data weight sum"), ("wbd", "weight sum data")])
def test_gradients_are_split_in_order(scheme: str, order: str) -> None:
    x, weight, dy = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 5, 5)
    backward = torch.ops.aten.convolution_backward.default
    geometry = ([4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def gradients(dy, x, weight):  # type: ignore[no-untyped-def]
        return backward(dy, x, weight, *geometry, [True, True, True])

    table = {backward: lambda *arguments: module.split_convolution_backward(scheme, *arguments)}
    graph = make_fx(gradients, decomposition_table=table)(dy, x, weight)
    kinds = []
    for node in graph.graph.nodes:
        if node.target is backward:
            kinds.append(("data", "weight")[node.args[-1].index(True)])
            assert sum(node.args[-1]) == 1
        elif node.target is torch.ops.aten.sum.dim_IntList:
            kinds.append("sum")
    assert " ".join(kinds) == order
    for actual, expected in zip(graph(dy, x, weight), gradients(dy, x, weight), strict=True):
        torch.testing.assert_close(actual, expected)


def test_default_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing changes nothing, and a named backend takes precedence."""
    own, called = torch.compile, []

    def compile_fx(model, inputs, decompositions, **options):  # type: ignore[no-untyped-def]
        called.append(decompositions[torch.ops.aten.convolution_backward.default].args)
        return model.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    set_default_backend("torchsched")
    assert torch.compile(torch.sin)(torch.zeros(1)) == 0
    assert torch.compile(torch.cos, backend="eager")(torch.zeros(1)) == 1
    assert called == [("dwb",)]
    set_default_backend("inductor")
    assert torch.compile is own
    with pytest.raises(ValueError, match="backend='none' is not known"):
        set_default_backend("none")
    with pytest.raises(ValueError, match="scheme='bdw'"):
        get_backend("torchsched", "bdw")
    with pytest.raises(ValueError, match="backend='none'"):
        get_backend("none")
