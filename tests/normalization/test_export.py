"""Norms are exported to ONNX and other formats as PyTorch's own operators, with any implementation."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apex.contrib.layer_norm import FastLayerNorm
from apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm
from apex.ops import _library
from tests.support.harness import Route, routes

NORMS = [
    (norm, options)
    for norm in (FusedLayerNorm, FusedRMSNorm)
    for options in ({}, {"elementwise_affine": False}, {"memory_efficient": True})
] + [
    (norm, options)
    for norm in (MixedFusedLayerNorm, MixedFusedRMSNorm, FastLayerNorm)
    for options in ({}, {"memory_efficient": True})
]


def _all_norms() -> nn.Sequential:
    """Return all norms in a row, with parameters unlike their initial ones."""
    norms = nn.Sequential(*(norm(32, **options) for norm, options in NORMS))
    with torch.no_grad():
        for parameter in norms.parameters():
            parameter.uniform_(0.5, 1.5)
    return norms.eval()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(
    ("dtype", "strict"), [(torch.float32, False), (torch.float16, False), (torch.float16, True)], ids=str
)
def test_exported_programs_have_no_operator_of_apex(dtype: torch.dtype, strict: bool, route: Route) -> None:
    if not hasattr(torch.compiler, "is_exporting"):
        pytest.skip("this PyTorch does not say whether it exports")
    norms = _all_norms().to(route.device)
    x = torch.randn(3, 32, device=route.device).to(dtype)
    with _library.implementation(route.implementation):
        # A batch of any size: exporting must not look at the number of elements.
        sizes: Any = ({0: torch.export.Dim("batch")},)
        program = torch.export.export(norms, (x,), dynamic_shapes=sizes, strict=strict)
    operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert operators
    assert all(operator.startswith("aten.") for operator in operators), operators
    x = torch.randn(5, 32, device=route.device).to(dtype)
    torch.testing.assert_close(program.module()(x), norms(x))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx_computes_the_same(dynamo: bool, device: str, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    reference = pytest.importorskip("onnx.reference")
    pytest.importorskip("onnxscript")
    norms = _all_norms().to(device)
    x = torch.randn(3, 32, device=device)
    file = tmp_path / "norms.onnx"
    with warnings.catch_warnings(), _library.implementation("auto"):
        warnings.simplefilter("ignore")  # of the exporter itself
        torch.onnx.export(norms, (x,), file, dynamo=dynamo, verbose=False)
    model = onnx.load(file)
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
    (output,) = reference.ReferenceEvaluator(model).run(None, {model.graph.input[0].name: x.cpu().numpy()})
    torch.testing.assert_close(torch.from_numpy(output), norms(x).detach().cpu())
