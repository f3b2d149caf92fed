"""Rotary position embeddings against the plain formula in float64, by every route, with memory full of NaN."""

import pytest
import torch
from torch import Tensor

from apex.ops import _library, rope
from apex.ops.rope import RopeSpec, reference
from tests.ops.rope.cases import CASES, RopeCase, plain
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def exact(case: RopeCase, t: Tensor, dy: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Output and gradient in float64."""
    wide = t.detach().double().cpu().requires_grad_()
    output = plain(wide, [table.double().cpu() for table in tables], case.spec, case.edges)
    return output, torch.autograd.grad(output, wide, dy.double().cpu())[0]


def run(case: RopeCase, t: Tensor, dy: Tensor, tables: tuple[Tensor, ...], edges: Tensor | None) -> list[Tensor]:
    leaf = t.detach().requires_grad_()
    output = rope.rotate(leaf, tables, case.spec, edges)
    return [output.detach(), *torch.autograd.grad(output, leaf, dy)]


def check(case: RopeCase, route: Route) -> None:
    t, dy, tables, edges = case.tensors(route.device)
    before = t.clone()
    expected = exact(case, t, dy, tables)
    with _library.implementation(route.implementation):
        results = run(case, t, dy, tables, edges)
        again = run(case, t, dy, tables, edges)
    for name, actual, wanted in zip(("output", "gradient"), results, expected, strict=True):
        assert actual.dtype == case.dtype
        assert_close(actual, wanted, what=name)
    assert torch.equal(t, before)
    assert_equal_bits(results, again)
    swapped = results[0].transpose(0, 1) if case.spec.swap_memory else results[0]
    assert swapped.is_contiguous()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_plain_formula(case: RopeCase, route: Route) -> None:
    check(case, route)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_matches_the_plain_formula(case: RopeCase) -> None:
    t, dy, tables, edges = case.tensors("cpu")
    wide = t.double(), [table.double() for table in tables]
    output = reference.rotate(*wide, case.spec, edges)
    transposed = case.spec._replace(inverse=True, pairs=reference.TRANSPOSED_PAIRS[case.spec.pairs])
    gradient = reference.rotate(dy.double(), wide[1], transposed, edges)
    for actual, wanted in zip((output, gradient), exact(case, t, dy, tables), strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pair_is_two_rotations(route: Route, dtype: torch.dtype) -> None:
    query, key = (torch.randn(6, 2, heads, 24, device=route.device).to(dtype).requires_grad_() for heads in (8, 3))
    freqs = torch.rand(6, 1, 1, 16, device=route.device) * 9
    for arguments in ({}, {"transpose_output_memory": True}, {"tensor_format": "bshd"}):
        swap = "tensor_format" in arguments
        tensors = [t.transpose(0, 1) if swap else t for t in (query, key)]
        with _library.implementation(route.implementation):
            pair = rope.rotary_embedding_pair(*tensors, freqs, **arguments)
            apart = [rope.rotary_embedding(t, freqs, **arguments) for t in tensors]
            loss, loss_apart = (sum(t.float().square().sum() for t in ts) for ts in (pair, apart))
            gradients = torch.autograd.grad(loss, (query, key))
            gradients_apart = torch.autograd.grad(loss_apart, (query, key))
        assert_equal_bits(pair, apart)
        assert_equal_bits(gradients, gradients_apart)
        assert [t.stride() for t in pair] == [t.stride() for t in apart]


@pytest.mark.parametrize("route", routes())
def test_a_pair_that_differs_in_more_than_heads(route: Route) -> None:
    query, key = torch.randn(5, 2, 3, 12, device=route.device), torch.randn(5, 2, 3, 8, device=route.device).half()
    freqs = torch.rand(5, 8, device=route.device)
    with _library.implementation(route.implementation):
        outputs = rope.rotary_embedding_pair(query, key, freqs)
        assert_equal_bits(outputs, [rope.rotary_embedding(t, freqs) for t in (query, key)])
        outputs = rope.rotary_embedding_pair(query.half(), key, freqs)
        assert_equal_bits(outputs, [rope.rotary_embedding(t, freqs) for t in (query.half(), key)])


@pytest.mark.parametrize("route", routes())
def test_empty_packed_and_image(route: Route) -> None:
    edges = torch.zeros(3, dtype=torch.int32, device=route.device)
    table = torch.rand(1, 4, 1, 4, device=route.device)
    with _library.implementation(route.implementation):
        packed = rope.rotary_embedding(torch.empty(0, 2, 8, device=route.device), table.reshape(4, 4), cu_seqlens=edges)
        image = rope.rotate(torch.empty(2, 0, 2, 8, device=route.device), (table,) * 4, RopeSpec("image"))
    assert packed.shape == (0, 2, 8)
    assert image.shape == (2, 0, 2, 8)


@pytest.mark.parametrize("route", routes())
def test_slices_of_a_projection_are_not_copied(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query and key as slices of one tensor, and a gradient that is one number, seen everywhere."""
    projected = torch.randn(6, 2, 4, 3 * 16, device=route.device)
    query = projected[..., 16:32]
    freqs = torch.rand(6, 1, 1, 16, device=route.device)
    expected = plain(query.double().cpu(), (freqs.double().cpu(),), RopeSpec("sbhd"))
    with _library.implementation(route.implementation):
        if route.implementation == "triton":
            monkeypatch.setattr(Tensor, "contiguous", lambda *_: pytest.fail("copied"))
        leaf = query.detach().requires_grad_()
        output = rope.rotary_embedding(leaf, freqs)
        (gradient,) = torch.autograd.grad(output.sum() * 2, leaf)
        monkeypatch.undo()
    assert_close(output, expected)
    wide = query.double().cpu().requires_grad_()
    (wanted,) = torch.autograd.grad(plain(wide, (freqs.double().cpu(),), RopeSpec("sbhd")).sum() * 2, wide)
    assert_close(gradient, wanted)


@pytest.mark.parametrize("route", routes())
def test_strided_tables(route: Route) -> None:
    t = torch.randn(5, 2, 3, 16, device=route.device)
    freqs = torch.rand(16, 10, device=route.device).T[::2]
    edges = torch.tensor([0, 9, 3, 9, 5], dtype=torch.int64, device=route.device)[::2]
    with _library.implementation(route.implementation):
        assert_equal_bits([rope.rotary_embedding(t, freqs)], [rope.rotary_embedding(t, freqs.contiguous())])
        packed = rope.rotary_embedding(t[:, 0], freqs, cu_seqlens=edges)
    wide = t[:, 0].double().cpu(), (freqs.double().cpu()[:, None, None],)
    assert_close(packed, plain(*wide, RopeSpec("thd"), (0, 3, 5)))


@pytest.mark.parametrize("route", routes())
def test_large_angles(route: Route) -> None:
    """Positions of a million tokens: the angle itself is exact in float32, its reduction must not lose it."""
    t = torch.randn(4, 1, 2, 16, device=route.device)
    freqs = (torch.arange(4) + 1_000_000.0)[:, None, None, None].expand(4, 1, 1, 16).contiguous().to(route.device)
    with _library.implementation(route.implementation):
        output = rope.rotary_embedding(t, freqs)
    assert_close(output, plain(t.double().cpu(), (freqs.double().cpu(),), RopeSpec("sbhd")))


@pytest.mark.parametrize("route", routes())
def test_a_sequence_longer_than_the_table(route: Route) -> None:
    t = torch.randn(9, 2, 16, device=route.device)
    freqs = torch.rand(4, 1, 1, 16, device=route.device)
    edges = torch.tensor([0, 3, 9], dtype=torch.int32, device=route.device)
    with _library.implementation(route.implementation):
        if route.device == "cpu" and route.implementation == "torch":
            with pytest.raises(ValueError, match="a sequence of 6 tokens, the table of angles has 4 positions"):
                rope.rotary_embedding(t, freqs, cu_seqlens=edges)
            return
        output = rope.rotary_embedding(t, freqs, cu_seqlens=edges).cpu()
    assert output[7:].isnan().all()
    assert_close(output[:7], plain(t.double().cpu()[:7], (freqs.double().cpu(),), RopeSpec("thd"), (0, 3, 7)))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("edges", [[0, 6, 3, 9], [-2, 4, 9], [-(2**31), 9], [0, 5, -(2**31), 9]], ids=str)
def test_edges_that_fall_or_begin_below_zero(edges: list[int], dtype: torch.dtype, route: Route) -> None:
    """Refused on a CPU. Elsewhere nothing outside of the table is read, which is NaN all around."""
    memory = torch.full((3, 9, 1, 1, 8), torch.nan, device=route.device)
    freqs = memory[1].uniform_()
    t = torch.randn(9, 2, 8, device=route.device)
    given = torch.tensor(edges, dtype=dtype, device=route.device)
    with _library.implementation(route.implementation):
        if route == Route("cpu", "torch"):
            for each in (t, t.half(), t.clone().requires_grad_()):
                with pytest.raises(ValueError, match=r"cu_seqlens=\[.*\] must grow from zero or more"):
                    rope.rotary_embedding(each, freqs, cu_seqlens=given)
            return
        output = rope.rotary_embedding(t, freqs, cu_seqlens=given)
    assert output.shape == t.shape
    if edges[0] < 0:
        assert output[:4].isnan().all()


@pytest.mark.gpu
def test_packed_sequences_do_not_wait_for_the_device() -> None:
    t = torch.randn(64, 4, 32, device="cuda", requires_grad=True)
    freqs, edges = torch.rand(64, 1, 1, 32, device="cuda"), torch.tensor([0, 20, 64], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(rope.rotary_embedding(t, freqs, cu_seqlens=edges), t, t)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    t = torch.randn(8200, 8, 256, 128, device="cuda", dtype=torch.bfloat16)
    assert t.numel() > 1 << 31
    freqs = torch.rand(8200, 1, 1, 128, device="cuda")
    last = slice(8198, 8200)
    exact_freqs = (freqs[last].double().cpu(),)
    for swap in (False, True):
        output = rope.rotary_embedding(t, freqs, transpose_output_memory=swap)
        assert_close(output[last], plain(t[last].double().cpu(), exact_freqs, RopeSpec("sbhd")))
    output = rope.rotary_embedding(t.view(8, 8200, 256, 128), freqs, tensor_format="bshd")
    wanted = plain(t.view(8, 8200, 256, 128)[:, last].double().cpu(), exact_freqs, RopeSpec("bshd"))
    assert_close(output[:, last], wanted)
    del output
    # Channels far apart: their offsets alone exceed 32 bits.
    strided = t.view(128, 8200, 8, 256).permute(1, 2, 3, 0)
    output = rope.rotary_embedding(strided, freqs)
    assert_close(output[last], plain(strided[last].double().cpu(), exact_freqs, RopeSpec("sbhd")))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_lies_outside_of_sequences_is_copied_as_it_is(route: Route, dtype: torch.dtype) -> None:
    """Infinity and NaN do not spread to the channels that they would be rotated with."""
    tokens = 11
    t = torch.randn(tokens, 4, 16, device=route.device).to(dtype)
    for row, value in ((0, torch.nan), (1, torch.inf), (tokens - 2, -torch.inf), (tokens - 1, torch.nan)):
        t[row, :, 3] = value
    edges = torch.tensor([2, 6, tokens - 2], dtype=torch.int32, device=route.device)
    freqs = torch.rand(tokens, 1, 1, 16, device=route.device)
    leaf = t.clone().requires_grad_()
    with _library.implementation(route.implementation):
        output = rope.rotary_embedding(leaf, freqs, cu_seqlens=edges)
        (gradient,) = torch.autograd.grad(output, leaf, t)
    for result in (output, gradient):
        assert torch.equal(result[[0, 1, -2, -1]].nan_to_num(7), t[[0, 1, -2, -1]].nan_to_num(7))
        assert result[2:-2].isfinite().all()
        assert not torch.equal(result[3:-2], t[3:-2])
