"""Dropout after softmax: what is dropped, how often, and that both passes agree on it."""

import pytest
import torch
from torch import Tensor

from apex.ops import _library, softmax
from apex.ops.softmax import SoftmaxSpec, reference
from tests.support.harness import Route, assert_close, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")

MASKS = {"none": None, "causal": None, "bool": (2, 1, 1, 40), "added": (3, 2, 40)}


def given_mask(kind: str, device: str) -> Tensor | None:
    shape = MASKS[kind]
    if shape is None:
        return None
    return torch.rand(shape, device=device) < 0.3 if kind == "bool" else torch.randn(shape, device=device)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_reference(route: Route, kind: str, dtype: torch.dtype) -> None:
    x, dy = (torch.randn(2, 3, 2, 40, device=route.device).to(dtype) for _ in range(2))
    mask = given_mask(kind, route.device)
    spec = SoftmaxSpec(0.5, kind == "causal", 0.3)
    with _library.implementation(route.implementation):
        noise = softmax.draw_noise(x, spec)
        output, probabilities = softmax.softmax_forward(x, mask, spec, noise)
        dx = softmax.softmax_backward(dy, probabilities, spec, noise)
        keep = softmax.keep_mask(noise, probabilities, spec)
        from_mask = softmax.softmax_forward(x, mask, spec, keep)
        dx_from_mask = softmax.softmax_backward(dy, probabilities, spec, keep)
    assert keep.dtype == torch.uint8
    assert set(keep.unique().tolist()) == {0, 1}
    expected, expected_probabilities = reference.forward(x.double(), mask, keep, *spec)
    assert_close(output, expected, what="output")
    assert_close(probabilities, expected_probabilities, what="probabilities")
    assert_close(dx, reference.backward(dy.double(), probabilities.double(), keep, *spec), what="dx")
    # Not to the bit: a compiler may join other operations to one where the mask is read than where it is drawn.
    assert_close(from_mask[0], output.double(), what="output from a mask")
    assert_close(dx_from_mask, dx.double(), what="dx from a mask")


@pytest.mark.parametrize("route", routes())
def test_rows_in_chunks(route: Route) -> None:
    x, dy = (torch.randn(1, 2, 8208, device=route.device) for _ in range(2))
    spec = SoftmaxSpec(0.5, True, 0.3)
    with _library.implementation(route.implementation):
        noise = softmax.draw_noise(x, spec)
        output, probabilities = softmax.softmax_forward(x, None, spec, noise)
        dx = softmax.softmax_backward(dy, probabilities, spec, noise)
        keep = softmax.keep_mask(noise, probabilities, spec)
    assert_close(output, reference.forward(x.double(), None, keep, *spec)[0])
    assert_close(dx, reference.backward(dy.double(), probabilities.double(), keep, *spec))
    assert abs(float(keep.double().mean()) - 0.7) < 5 * (0.3 * 0.7 / keep.numel()) ** 0.5


@pytest.mark.parametrize("route", routes())
def test_any_byte_but_zero_keeps(route: Route) -> None:
    x, dy = (torch.randn(3, 4, device=route.device) for _ in range(2))
    spec = SoftmaxSpec(dropout=0.5)
    keep = torch.tensor([0, 1, 3, 255], dtype=torch.uint8, device=route.device).expand(3, 4)
    results = []
    with _library.implementation(route.implementation):
        for noise in (keep, keep != 0):
            output, probabilities = softmax.softmax_forward(x, None, spec, noise)
            results.append((output, softmax.softmax_backward(dy, probabilities, spec, noise)))
    assert all(map(torch.equal, *results))
    assert_close(results[0][0], reference.forward(x.double(), None, keep, *spec)[0])


def philox(seed: int, counter: list[int]) -> list[int]:
    """Philox4x32-10 in Python's integers."""
    word = 0xFFFFFFFF
    key = [seed & word, seed >> 32 & word]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [b >> 32 ^ counter[1] ^ key[0], b & word, a >> 32 ^ counter[3] ^ key[1], a & word]
        key = [(key[0] + 0x9E3779B9) & word, (key[1] + 0xBB67AE85) & word]
    return counter


def uniform(bits: int) -> float:
    """A number in [0, 1) from 32 bits, as Triton makes it."""
    signed = bits - (1 << 32) if bits >= 1 << 31 else bits
    return (-signed - 1 if signed < 0 else signed) * 4.6566127342e-10


@pytest.mark.parametrize("route", [r for r in routes() if r.values[0].implementation == "triton"])
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 100), (2, 16400)], ids=str)
def test_a_seed_means_the_same_for_every_shape_and_launch(route: Route, shape: tuple[int, ...]) -> None:
    """Element (row, key) gets word key % 4 of the Philox block that (key // 4, row) counts."""
    seed, probability = 0x1234_5678_9ABC_DEF0, 0.5
    x = torch.randn(shape, device=route.device)
    spec = SoftmaxSpec(dropout=probability)
    noise = torch.tensor([seed], device=route.device)
    with _library.implementation("triton"):
        keep = softmax.keep_mask(noise, x, spec).reshape(-1, shape[-1])
    for row in range(0, keep.shape[0], 2):
        for key in {0, 1, 2, 3, 5, shape[-1] // 2, shape[-1] - 1}:
            bits = philox(seed, [key // 4, row, 0, 0])[key % 4]
            assert keep[row, key] == (uniform(bits) >= probability)


@pytest.mark.parametrize("route", routes())
def test_reproducible_from_the_generator(route: Route) -> None:
    x = torch.randn(4, 300, device=route.device, requires_grad=True)

    def run() -> list[Tensor]:
        output = softmax.masked_softmax(x, dropout=0.5)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), x)]

    with _library.implementation(route.implementation):
        torch.manual_seed(5)
        first, second = run(), run()
        torch.manual_seed(5)
        again = run()
        torch.manual_seed(6)
        other = run()
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("route", routes())
def test_nothing_or_everything_is_dropped(route: Route) -> None:
    x = torch.randn(4, 30, device=route.device, requires_grad=True)
    with _library.implementation(route.implementation):
        state = torch.get_rng_state() if route.device == "cpu" else torch.cuda.get_rng_state()
        plain = softmax.masked_softmax(x, causal=True, dropout=0.0)
        now = torch.get_rng_state() if route.device == "cpu" else torch.cuda.get_rng_state()
        assert torch.equal(state, now)
        assert_close(plain, reference.forward(x.detach().double(), None, None, *SoftmaxSpec(causal=True))[0])
        nothing = softmax.masked_softmax(x, causal=True, dropout=1.0)
        (dx,) = torch.autograd.grad(nothing.sum(), x)
    assert not nothing.any()
    assert not dx.any()


@pytest.mark.gpu
def test_cuda_graph_draws_anew_at_every_replay() -> None:
    x = torch.randn(64, 1024, device="cuda", requires_grad=True)
    with _library.implementation("triton"):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # compile before capture
            torch.autograd.grad(softmax.masked_softmax(x, dropout=0.5).sum(), x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = softmax.masked_softmax(x, dropout=0.5)
            (dx,) = torch.autograd.grad(output.sum(), x)
        results = []
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize()
            results.append((output.detach().clone(), dx.clone()))
    assert not torch.equal(results[0][0], results[1][0])
    plain = torch.softmax(x.detach(), -1)
    for dropped, gradient in results:
        keep = dropped != 0
        assert_close(dropped, plain.double() * keep * 2)
        spec = SoftmaxSpec(dropout=0.5)
        assert_close(gradient, reference.backward(torch.ones_like(plain).double(), plain.double(), keep, *spec))
