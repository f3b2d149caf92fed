"""Lists that are measured and updated row by row, against plain operators on each tensor."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from apex.ops import implementation
from apex.ops.multi_tensor import rules
from apex.ops.multi_tensor.rows import TritonRowLists, make_row_lists, row_count, rows_are_stretches
from apex.ops.multi_tensor.rule import Rule
from tests.support.harness import Route, routes


def _sums(values, whole, scalars, FLAGS):  # without annotations, which Triton would read
    p, g, a, b, c = values
    return (p + whole[0] * g + whole[1], g, a, b, c), (p * g, p * p, g * g, p + g)


RULE = Rule(_sums, reads=(0, 1), writes=(0,), scalars=lambda: (), quantities=4)
SHAPES = ((2, 70), (3, 2, 4), (5,), (1, 3), (2, 0), (0,), ())


def make(shapes: Sequence[tuple[int, ...]], device: str) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(shape, generator=generator).to(device) for shape in shapes] for _ in range(2)]


def as_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(row_count(tensor), -1) if tensor.numel() else tensor.reshape(0, 1)


@pytest.mark.parametrize("route", routes())
def test_rows_are_measured_and_get_their_own_numbers(route: Route) -> None:
    params, grads = make(SHAPES, route.device)
    exact = [(as_rows(p.double().cpu()), as_rows(g.double().cpu())) for p, g in zip(params, grads, strict=True)]
    sums = torch.cat([torch.stack([x.sum(1) for x in (p * g, p * p, g * g, p + g)], 1) for p, g in exact])
    whole = torch.randn(len(sums), 2)
    with implementation(route.implementation):
        lists = make_row_lists([params, grads, None, None, None])
        assert isinstance(lists, TritonRowLists) == (route.implementation == "triton")
        found = lists.apply(RULE, {}, whole=whole.to(route.device))
    torch.testing.assert_close(found.cpu().double(), sums, rtol=1e-5, atol=1e-5)
    owner = torch.tensor([index for index, (p, _) in enumerate(exact) for _ in range(len(p))])
    for index, (p, g) in enumerate(exact):
        numbers = whole[owner == index].double()
        expected = p + numbers[:, :1] * g + numbers[:, 1:]
        torch.testing.assert_close(as_rows(params[index]).cpu().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("route", routes())
def test_totals_and_averages_of_rows(route: Route) -> None:
    """Also where every row has a program of its own, whose sum is not yet what is asked for."""
    params, grads = make(((3, 5), (2,)), route.device)
    rows = [row for grad in grads for row in as_rows(grad.double().cpu())]
    norms = torch.stack([row.norm() for row in rows])
    with implementation(route.implementation):
        lists = make_row_lists([params, grads, None, None, None])
        total = lists.measured_total(rules.SQUARE_SUM, {}, root=True)
        norm, factor = lists.measured_clip(rules.SQUARE_SUM, 0.5, 0.0)
        averages = torch.ones(len(rows), 1, device=route.device)
        lists.measured_average(rules.SQUARE_SUM, averages, 0.25)
    for found, exact in ((total, norms.norm()), (norm, norms.norm()), (factor, 0.5 / norms.norm())):
        torch.testing.assert_close(found.cpu().double(), exact.reshape(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(averages.cpu().double()[:, 0], 0.75 + 0.25 * norms**2, rtol=1e-5, atol=0)


@pytest.mark.parametrize("route", routes())
def test_lists_follow_tensors_that_move(route: Route) -> None:
    params, grads = make(((3, 5), (2,)), route.device)
    with implementation(route.implementation):
        lists = make_row_lists([params, grads, None, None, None])
        whole = torch.ones(4, 2, device=route.device)
        lists.apply(RULE, {}, whole=whole)
        # At odd offsets, so that nothing is aligned any more.
        moved = [[torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape) for t in ts] for ts in (params, grads)]
        expected = [p + g + 1 for p, g in zip(*moved, strict=True)]
        lists.point_to([*moved, None, None, None])
        lists.apply(RULE, {}, whole=whole)
    for p, e in zip(moved[0], expected, strict=True):
        torch.testing.assert_close(p, e)


def test_what_a_row_is() -> None:
    assert [row_count(torch.zeros(shape)) for shape in ((3, 2), (5,), (), (0, 3), (3, 0), (4, 1, 1))] == [
        3,
        1,
        1,
        0,
        0,
        4,
    ]
    image = torch.zeros(2, 3, 4, 5)
    assert rows_are_stretches(image)
    assert rows_are_stretches(image.contiguous(memory_format=torch.channels_last))
    assert rows_are_stretches(torch.zeros(1, 3).t().t())
    assert not rows_are_stretches(torch.zeros(4, 3).t())
    assert not rows_are_stretches(torch.zeros(4, 6)[:, ::2])
    assert not rows_are_stretches(torch.zeros(6)[::2])
