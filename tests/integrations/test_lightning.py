"""The precision plugin of Lightning by a stand-in for its base class, where Lightning is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import apex


class Precision:
    """The methods of Lightning's base class that ApexPrecision calls."""

    def connect(self, *given: Any) -> Any:
        return given


@pytest.fixture
def plugin_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if importlib.util.find_spec("lightning") is None:
        contents = {"lightning.pytorch": {"LightningModule": nn.Module}, "lightning.pytorch.plugins.precision": {}}
        for name in ("lightning", "lightning.pytorch", "lightning.pytorch.plugins", *contents):
            module = ModuleType(name)
            module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
            vars(module).update(contents.get(name, {}), Precision=Precision)
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "apex.integrations.lightning", raising=False)
    yield importlib.import_module("apex.integrations.lightning").ApexPrecision
    sys.modules.pop("apex.integrations.lightning", None)
    vars(apex.integrations).pop("lightning", None)


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16, "bf16-true": torch.bfloat16}


@pytest.mark.parametrize("precision", ["32", *HALVES])
def test_fabric_gets_float32_outputs(precision: str, plugin_class: Any) -> None:
    """Fabric's own precision casts floats on the way in to its half precision, and on the way out to float32."""
    plugin, half = plugin_class(precision), HALVES.get(precision, torch.float32)
    batch = ({"x": torch.ones(2), "index": torch.arange(2)}, [torch.ones(1)])
    inputs = plugin.convert_input(batch)
    assert [inputs[0]["x"].dtype, inputs[0]["index"].dtype, inputs[1][0].dtype] == [half, torch.int64, half]
    outputs = plugin.convert_output(inputs)
    assert [outputs[0]["x"].dtype, outputs[0]["index"].dtype] == [torch.float32, torch.int64]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_batches_of_a_trainer_are_not_cast(precision: str, plugin_class: Any) -> None:
    """They have the targets of losses, too."""
    plugin = plugin_class(precision)
    plugin.connect(nn.Linear(2, 2), [], [])
    assert plugin.convert_input(torch.ones(2)).dtype == torch.float32


def test_a_small_divergence_and_a_first_step(plugin_class: Any) -> None:
    """In half precision a KL of 0.00003 was negative, and a scaled loss overflowed."""
    torch.manual_seed(0)
    model, inputs = nn.Linear(8, 4), torch.randn(64, 8)
    target = model(inputs).detach() + 0.01 * torch.randn(64, 4)

    def divergence(precision: str) -> Any:
        plugin = plugin_class(precision)
        with plugin.forward_context():
            logits = model(plugin.convert_input(inputs))
        logits = plugin.convert_output(logits)
        assert logits.dtype == torch.float32
        given = logits.log_softmax(-1), target.log_softmax(-1)
        loss = nn.functional.kl_div(*given, log_target=True, reduction="batchmean")
        return loss.item(), None if plugin.scaler is None else plugin.scaler.scale(loss + 1.0)

    exact, _ = divergence("32")
    for precision, bound in (("bf16", 1e-5), ("fp16", 1e-6)):
        found, scaled = divergence(precision)
        assert abs(found - exact) < bound
        assert scaled is None or scaled.isfinite()
