"""`benchmarks/compiled_ops.py` compares what is the same."""

import importlib
from pathlib import Path

import pytest
import torch

from apex.ops import _library

FOLDER = Path(__file__).parents[2] / "benchmarks"
CASES = ["layer norm", "rms norm", "rope", "softmax", "xentropy", "group norm", "batch norm", "dense", "focal loss"]


@pytest.mark.parametrize("case", [*CASES, "glu", "index_mul", "permuted layer norm", "float32 loss", "loss"])
def test_ours_and_torchs_are_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    compiled_ops = importlib.import_module("compiled_ops")
    family, make, sizes = compiled_ops.CASES[case]
    results = []
    for fused in (False, True):
        torch.manual_seed(0)
        network, inputs = make(fused, *sizes[-1])
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in network.parameters():  # modules initialise them differently
                parameter.copy_(torch.randn(parameter.shape) / 4)
        results.append(network(*inputs))
    assert family in _library.FAMILIES  # modules of apex register theirs when they are first made
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
