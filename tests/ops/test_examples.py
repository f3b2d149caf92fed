"""Tests that every example of every family of ops passes, by every route."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from apex.ops import _library, all_families
from apex.ops._examples import (
    CHECKED_DTYPES,
    LAYOUTS,
    Call,
    Example,
    Make,
    Random,
    all_examples,
    by_name,
    differentiated,
    leaves_of,
    map_tensors,
    outputs_of,
    self_check,
    tensors_of,
    without_tf32,
)
from apex.ops._op import Op
from tests.support.grids import full_grids
from tests.support.harness import NO_GATHER, Route, assert_equal_bits, opcheck, routes

_F32, _F64, _BF16, _HALF = torch.float32, torch.float64, torch.bfloat16, torch.float16
EXAMPLES = dict(by_name())
FAMILIES = all_examples()
NOT_FIRST = {example.name for examples in FAMILIES.values() for example in examples[1:]}
TRITON = [route for route in routes() if route.values[0].implementation == "triton"]

MOST_INTERPRETED = 1 << 13  # elements

every_example = pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
every_route = pytest.mark.parametrize("route", routes())


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let cuDNN round as float32 does, and compute the same bits each time."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    with without_tf32():
        yield


def call_of(example: Example, route: Route, dtype: torch.dtype = _F32, **options: Any) -> Call:
    """Return a call at the first small sizes."""
    if NO_GATHER and route == Route("cpu", "triton") and example.name.startswith("transducer_loss"):
        pytest.skip(NO_GATHER)
    return Call(example, options.pop("sizes", example.small[0]), Make(dtype, torch.device(route.device), **options))


def fits(example: Example, sizes: tuple[int, ...], route: Route) -> bool:
    """Return whether a call takes seconds at most: the interpreter takes milliseconds per block of elements."""
    meta = Call(example, sizes, Make(_F32, torch.device("meta")))
    largest = max(tensor.numel() for tensor in meta.leaves or tensors_of(meta.arguments))
    return route != Route("cpu", "triton") or largest <= MOST_INTERPRETED


def copies(call: Call) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors_of(call.arguments)]


def test_names_are_unique() -> None:
    assert len(EXAMPLES) == sum(map(len, FAMILIES.values()))
    assert set(FAMILIES) <= set(all_families())


@pytest.mark.usefixtures("poisoned_memory")
@every_route
@every_example
def test_results_are_exact_and_the_same_twice(example: Example, route: Route) -> None:
    settings = [(example.small[0], dtype) for dtype in (_F32, _BF16, _HALF)]
    settings += [(sizes, _F32) for sizes in example.small[1:] if fits(example, sizes, route)]
    for sizes, dtype in settings:
        call = call_of(example, route, dtype, sizes=sizes)
        before = copies(call)
        with _library.implementation(route.implementation):
            results = call.results()
            if route.device == "cuda" or (sizes, dtype) == settings[0]:
                assert_equal_bits(results, call.results())
        assert call.worst_excess(results) <= 1, (sizes, dtype)
        assert_equal_bits(before, copies(call))
        gradients = results[len(results) - len(call.leaves) :]
        assert [each.dtype for each in gradients] == [leaf.dtype for leaf in call.leaves]


@every_example
def test_the_peer_of_benchmarks_is_right(example: Example) -> None:
    call = call_of(example, Route("cpu", "torch"))
    assert call.worst_excess(call.results(example.torch)) <= 1


@pytest.mark.parametrize("family", all_families().values(), ids=lambda family: family.name)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_self_check_of_every_family(family: _library.OpFamily, device: str) -> None:
    assert self_check(family, torch.device(device)) <= 1


def test_self_check_finds_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    family, examples = next(iter(FAMILIES.items()))
    wrong = [
        Example(**{**vars(each), "exact": lambda *given: 1.01 * examples[0].torch(*given)}) for each in examples[:1]
    ]
    monkeypatch.setattr("apex.ops._examples.all_examples", lambda: {family: wrong})
    assert self_check(all_families()[family], torch.device("cpu")) > 1


@every_route
@every_example
def test_memory_layouts(example: Example, route: Route) -> None:
    for layout in LAYOUTS if route.implementation == "torch" or route.device == "cuda" else LAYOUTS[1::2]:
        call = call_of(example, route, layout=layout)
        with _library.implementation(route.implementation):
            assert call.worst_excess(call.results()) <= 1, layout


@every_route
@every_example
def test_strided_tensors_and_gradients(example: Example, route: Route) -> None:
    """Every other element of a larger tensor is used, for all arguments and for the outputs' gradients."""

    def spread(tensor: Tensor) -> Tensor:
        return torch.stack((tensor.detach(),) * 2, -1)[..., 0].requires_grad_(tensor.requires_grad)

    call = call_of(example, route)
    call.arguments = {name: map_tensors(value, spread) for name, value in call.arguments.items()}
    call.leaves = leaves_of(call.arguments)
    with _library.implementation(route.implementation):
        outputs = call.outputs()
        results = differentiated(outputs, call.leaves, [spread(each) for each in call.gradients(outputs)])
    assert call.worst_excess(results) <= 1


@every_route
@every_example
def test_no_rows(example: Example, route: Route) -> None:
    call = call_of(example, route, sizes=(0, *example.small[0][1:]))
    with _library.implementation(route.implementation):
        results = call.results()
    for actual, exact in zip(results, call.exact, strict=True):
        torch.testing.assert_close(
            actual.double(), exact.double(), rtol=0, atol=0, equal_nan=True
        )  # a mean of none is NaN


@every_example
def test_derivatives(example: Example) -> None:
    if example.kink is not None:
        pytest.skip("a difference across the kink is no derivative")
    call = call_of(example, Route("cpu", "torch"), _F64)
    if not call.leaves:
        pytest.skip("the example has no derivative")

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(call.outputs())

    with _library.implementation("torch"):
        assert torch.autograd.gradcheck(function, call.leaves, fast_mode=True)
        if example.differentiable_twice:
            assert torch.autograd.gradgradcheck(function, call.leaves, fast_mode=True)


@every_route
@every_example
def test_each_gradient_alone(example: Example, route: Route) -> None:
    call = call_of(example, route)
    with _library.implementation(route.implementation):
        for index, leaf in enumerate(call.leaves):
            for other in call.leaves:
                other.requires_grad_(other is leaf)
            outputs = call.outputs()
            (*_, alone) = differentiated(outputs, [leaf], call.gradients(outputs))
            for other in call.leaves:
                other.requires_grad_()
            index -= len(call.leaves)
            results = [*call.exact[:index], alone, *call.exact[len(call.exact) + index + 1 :]]
            assert call.worst_excess([each.to(leaf.dtype) for each in results]) <= 1
        with torch.no_grad():
            assert all(output.grad_fn is None for output in call.outputs())


@every_route
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_without_graph_breaks(family: str, route: Route) -> None:
    """On a CPU each example is compiled by one of both routes in turn, by both in full grids."""
    if family == "transducer" and torch.__version__ < "2.10":
        pytest.skip("Dynamo of PyTorch 2.6 and 2.9 does not trace packed rows, whose number depends on values")
    examples = FAMILIES[family]
    if route.device == "cpu" and not full_grids():  # `test_compiled_for_all_sizes_at_once` has operators of the first
        examples = examples[route.implementation == "torch" :: 2]
    if not examples:
        pytest.skip("the only example is compiled by the other route")
    calls = [call_of(example, route) for example in examples]

    def function(arguments: list[list[Any]]) -> list[Any]:
        return [call.example.function(*given) for call, given in zip(calls, arguments, strict=True)]

    # Generated C++ would need a compiler; on a GPU the generated code is Triton.
    backend = "inductor" if route.device == "cuda" else "aot_eager"
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        outputs = [outputs_of(value) for value in compiled([list(call.arguments.values()) for call in calls])]
        # One backward pass for all, because it is one compiled graph.
        pairs = [
            pair
            for call, each in zip(calls, outputs, strict=True)
            for pair in zip(each, call.gradients(each), strict=True)
        ]
        leaves = [leaf for call in calls for leaf in call.leaves]
        roots, given = zip(*pairs, strict=True)
        found = iter(differentiated(roots, leaves, given)[len(roots) :])
    for call, each in zip(calls, outputs, strict=True):
        results = [*(output.detach() for output in each), *(next(found) for _ in call.leaves)]
        assert call.worst_excess(results) <= 1, call.example.name


@pytest.mark.skipif(
    torch.__version__ < "2.7", reason="Dynamo of PyTorch 2.6 compiles again for each size that a branch asks about"
)
@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_for_all_sizes_at_once(family: str, route: Route) -> None:
    """The number of rows changes from call to call; one compilation serves them all.

    On a CPU every second family is a sample.
    """
    if route.device == "cpu" and list(FAMILIES).index(family) % 2 and not full_grids():
        pytest.skip("every second family is compiled, and all are in full grids")
    if family == "group_norm" and route.implementation == "torch" and torch.__version__ < "2.10":
        pytest.skip("PyTorch 2.9 divides a size that varies in group norm's backward pass, and cannot trace it")
    example = FAMILIES[family][0]
    backend = "inductor" if route.device == "cuda" else "aot_eager"
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        compiled = torch.compile(example.function, fullgraph=True, dynamic=True, backend=backend)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for rows in (19, 23):  # sizes that no example has elsewhere, because equal sizes would be taken for one
                call = call_of(example, route, sizes=(rows, *example.small[0][1:]))
                assert call.worst_excess(call.results(compiled)) <= 1


@every_route
@every_example
def test_activation_checkpointing(example: Example, route: Route) -> None:
    if route == Route("cpu", "triton") and example.name in NOT_FIRST and not full_grids():
        pytest.skip("the first example of a family is interpreted, and all are in full grids")
    call = call_of(example, route)
    with _library.implementation(route.implementation):
        again = call.results(functools.partial(checkpoint, example.function, use_reentrant=False))
        if str(route) == "cuda-torch":  # some of PyTorch's operators add in any order there
            assert call.worst_excess(again) <= 1
        else:
            assert_equal_bits(again, call.results())


def launched(examples: Sequence[Example], route: Route, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, tuple]]:
    """Yield each operator of PyTorch's that calls of the examples stand for, with its arguments; each kind once."""
    seen: dict[tuple, tuple[Any, tuple]] = {}
    forward, backward = Op._launch, Op._launch_backward

    def note(operator: Any, arguments: tuple) -> None:
        seen.setdefault((str(operator), *(each is None for each in arguments)), (operator, arguments))

    def launch(self: Op, arguments: tuple) -> Any:
        note(self._library_op, arguments)
        return forward(self, arguments)

    def launch_backward(self: Op, tensors: Any, settings: Any, wanted: Any) -> Any:
        plain = [tensor if tensor is None else tensor.detach() for tensor in tensors]
        note(self._library_backward, (*plain, *settings, list(wanted)))
        return backward(self, tensors, settings, wanted)

    monkeypatch.setattr(Op, "_launch", launch)
    monkeypatch.setattr(Op, "_launch_backward", launch_backward)
    with _library.implementation("triton"):
        for example in examples:
            call_of(example, route).results()
    monkeypatch.undo()
    yield from seen.values()


@pytest.mark.parametrize("route", TRITON)
@pytest.mark.parametrize("family", FAMILIES)
def test_pytorch_knows_the_operators(family: str, route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operator is checked by one of both routes in turn, by both on a GPU and in full grids."""
    both = ("torch", "triton")
    for number, (operator, arguments) in enumerate(launched(FAMILIES[family], route, monkeypatch)):
        for implementation in both if route.device == "cuda" or full_grids() else (both[number % 2],):
            with _library.implementation(implementation):  # type: ignore[arg-type]
                opcheck(Route(route.device, implementation), operator, arguments)


@pytest.mark.gpu
@every_example
def test_drawn_sizes(example: Example) -> None:
    if example.draw is None:
        pytest.skip("the example draws no sizes")
    for seed in range(6):
        random = Random(f"{seed} {example.name}", 1 << 22)
        sizes, dtype, layout = example.draw(random), random.dtype(), random.layout()
        call = Call(example, sizes, Make(dtype, torch.device("cuda"), seed, layout))
        with _library.implementation("triton"):
            results, again = call.results(), call.results()
        assert call.worst_excess(results) <= 1, (sizes, dtype, layout)
        assert_equal_bits(results, again)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CHECKED_DTYPES, ids=str)
@pytest.mark.parametrize("example", [each for each in EXAMPLES.values() if each.large], ids=str)
def test_sizes_of_models(example: Example, dtype: torch.dtype) -> None:
    for sizes in example.large:
        call = call_of(example, Route("cuda", "triton"), dtype, sizes=sizes)
        with _library.implementation("triton"):
            results, again = call.results(), call.results()
        assert call.worst_excess(results) <= 1, sizes
        assert_equal_bits(results, again)


@pytest.mark.gpu
@every_example
def test_captured_in_a_cuda_graph(example: Example) -> None:
    call = call_of(example, Route("cuda", "triton"))
    torch.cuda.synchronize()  # the other stream does not wait for the tensors
    with _library.implementation("triton"):
        with torch.cuda.stream(torch.cuda.Stream()):  # compile before the capture
            expected = call.results()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = call.results()
    graph.replay()
    torch.cuda.synchronize()
    assert_equal_bits(found, expected)
