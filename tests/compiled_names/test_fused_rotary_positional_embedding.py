"""fused_rotary_positional_embedding, called as upstream's Python code calls it."""

import pytest
import torch

import fused_rotary_positional_embedding as compiled
from apex.ops import _library
from apex.ops.rope import RopeSpec
from tests.ops.rope.cases import plain
from tests.support.harness import Route, assert_close, routes


def check(
    forward, backward, t: torch.Tensor, tables: list, spec: RopeSpec, edges: tuple[int, ...] | None = None
) -> None:
    """`forward` and `backward` of a flat tensor against the plain formula and its derivative."""
    wide = t.detach().double().cpu().requires_grad_()
    expected = plain(wide, [table.double().cpu() for table in tables], spec, edges)
    dy = torch.randn_like(t)
    output, gradient = forward(t), backward(dy)
    assert_close(output, expected)
    assert_close(gradient, torch.autograd.grad(expected, wide, dy.double().cpu())[0])
    for result in (output, gradient):
        assert (result.transpose(0, 1) if spec.swap_memory else result).is_contiguous()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("transpose", [False, True])
def test_sequences(route: Route, transpose: bool) -> None:
    t = torch.randn(6, 3, 4, 16, device=route.device)
    freqs = torch.rand(6, 1, 1, 12, device=route.device) * 20
    cached = freqs.cos(), freqs.sin()
    spec = RopeSpec("sbhd", transpose)
    with _library.implementation(route.implementation):
        check(
            lambda t: compiled.forward(t, freqs, transpose),
            lambda dy: compiled.backward(dy, freqs, transpose),
            t,
            [freqs],
            spec,
        )
        check(
            lambda t: compiled.forward_cached(t, *cached, transpose),
            lambda dy: compiled.backward_cached(dy, *cached, transpose),
            t,
            list(cached),
            spec,
        )


@pytest.mark.parametrize("route", routes())
def test_packed_sequences(route: Route) -> None:
    t = torch.randn(10, 4, 16, device=route.device)
    freqs = torch.rand(10, 1, 1, 16, device=route.device) * 20
    edges = torch.tensor([0, 4, 10], dtype=torch.int32, device=route.device)
    with _library.implementation(route.implementation):
        check(
            lambda t: compiled.forward_thd(t, edges, freqs),
            lambda dy: compiled.backward_thd(dy, edges, freqs),
            t,
            [freqs],
            RopeSpec("thd"),
            (0, 4, 10),
        )


@pytest.mark.parametrize("route", routes())
def test_images(route: Route) -> None:
    t = torch.randn(2, 15, 3, 16, device=route.device)
    angles = [torch.rand(1, n, 1, 8, device=route.device) for n in (3, 7)]
    tables = [table for angle in angles for table in (angle.cos(), angle.sin())]
    with _library.implementation(route.implementation):
        check(
            lambda t: compiled.forward_2d(t.unflatten(1, (3, 5)), *tables),
            lambda dy: compiled.backward_2d(dy.unflatten(1, (3, 5)), *tables),
            t,
            tables,
            RopeSpec("image", width=5),
        )
        # Rows that do not follow each other in memory.
        image = torch.randn(2, 5, 3, 3, 16, device=route.device).transpose(1, 2)
        output = compiled.forward_2d(image, *tables)
        assert torch.equal(output, compiled.forward_2d(image.contiguous(), *tables))
    with pytest.raises(ValueError, match=r"expected .b, img_h, img_w, h, d"):
        compiled.forward_2d(t, *tables)
