"""Operators in compiled code, whose Python runs once for arguments that look alike."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from apex.ops import _library, _replay, batch_norm, dense, glu, group_norm, max_pool, norm  # noqa: F401
from apex.ops._partial_sums import TICKETS
from tests.harness import Route, routes

OPS = torch.ops.apex
SETTINGS = (40, 1e-5, True, False, torch.float32, torch.float32)
ROUTES = [route for route in routes() if route.values[0].implementation == "triton"]


def implementation_of(op: Any) -> Any:
    call = op.default._op
    return dict(zip(call.__code__.co_freevars, call.__closure__, strict=True))["implementation"].cell_contents


def cases(device: str) -> dict[str, tuple[Any, ...]]:
    """An operator and its arguments, by a name."""
    generator = torch.Generator(device="cpu").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)

    rows, weight, statistics, channel = draw(32, 40), draw(40), draw(2, 32), draw(8)
    images = draw(3, 8, 5, 5).to(memory_format=torch.channels_last)
    channels = (channel, channel, channel, channel)
    given = (images, images, None, *channels)
    index = torch.zeros(2, 5, 6, 24, dtype=torch.int8, device=device)
    return {
        "norm": (OPS.norm, rows, weight, weight, *SETTINGS),
        "norm backward": (OPS.norm_backward, rows, rows, weight, weight, statistics, *SETTINGS, [True] * 3),
        "input's gradient alone": (
            OPS.norm_backward,
            rows,
            rows,
            weight,
            None,
            statistics,
            *SETTINGS,
            [True, False, False],
        ),
        "statistics": (OPS.batch_norm_statistics, images, channel, channel + 1, channel, channel, 0.1, 1e-5, 1),
        "batch norm backward": (OPS.batch_norm_backward, *given, 1e-5, True, True, 1, True),
        "sums alone": (OPS.batch_norm_backward, *given, 1e-5, True, True, 1, False),
        "group norm": (OPS.group_norm, images, channel, channel, 4, 1e-5, True),
        "group norm backward": (
            OPS.group_norm_backward,
            images,
            images,
            *channels[:2],
            draw(3, 4, 2),
            4,
            1e-5,
            True,
            [True] * 3,
        ),
        "glu": (OPS.glu, rows, None, "silu"),
        "gelu": (OPS.gelu_backward, rows, rows, True),
        "max pool": (OPS.max_pool, draw(2, 9, 11, 24), 3, 2, 1, 9, 11),
        "max pool backward": (OPS.max_pool_backward, draw(2, 5, 6, 24), index, 3, 2, 1, 9, 11, [True]),
    }


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", cases("cpu"))
def test_a_second_call_does_what_the_first_did(route: Route, name: str) -> None:
    op, *arguments = cases(route.device)[name]
    found = []
    with _library.implementation(route.implementation), torch.no_grad():
        _replay._plan.cache_clear()
        for call in (implementation_of(op), op.default, op.default):
            given = [each.clone() if isinstance(each, Tensor) else each for each in arguments]
            results = call(*given)
            tensors = results if isinstance(results, tuple) else (results,)
            found.append([*tensors, *(each for each in given if isinstance(each, Tensor))])  # with what it changed
        assert _replay._plan.cache_info()[:2] == (1, 1)  # hits and misses
        plan = _replay._plan(implementation_of(op), _replay.looks_of(arguments), arguments[0].device)
    assert plan is not None
    for later in found[1:]:
        for actual, wanted in zip(later, found[0], strict=True):
            assert torch.equal(actual, wanted)
            assert (actual.stride(), actual.dtype) == (wanted.stride(), wanted.dtype)


def test_tensors_that_look_otherwise_are_noted_anew() -> None:
    x, weight = torch.randn(32, 40), torch.rand(40)
    with _library.implementation("triton"), torch.no_grad():
        _replay._plan.cache_clear()
        wide = OPS.norm.default(x, weight, weight, *SETTINGS)[0]
        assert torch.equal(OPS.norm.default(x[:7], weight, weight, *SETTINGS)[0], wide[:7])
        larger = (x, weight, weight, 40, 3.0, *SETTINGS[2:])
        assert torch.equal(OPS.norm.default(*larger)[0], implementation_of(OPS.norm)(*larger)[0])
        assert _replay._plan.cache_info().currsize == 3


def test_what_computes_more_than_kernels_do_is_called() -> None:
    x, weight = torch.randn(40, 32).t(), torch.rand(40)  # is copied first
    with _library.implementation("triton"), torch.no_grad():
        _replay._plan.cache_clear()
        first, second = (OPS.norm.default(x, weight, weight, *SETTINGS)[0] for _ in range(2))
        assert torch.equal(first, OPS.norm.default(x.contiguous(), weight, weight, *SETTINGS)[0])
    assert torch.equal(first, second)


def test_zeros_that_are_no_tickets_are_made_anew() -> None:
    looks = _replay.looks_of((torch.ones(2),))
    for dtype, is_planned in ((torch.int32, True), (torch.float32, False)):
        implementation = lambda x, dtype=dtype: torch.zeros(TICKETS, dtype=dtype, device=x.device)  # noqa: E731
        assert (_replay._plan(implementation, looks, torch.device("cpu")) is not None) == is_planned


def test_threads_do_not_note_each_others_launches() -> None:
    """The first would end while the second is at work, and would end the second's recording, too."""
    inside, begun, ended = (threading.Event() for _ in range(3))
    plans: dict[Any, Any] = {}
    glu_of = implementation_of(OPS.glu)

    def first(*arguments: Any) -> Tensor:
        inside.set()
        begun.wait(0.3)
        return glu_of(*arguments)

    def second(*arguments: Any) -> Tensor:
        begun.set()
        ended.wait(0.3)
        return glu_of(*arguments)

    def plan(implementation: Any) -> None:
        looks = _replay.looks_of((torch.ones(4, 8), None, "silu"))
        plans[implementation] = _replay._plan(implementation, looks, torch.device("cpu"))

    # For all threads at once: each would leave behind what the other had asked for.
    with _library.implementation("triton"):
        plan(glu_of)  # imports what is needed
        threads = [threading.Thread(target=plan, args=(each,)) for each in (first, second)]
        threads[0].start()
        inside.wait(30)
        threads[1].start()
        threads[0].join()
        ended.set()
        threads[1].join()
        x = torch.randn(4, 8)
        for each in (first, second):
            assert torch.equal(plans[each]((x, None, "silu")), glu_of(x, None, "silu"))
