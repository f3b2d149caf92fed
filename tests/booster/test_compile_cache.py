"""Models that a Booster compiles are found in AOTAutograd's cache by the next process that compiles them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from apex.booster import Booster
from apex.booster import _compile as compile_module
from apex.booster.mixed_precision import BF16MixedPrecision, FP16TorchMixedPrecision
from apex.normalization import FusedLayerNorm
from apex.ops import _library
from apex.ops.attention import attention
from apex.ops.batch_norm import batch_norm
from apex.ops.xentropy import linear_cross_entropy

inductor_config = pytest.importorskip("torch._inductor.config")
pytestmark = pytest.mark.skipif(
    not hasattr(inductor_config, "unsafe_marked_cacheable_functions"), reason="this PyTorch has no such option"
)


class Network(nn.Module):
    """Our batch norm, layer norm, attention and loss of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.batch, self.norm, self.head = nn.BatchNorm1d(16), FusedLayerNorm(16), nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        batch = self.batch
        x = batch_norm(x, batch.running_mean, batch.running_var, batch.weight, batch.bias, relu=True).unflatten(
            0, (2, 1, 4)
        )
        x = self.norm(attention(x, x, x)).flatten(0, 2)
        return linear_cross_entropy(x, self.head.weight, targets)


class Dense(nn.Module):
    """A layer norm that is PyTorch's operator, with autocast switched off around it, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(16, 16), FusedLayerNorm(16)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.norm(self.dense(x))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Give each test empty caches."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    yield
    torch._dynamo.reset()


def compiled_step(make: type[nn.Module], precision: Any) -> tuple[dict[str, int], list[Tensor]]:
    """Train a new model for one step, compiled as in a new process; return the cache's counters and its weights."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = make()
    booster = Booster("cpu", precision, compile={"dynamic": False})
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    @booster.step
    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = boosted(inputs, targets).float().sum()
        optimizer.backward(loss)
        optimizer.step()
        return loss

    step(torch.randn(8, 16), torch.arange(8))
    found = {name: count for name, count in counters["aot_autograd"].items() if name.startswith("autograd_cache")}
    return found, [value.clone() for value in boosted.state_dict().values()]


def test_second_compilation_is_found_in_the_cache() -> None:
    with _library.implementation("triton"):
        first, expected = compiled_step(Network, BF16MixedPrecision("O5"))
        second, weights = compiled_step(Network, BF16MixedPrecision("O5"))
    assert first == {"autograd_cache_miss": 1, "autograd_cache_saved": 1}
    assert second == {"autograd_cache_hit": 1}
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_autocast_in_a_graph_is_cached_but_not_for_another_dtype_or_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled_step(Dense, BF16MixedPrecision("O4"))[0] == {"autograd_cache_miss": 1, "autograd_cache_saved": 1}
    assert compiled_step(Dense, BF16MixedPrecision("O4"))[0] == {"autograd_cache_hit": 1}
    assert "autograd_cache_hit" not in compiled_step(Dense, FP16TorchMixedPrecision())[0]
    monkeypatch.setattr(compile_module, "__version__", "another")  # its operators may have other derivatives
    assert "autograd_cache_hit" not in compiled_step(Dense, BF16MixedPrecision("O4"))[0]


@pytest.mark.parametrize("options", [{"mode": "reduce-overhead"}, {"backend": "eager"}])
def test_modes_and_other_backends_get_no_options(options: dict[str, Any]) -> None:
    assert compile_module._cached(options, torch.bfloat16) == options


def test_options_of_the_user_are_kept() -> None:
    name = "unsafe_marked_cacheable_functions"
    given = {"options": {"max_autotune": True, name: {"mine": "1"}}}
    options = compile_module._cached(given, None)["options"]
    assert options["max_autotune"]
    assert options[name]["mine"] == "1"
    assert set(compile_module._CACHEABLE) < set(options[name])
    with inductor_config.patch({name: {"theirs": "2"}}):
        assert compile_module._cached({}, None)["options"][name]["theirs"] == "2"
