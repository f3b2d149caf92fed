"""The op that CONTRIBUTING.md shows in full works as it stands there."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from apex.ops import _library
from tests.harness import Route, assert_close, opcheck, routes

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The example's `op.py`, in a package of the three files."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("example")
    package = folder / "squared_relu_example"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("reference", "kernels", "op"):
        (code,) = re.findall(rf"`{name}\.py`:.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        (package / f"{name}.py").write_text(code)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("squared_relu_example.op")
    sys.path.remove(str(folder))
    _library.FAMILIES.pop("squared_relu")


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_the_formula(family: ModuleType, dtype: torch.dtype, route: Route) -> None:
    x = torch.randn(5, 700, device=route.device).to(dtype).requires_grad_()
    dy = torch.randn(5, 700, device=route.device).to(dtype)
    with _library.implementation(route.implementation):
        output = family.squared_relu(x)
        (dx,) = torch.autograd.grad(output, x, dy)
        assert family.FAMILY.self_check(torch.device(route.device)) <= 1
    wide = x.detach().double().requires_grad_()
    expected = wide.relu() ** 2
    assert_close(output, expected)
    assert_close(dx, torch.autograd.grad(expected, wide, dy.double())[0])


@pytest.mark.parametrize("route", routes())
def test_pytorch_knows_the_op(family: ModuleType, route: Route) -> None:
    x = torch.randn(3, 40, device=route.device, requires_grad=True)
    with _library.implementation(route.implementation):
        opcheck(route, torch.ops.apex.squared_relu.default, (x,))
        (first,) = torch.autograd.grad(family.squared_relu(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, 2.0 * (x > 0))
    with pytest.raises(TypeError, match="input must be a tensor, got str"):
        family.squared_relu("x")
