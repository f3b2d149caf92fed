"""Graphs of models that a Booster compiles, and AOTAutograd's cache, where the next process finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
cached = pytest.mark.skipif(
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
    # PyTorch's own operators run as they are: compiling C++ for them takes a second per graph.
    options = {"fallback_by_default": True} if hasattr(inductor_config, "fallback_by_default") else {}
    with inductor_config.patch(options):
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


class Layers(nn.Sequential):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)),
        lambda: Layers(nn.Linear(16, 16), nn.LayerNorm(16)),
        lambda: nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True),
    ],
    ids=["Sequential", "Layers", "TransformerEncoderLayer"],
)
@pytest.mark.parametrize("fuse", [False, True])
def test_modules_of_pytorch_are_compiled_whole(make: Callable[[], nn.Module], fuse: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = make()
    booster = Booster("cpu", BF16MixedPrecision("O5"), fuse=fuse, compile={"backend": "aot_eager"})
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    @booster.step
    def step(inputs: Tensor) -> Tensor:
        loss = boosted(inputs).float().square().sum()
        optimizer.backward(loss)
        optimizer.step()
        return loss

    for _ in range(2):
        step(torch.randn(2, 4, 16))
    assert counters["stats"]["unique_graphs"] == 1


@cached
def test_second_compilation_is_found_in_the_cache() -> None:
    with _library.implementation("triton"):
        first, expected = compiled_step(Network, BF16MixedPrecision("O5"))
        second, weights = compiled_step(Network, BF16MixedPrecision("O5"))
    assert first == {"autograd_cache_miss": 1, "autograd_cache_saved": 1}
    assert second == {"autograd_cache_hit": 1}
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@cached
def test_autocast_in_a_graph_is_cached_but_not_for_another_dtype_or_source(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled_step(Dense, BF16MixedPrecision("O4"))[0] == {"autograd_cache_miss": 1, "autograd_cache_saved": 1}
    assert compiled_step(Dense, BF16MixedPrecision("O4"))[0] == {"autograd_cache_hit": 1}
    assert "autograd_cache_hit" not in compiled_step(Dense, FP16TorchMixedPrecision())[0]
    monkeypatch.setattr(compile_module, "_digest", lambda: "another")  # its operators may have other derivatives
    assert "autograd_cache_hit" not in compiled_step(Dense, BF16MixedPrecision("O4"))[0]


@cached
def test_function_of_the_user_with_another_backward_pass_is_compiled_again() -> None:
    def made(factor: float) -> type[nn.Module]:
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                return gradient * factor

        class Model(Dense):
            def forward(self, x: Tensor, targets: Tensor) -> Tensor:
                return Scaled.apply(self.dense(x))  # type: ignore[no-any-return]

        return Model

    _, expected = compiled_step(made(2.0), BF16MixedPrecision("O5"))
    found, weights = compiled_step(made(3.0), BF16MixedPrecision("O5"))
    assert "autograd_cache_hit" not in found
    assert not torch.equal(weights[0], expected[0])
    assert compiled_step(made(2.0), BF16MixedPrecision("O5"))[0] == {"autograd_cache_hit": 1}


@cached
@pytest.mark.parametrize("options", [{"mode": "reduce-overhead"}, {"backend": "eager"}])
def test_modes_and_other_backends_get_no_options(options: dict[str, Any]) -> None:
    assert compile_module._cached(options, torch.bfloat16) == options


@cached
def test_options_of_the_user_are_kept() -> None:
    name = "unsafe_marked_cacheable_functions"
    given = {"options": {"max_autotune": True, name: {"mine": "1"}}}
    options = compile_module._cached(given, None)["options"]
    assert options["max_autotune"]
    assert options[name]["mine"] == "1"
    assert set(compile_module._CACHEABLE) < set(options[name])
    with inductor_config.patch({name: {"theirs": "2"}}):
        assert compile_module._cached({}, None)["options"][name]["theirs"] == "2"
