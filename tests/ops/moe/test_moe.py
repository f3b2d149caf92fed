"""Tests of a mixture's experts beyond the examples: sorting, experts without rows, routes, main_grad, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from apex.ops import _library
from apex.ops._device import DeviceFacts
from apex.ops._examples import Call, Make
from apex.ops.moe import examples, grouped, launches, moe_experts, moe_experts_main_grad, reference
from apex.ops.moe.problem import problem_of
from apex.transformer.tensor_parallel import backward_part
from tests.support.harness import Route, assert_equal_bits, routes

_BF16, _F32, _F64 = torch.bfloat16, torch.float32, torch.float64
CALLS = {example.name: example for example in examples.EXAMPLES}
every_route = pytest.mark.parametrize("route", routes())
triton_routes = pytest.mark.parametrize("route", [r for r in routes() if r.values[0].implementation == "triton"])


def tensors(
    route: Route, index: list[list[int]], experts: int = 4, hidden: int = 16, width: int = 8, dtype: torch.dtype = _F32
) -> dict[str, Any]:
    make = Make(dtype, torch.device(route.device))
    return {
        "x": make.normal(len(index), hidden),
        "gate_up": make.normal(experts, 2 * width, hidden),
        "down": make.normal(experts, hidden, width),
        "index": make.tensor(index, torch.int64),
        "weight": make.normal(len(index), len(index[0])),
    }


def gradients(given: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    names = [name for name in given if name != "index"]
    output = moe_experts(*given.values(), **options)
    found = torch.autograd.grad(output.square().sum(), [given[name] for name in names])
    return {"output": output.detach(), **dict(zip(names, found, strict=True))}


@triton_routes
@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(1, 1, 1), (150, 2, 5), (67, 4, 70)])
def test_the_sort_is_stable(route: Route, tokens: int, chosen: int, experts: int) -> None:
    index = Make(_F32, torch.device(route.device)).integers(-1, experts + 2, tokens, chosen)
    x, gate_up = torch.empty(tokens, 4, device=route.device), torch.empty(experts, 2, 4, device=route.device)
    problem = problem_of(x, gate_up, index, "silu", False, False)
    with _library.implementation("triton"):
        *found, tiles = launches.launch_sort(index, problem)
    assert_equal_bits(found, list(reference.sort_rows(index, experts)))
    bounds, planned = found[2].tolist(), []
    for expert in range(experts):
        planned += [(expert, row) for row in range(bounds[expert], bounds[expert + 1], problem.tile_rows)]
    used = tiles[:, : len(planned)].t().tolist()
    assert [tuple(pair) for pair in used] == planned
    assert (tiles[0, len(planned) :] == -1).all()


@every_route
@pytest.mark.parametrize(
    "index",
    [[[2, 2]] * 9, [[4, 4]] * 3, [[0, 4], [4, 3], [3, 3]], [[1]]],
    ids=["one expert", "no expert", "some without", "one row"],
)
def test_routings(route: Route, index: list[list[int]]) -> None:
    given = tensors(route, index)
    wide = {
        name: t.detach().to("cpu", _F64 if t.is_floating_point() else t.dtype).requires_grad_(t.is_floating_point())
        for name, t in given.items()
    }
    expected = gradients(wide)
    with _library.implementation(route.implementation):
        found = gradients(given)
    for name, value in found.items():
        largest = max(1.0, float(expected[name].abs().max()))
        torch.testing.assert_close(value.cpu().double(), expected[name], rtol=1e-5, atol=1e-5 * largest)
    unused = sorted(set(range(4)) - {expert for row in index for expert in row})
    assert not found["gate_up"][unused].any()
    assert not found["down"][unused].any()
    assert not found["weight"][given["index"] == 4].any()


@triton_routes
@pytest.mark.parametrize("width", [8, 40])
def test_rows_without_an_expert_are_zero_before_the_unit(route: Route, width: int, poisoned_memory: None) -> None:
    given = tensors(route, [[0, 4], [4, 3], [3, 3]], width=width)
    with _library.implementation("triton"):
        _, pre, order, _, offsets = torch.ops.apex.moe_experts(*given.values(), None, None, "silu", False, False)
    assert pre[: offsets[-1]].isfinite().all()
    assert not pre[offsets[-1] :].any()
    assert order[offsets[-1] :].sort().values.tolist() == [1, 2]


@every_route
def test_dtypes_of_weights_and_indices(route: Route) -> None:
    given = tensors(route, [[0, 1], [3, 2], [2, 4]], dtype=_BF16)
    with _library.implementation(route.implementation):
        expected = gradients(given)
        assert expected["output"].dtype == expected["gate_up"].dtype == _BF16
        found = gradients({**given, "index": given["index"].int()})
        assert_equal_bits(list(expected.values()), list(found.values()))
        wider = gradients({**given, "weight": given["weight"].detach().float().requires_grad_()})
    assert wider["weight"].dtype == _F32
    assert_equal_bits([expected["output"]], [wider["output"]])


@every_route
def test_the_backward_pass_keeps_no_rows_of_the_hidden_size(route: Route) -> None:
    given = tensors(route, [[0, 1], [3, 2], [2, 4]], hidden=24, width=4)
    kept: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t)
    with _library.implementation(route.implementation), hooks:
        moe_experts(*given.values())
    shapes = {tuple(tensor.shape) for tensor in kept if tensor.is_floating_point()}
    assert shapes == {(3, 24), (4, 8, 24), (4, 24, 4), (3, 2), (6, 8)}


@every_route
def test_autocast_casts_all_but_the_weights(route: Route) -> None:
    given = tensors(route, [[0, 1], [3, 2], [2, 4]])
    with _library.implementation(route.implementation), torch.autocast(route.device, dtype=_BF16):
        found = gradients(given)
    assert found.pop("output").dtype == _BF16
    assert {value.dtype for value in found.values()} == {_F32}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows without an expert hold garbage behind these products
@triton_routes
@pytest.mark.parametrize("name", ["moe_experts", "moe_experts_transposed"])
def test_pytorch_products_give_the_same(route: Route, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`grouped_mm` computes every product, also those that it would compute on no CPU."""
    if not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this PyTorch has no grouped_mm on a CPU")
    call = Call(CALLS[name], (24, 4, 2, 16, 24), Make(_BF16, torch.device(route.device)))
    for products in (False, True):
        monkeypatch.setattr(grouped, "route", lambda *given, products=products: grouped.Route(True, products))
        with _library.implementation("triton"):
            assert call.worst_excess(call.results()) <= 1


def test_pytorch_products_are_for_many_rows_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGPU:
        dtype, is_cuda, device = _BF16, True, torch.device("cuda", 0)

        def data_ptr(self) -> int:
            return 64

    x: Any = OnGPU()
    monkeypatch.setattr(grouped, "facts", lambda device: DeviceFacts("H100", "cuda", 132, 32, 0, capability=(9, 0)))
    if grouped._grouped_mm is None:
        pytest.skip("this PyTorch has no grouped_mm")
    assert grouped.route(x, (), 16384, (8, 4096, 14336), True) == (True, True)
    assert grouped.route(x, (), 512, (8, 4096, 14336), True) == (True, False)
    assert grouped.route(x, (), 16384, (8, 4096, 14336), False) == (True, False)
    for sizes in ((8, 4096, 14332), (8, 4100, 14336), (1024, 64, 4096)):
        assert grouped.route(x, (), 16384, sizes, True) == grouped.OURS
    with _library.implementation("triton"):
        assert grouped.route(x, (), 16384, (8, 4096, 14336), True) == grouped.OURS


@every_route
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_are_added_to_main_grad(route: Route, transposed: bool) -> None:
    given = tensors(route, [[0, 1], [3, 1], [4, 0]])
    if transposed:
        for name in ("gate_up", "down"):
            given[name] = given[name].detach().transpose(1, 2).contiguous().requires_grad_()
    with _library.implementation(route.implementation):
        expected = gradients(given, transposed=transposed)
        for name in ("gate_up", "down"):
            given[name].main_grad = torch.full_like(given[name], 3.0, dtype=_F32)
        calls: list[tuple[bool, ...]] = []

        def wanted(*needs: bool) -> tuple[bool, ...]:
            calls.append(needs)
            return backward_part.wanted(*needs)

        output = moe_experts_main_grad(*given.values(), wanted=wanted, transposed=transposed)
        loss = output.square().sum()
        with backward_part.only("input"):
            loss.backward(retain_graph=True)
        assert (given["gate_up"].main_grad == 3).all()
        torch.testing.assert_close(given["x"].grad, expected["x"])
        torch.testing.assert_close(given["weight"].grad, expected["weight"])
        given["x"].grad = None
        with backward_part.only("weight"):
            loss.backward()
    assert given["x"].grad is None
    assert given["gate_up"].grad is None
    for name in ("gate_up", "down"):
        torch.testing.assert_close(given[name].main_grad, expected[name] + 3, rtol=1e-5, atol=1e-5)
        assert (given[name].main_grad[2] == 3).all()  # no row has this expert
    assert len(calls) == 4


def test_main_grad_must_exist() -> None:
    given = tensors(Route("cpu", "torch"), [[0, 1]])
    with pytest.raises(RuntimeError, match="gate_up needs a contiguous main_grad"):
        moe_experts_main_grad(*given.values(), wanted=backward_part.wanted)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(3, 2, 16)}, ValueError, r"x has shape \[3, 2, 16\]"),
        ({"gate_up": torch.zeros(4, 15, 16)}, ValueError, "2 \\* width"),
        ({"gate_up": torch.zeros(4, 16, 15)}, ValueError, "gate_up has shape"),
        ({"down": torch.zeros(3, 16, 8)}, ValueError, "down has shape"),
        ({"down": torch.zeros(4, 16, 8).half()}, TypeError, "down is torch.float16"),
        ({"index": torch.zeros(3, 2)}, TypeError, "int64 and int32"),
        ({"index": torch.zeros(2, 2).long()}, ValueError, "3 tokens"),
        ({"index": torch.full((3, 2), 5)}, ValueError, "0 to 3, or 4 for none"),
        ({"index": torch.full((3, 2), -1)}, ValueError, "values from -1"),
        ({"weight": torch.zeros(3, 1)}, ValueError, "weight has shape"),
        ({"weight": torch.zeros(3, 2).long()}, TypeError, "weight must be floating-point"),
        ({"bias": torch.zeros(4, 16)}, TypeError, "bias must be a pair"),
        ({"bias": (torch.zeros(4, 8), None)}, ValueError, "bias of gate_up has shape"),
        ({"activation": "tanh"}, ValueError, "activation='tanh' is not known"),
    ],
    ids=lambda value: "",
)
def test_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {**tensors(Route("cpu", "torch"), [[0, 1], [3, 2], [2, 4]]), **changes}
    positional = [given.pop(name) for name in ("x", "gate_up", "down", "index", "weight")]
    with pytest.raises(error, match=message):
        moe_experts(*positional, **given)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(2048, 16, 4, 512, 384), (512, 4, 2, 256, 4096)], ids=["narrow", "wide"])
@pytest.mark.parametrize("routing", ["drawn", "one expert", "no expert"])
def test_nothing_waits_for_the_device(sizes: tuple[int, ...], routing: str) -> None:
    call = Call(CALLS["moe_experts"], sizes, Make(_BF16, torch.device("cuda")))
    if routing != "drawn":
        call.arguments["index"].fill_(0 if routing == "one expert" else sizes[1])
    first = call.results()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = call.results()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_equal_bits(first, again)
    assert call.worst_excess(first) <= 1


@pytest.mark.gpu
def test_captured_with_pytorch_products() -> None:
    call = Call(CALLS["moe_experts"], (512, 4, 2, 256, 4096), Make(_BF16, torch.device("cuda")))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        expected = call.results()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call.results()
    graph.replay()
    torch.cuda.synchronize()
    assert_equal_bits(found, expected)
