"""Derivatives, memory layouts of gradients, checkpointing, autocast, errors, launch rules."""

import functools
import itertools
import warnings

import pytest
import torch

from apex.ops import _device, _library, rope
from apex.ops.rope import RopeSpec, config
from tests.support.harness import Route, assert_close, routes


@pytest.mark.parametrize("route", routes())
def test_derivatives_of_derivatives(route: Route) -> None:
    t = torch.randn(5, 2, 2, 8, device=route.device, requires_grad=True)
    freqs = torch.rand(5, 1, 1, 8, device=route.device)

    def third(function, t):
        (first,) = torch.autograd.grad(function(t).pow(3).sum(), t, create_graph=True)
        return torch.autograd.grad(first.square().sum(), t)[0]

    with _library.implementation(route.implementation):
        actual = third(lambda t: rope.rotary_embedding(t, freqs), t)
    wide = t.detach().double().requires_grad_()
    with _library.implementation("torch"):
        expected = third(lambda t: rope.rotary_embedding(t, freqs.double()), wide)
    assert_close(actual, expected, reduction=100)


@pytest.mark.parametrize("route", routes())
def test_a_gradient_lies_in_memory_as_the_input_does(route: Route) -> None:
    freqs = torch.rand(6, 1, 1, 8, device=route.device)
    plain_memory = torch.randn(6, 3, 2, 8, device=route.device)
    swapped_memory = torch.randn(3, 6, 2, 8, device=route.device).transpose(0, 1)
    with _library.implementation(route.implementation):
        for t, swap in itertools.product((plain_memory, swapped_memory), (False, True)):
            leaf = t.detach().requires_grad_()
            output = rope.rotary_embedding(leaf, freqs, transpose_output_memory=swap)
            (gradient,) = torch.autograd.grad(output.square().sum(), leaf)
            assert gradient.stride() == t.stride()
            assert output.transpose(0, 1).is_contiguous() == swap


@pytest.mark.parametrize("route", routes())
def test_autocast_changes_nothing(route: Route) -> None:
    freqs = torch.rand(4, 1, 1, 8, device=route.device)
    for dtype in (torch.float32, torch.bfloat16):
        t = torch.randn(4, 2, 2, 8, device=route.device).to(dtype).requires_grad_()
        with _library.implementation(route.implementation):
            expected = rope.rotary_embedding(t, freqs)
            with torch.autocast(route.device, torch.bfloat16):
                output = rope.rotary_embedding(t, freqs)
        assert output.dtype == dtype
        assert torch.equal(output, expected)


def test_the_input_is_not_kept() -> None:
    """Only the angles are needed to go back."""
    kept: list[int] = []
    source = torch.randn(64, 8, 16, 32, requires_grad=True) * 1
    freqs = torch.rand(64, 1, 1, 32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        rope.rotary_embedding(source, freqs)
    assert kept == [freqs.data_ptr()]


def test_frequencies_that_want_a_gradient_are_warned_of() -> None:
    t = torch.randn(4, 2, 2, 8, requires_grad=True)
    freqs = torch.rand(4, 1, 1, 8, requires_grad=True)
    for function in (rope.rotary_embedding, lambda t, freqs: rope.rotary_embedding_pair(t, t, freqs)[0]):
        with pytest.warns(UserWarning, match="no gradient to their frequencies"):
            output = function(t, freqs)
        assert torch.autograd.grad(output.sum(), (t, freqs), allow_unused=True)[1] is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rope.rotary_embedding(t, freqs.detach())


def test_frequencies_that_want_a_gradient_do_not_make_a_graph() -> None:
    t, freqs = torch.randn(4, 4, 4, 8), torch.rand(4, 1, 1, 8, requires_grad=True)
    outputs = [rope.rotary_embedding(t, freqs), *rope.rotary_embedding_pair(t, t, freqs)]
    outputs.append(rope.rotate_now(t.clone().requires_grad_(), (freqs,), RopeSpec("sbhd")))
    expected = rope.rotary_embedding(t, freqs.detach())
    for output in outputs:
        assert not output.requires_grad
        assert torch.equal(output, expected)


def test_double_precision_by_single_precision_angles() -> None:
    t = torch.randn(4, 4, 4, 8, dtype=torch.float64, requires_grad=True)
    freqs = torch.rand(4, 1, 1, 8) * 50
    output, expected = rope.rotary_embedding(t, freqs), rope.rotary_embedding(t, freqs.double())
    assert torch.equal(output, expected)
    assert torch.equal(*(torch.autograd.grad(y.square().sum(), t)[0] for y in (output, expected)))


def test_tracing_records_operators() -> None:
    freqs = torch.rand(4, 1, 1, 8)
    example, other = torch.randn(2, 4, 2, 2, 8)
    traced = torch.jit.trace(lambda t: rope.rotary_embedding(t, freqs), example)
    assert_close(traced(other), rope.rotary_embedding(other.double(), freqs.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_function_transforms_see_operators(dtype: torch.dtype) -> None:
    t, direction = torch.randn(2, 4, 2, 2, 8).to(dtype)
    freqs = torch.rand(4, 1, 1, 8)
    wide, exact = direction.double(), freqs.double()
    leaf = wide.clone().requires_grad_()
    (expected,) = torch.autograd.grad(rope.rotary_embedding(leaf, exact).sum(), leaf)
    assert_close(torch.func.grad(lambda t: rope.rotary_embedding(t, freqs).sum())(t), expected)
    expected = rope.rotary_embedding(wide, exact)
    both = torch.stack((t, direction))
    for embed in (rope.rotary_embedding, lambda t, freqs: rope.rotary_embedding_pair(t, t, freqs)[1]):
        function = functools.partial(embed, freqs=freqs)
        assert_close(torch.func.jvp(function, (t,), (direction,))[1], expected)
        assert_close(torch.func.vmap(function)(both)[1], expected)


T, FREQS = torch.randn(4, 2, 2, 8), torch.rand(4, 1, 1, 8)
EDGES = torch.tensor([0, 4])
IMAGE = (torch.rand(1, 2, 1, 4),) * 4


@pytest.mark.parametrize("implementation", ["torch", "triton"])
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: rope.rotary_embedding(T[0], FREQS), ValueError, r"t has shape \[2, 2, 8\], expected \[s, b, h, d\]"),
        (lambda: rope.rotary_embedding(T, FREQS.long()), TypeError, "freqs must be floating-point, got torch.int64"),
        (lambda: rope.rotary_embedding(T, FREQS[:3]), ValueError, "freqs has 3 positions, but t, .* has 4 tokens"),
        (lambda: rope.rotary_embedding(T, FREQS[0]), ValueError, "freqs has shape .* expected .positions, 1, 1"),
        (lambda: rope.rotary_embedding(T, torch.rand(4, 1, 1, 10)), ValueError, "rotates 10 channels, .* 2 to the 8"),
        (lambda: rope.rotary_embedding(T, torch.rand(4, 1, 1, 5)), ValueError, "rotates 5 channels, expected an even"),
        (lambda: rope.rotary_embedding(T, FREQS[..., :0]), ValueError, "freqs rotates 0 channels"),
        (lambda: rope.rotary_embedding(T, (FREQS, FREQS[:3])), ValueError, "cos_ has shape .*, sin_ has"),
        (lambda: rope.rotary_embedding(T, FREQS.to("meta")), ValueError, "freqs is on meta, t on cpu"),
        (
            lambda: rope.rotary_embedding(T, FREQS, tensor_format="bhsd"),
            ValueError,
            "tensor_format='bhsd' is not known",
        ),
        (lambda: rope.rotary_embedding(T, FREQS, cu_seqlens=EDGES), ValueError, r"expected \[t, h, d\]"),
        (
            lambda: rope.rotary_embedding(T[0], FREQS, cu_seqlens=EDGES.float()),
            TypeError,
            "int32 or int64, got torch.f",
        ),
        (
            lambda: rope.rotary_embedding(T[0], FREQS, cu_seqlens=EDGES[None]),
            ValueError,
            r"expected \[sequences \+ 1\]",
        ),
        (lambda: rope.rotary_embedding(T[0], FREQS, cu_seqlens=EDGES.to("meta")), ValueError, "cu_seqlens is on meta"),
        (
            lambda: rope.rotary_embedding(T[0], FREQS, cu_seqlens=EDGES, transpose_output_memory=True),
            ValueError,
            "transpose_output_memory=True is for",
        ),
        (lambda: rope.rotate(T[0], (FREQS,), RopeSpec("thd")), ValueError, "cu_seqlens is needed"),
        (lambda: rope.rotate(T, (FREQS,), RopeSpec("dhbs")), ValueError, "tensor_format='dhbs' is not known"),
        (lambda: rope.rotate(T, IMAGE, RopeSpec("image", width=3)), ValueError, "img_w=3 does not divide the 2 tokens"),
        (lambda: rope.rotate(T[..., :6], IMAGE, RopeSpec("image", width=1)), ValueError, "needs a multiple of 4"),
        (
            lambda: rope.rotate(T, (IMAGE[0][:, :1],) * 4, RopeSpec("image", width=2)),
            ValueError,
            "cos_w has 1 positions, the image needs 2",
        ),
        (
            lambda: rope.rotate(T, (IMAGE[0][..., :2],) * 4, RopeSpec("image", width=2)),
            ValueError,
            r"cos_h has shape .*, expected \[1, positions, 1, 4\]",
        ),
    ],
)
def test_bad_arguments(call, error: type[Exception], words: str, implementation: str) -> None:
    if implementation == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("kernels take no tensors on the CPU where there is a GPU")
    with _library.implementation(implementation), pytest.raises(error, match=words):
        call()


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"t must be floating-point, got torch\.int64"):
        rope.rotary_embedding(T.long(), FREQS)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("channels", [2, 64, 72, 128, 576, 65536])
def test_tiles(channels: int, itemsize: int) -> None:
    for tokens, heads in itertools.product((1, 5, 4096), (1, 2, 3, 7, 12, 24, 32, 71, 96, 512)):
        tile = config.tile(tokens, heads, channels, itemsize, False, _device.INTERPRETER)
        assert tile.tokens & (tile.tokens - 1) == 0
        assert tile.heads & (tile.heads - 1) == 0
        # Never more than a tile, nor twice what is there.
        row = config.next_power_of_2(channels) * itemsize
        assert tile.tokens * tile.heads * row <= max(config.TILE_BYTES, row)
        assert tile.heads < 2 * heads
        assert tile.tokens < 2 * tokens
        assert 1 <= tile.num_warps <= 32
