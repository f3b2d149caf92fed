"""Models with every fused module and function compile in one graph, at every opt level of half precision."""

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex import amp, fused_bias_swiglu, ops
from apex.contrib.llm_losses import grpo_loss
from apex.normalization import FusedLayerNorm
from apex.ops import _library
from apex.ops.newton_schulz import newton_schulz
from tests.support.grids import full_grids
from tests.support.public_calls import Call, calls, signature_of

# What is no part of a model; and RNNs, which are loops over time of PyTorch's operators.
LEFT_OUT = ("multi_tensor_applier", "clip_grad_norm_", "RNN.")


class Every(nn.Module):
    """All calls, one after the other, on the tensors that are given for them."""

    def __init__(self, table: list[Call]) -> None:
        super().__init__()
        self.functions = [call.function for call in table]
        self.modules_of_functions = nn.ModuleList(f for f in self.functions if isinstance(f, nn.Module))

    def forward(self, arguments: list[list[Any]]) -> list[Any]:
        return [function(*given) for function, given in zip(self.functions, arguments, strict=True)]


def floats(results: Any) -> list[Tensor]:
    if isinstance(results, (tuple, list)):
        return [tensor for each in results for tensor in floats(each)]
    return [results] if isinstance(results, Tensor) and results.is_floating_point() else []


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_every_call_in_one_graph(level: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    table = [call for call in calls() if not call.name.startswith(LEFT_OUT)]
    if torch.__version__ < "2.7":  # which compiles `Function.apply` where it is written so, not as the value of a name
        table = [call for call in table if getattr(call.function, "__name__", "") != "apply"]
        table = [call for call in table if call.name != "fast_mask_softmax_dropout_func"]
    if level in ("O2", "O4"):  # which cast functions as O5 and O1 do, to another dtype: half of the modules each
        modules = {type(call.function): call for call in table if isinstance(call.function, nn.Module)}
        table = list(modules.values())[level == "O4" :: 2]
    elif not full_grids():  # half of the calls at O1, the others at O5
        table = table[level == "O5" :: 2]
    arguments = [
        [v.requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v for v in call.arguments.values()]
        for call in table
    ]
    model = amp.initialize(Every(table), opt_level=level, verbosity=0)
    try:
        expected = model(arguments)
        # At one level, since what is traced of a backward pass does not depend on it; `tests/ops/test_examples.py`
        # traces the backward pass of every op.
        backward = level == "O5"
        backend = "aot_eager" if backward else "eager"
        found = torch.compile(model, fullgraph=True, backend=backend)(arguments)
        for call, actual, wanted in zip(table, found, expected, strict=True):
            assert [t.dtype for t in floats(actual)] == [t.dtype for t in floats(wanted)], call.name
            for one, other in zip(floats(actual), floats(wanted), strict=True):
                torch.testing.assert_close(one, other, msg=call.name, atol=0.02, rtol=0.02, equal_nan=True)
        if backward:
            sum(t.float().sum() for t in floats(found) if t.requires_grad).backward()
            assert all(p.grad is not None for p in model.parameters())
    finally:
        amp.shutdown()


def test_a_graph_has_an_operator_for_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels run."""
    norm = FusedLayerNorm(16)

    def function(x: Tensor, angles: Tensor) -> Tensor:
        x = norm(fused_bias_swiglu.fused_bias_swiglu(x))
        return ops.rotary_embedding(x, angles)

    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if str(node.target).startswith("apex."))
        return lambda *inputs: (inputs[0],)  # it is not run

    kernels_run = _library.Choice("triton", "as on a GPU")
    monkeypatch.setattr(_library, "explain", lambda *arguments: kernels_run)
    monkeypatch.setattr(ops.norm.config, "NATIVE_BELOW", 0)
    torch._dynamo.reset()
    with _library.implementation("auto"):
        torch.compile(function, backend=backend, fullgraph=True)(torch.randn(4, 2, 2, 32), torch.rand(4, 1, 1, 16))
    assert [name.split(".")[1] for name in seen] == ["glu", "norm", "rope"]


def _scheduled(matrices: Tensor, first: float = 3.4445) -> Tensor:
    return newton_schulz(matrices, [(first, -4.775, 2.0315)] * 2)


def _policy(log_probs: Tensor, mask: Tensor, advantages: Tensor, beta: float = 0.1, k: float = 1.7) -> Any:
    return grpo_loss(log_probs, mask, advantages, None, -mask, loss_type="vespo", beta=beta, vespo_k_pos=k)


def calls_with_numbers() -> dict[str, tuple[Call, dict[str, float]]]:
    """Return calls by name, with a value for each float that they take: a schedule may change any of them."""
    table = [
        *(call for call in calls() if not call.name.startswith(LEFT_OUT)),
        Call("newton_schulz", _scheduled, {"matrices": torch.randn(2, 3, 4)}),
        Call(
            "vespo", _policy, {"log_probs": -torch.rand(2, 3), "mask": torch.ones(2, 3), "advantages": torch.randn(2)}
        ),
    ]
    found = {}
    for call in table:
        numbers = {}
        for name, parameter in signature_of(call.function).parameters.items():
            value = call.arguments.get(name, parameter.default)
            if (
                re.fullmatch(
                    r"(Tensor \| )?float( \| None)?", inspect.formatannotation(parameter.annotation).strip("'")
                )
                and "dropout" not in name
            ):
                numbers[name] = 3.0 if value is None else value or 0.1
        if numbers and not isinstance(call.function, nn.Module):
            found[call.name] = call, numbers
    return found


NUMBERS = calls_with_numbers()


@pytest.mark.skipif(torch.__version__ < "2.7", reason="Dynamo of PyTorch 2.6 takes numbers for constants")
@pytest.mark.filterwarnings("ignore:label_smoothing:UserWarning")
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_may_change_in_one_graph(name: str) -> None:
    """A number that changed is traced, and functions of `math` on it break the graph: compare it instead."""
    call, numbers = NUMBERS[name]

    def function(tensors: dict[str, Any], numbers: dict[str, float]) -> Any:
        given = {**tensors, **numbers}
        taken = [given.pop(each) for each in call.arguments]
        return call.function(*taken, **given)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="eager")
    for factor in (1.0, 1.25):
        changed = {each: value * factor for each, value in numbers.items()}
        expected = function(call.arguments, changed)
        for one, other in zip(floats(compiled(call.arguments, changed)), floats(expected), strict=True):
            torch.testing.assert_close(one, other, equal_nan=True, msg=f"{name} {changed}")
