"""Cross-entropy of a linear layer's outputs: numbers, chunks, dtypes of sums, autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from apex.ops import _library
from apex.ops.xentropy import chunks, config, linear_cross_entropy, linear_log_probs, linear_token_loss
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ROWS, FEATURES, CLASSES = 7, 8, 37


def tensors(device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Input, weight, bias, labels with two ignored rows."""
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(shape, generator=generator) for shape in ((ROWS, FEATURES), (CLASSES, FEATURES), (CLASSES,)))
    labels = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    labels[3], labels[ROWS - 1] = -100, -100
    return *(v.to(dtype).to(device).requires_grad_() for v in values), labels.to(device)


def exact(input: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, slope: Tensor, **options) -> tuple:
    """Loss and gradients in float64, by way of all logits."""
    leaves = [t.detach().double().requires_grad_() for t in (input, weight, bias) if t is not None]
    loss = functional.cross_entropy(functional.linear(*leaves), labels, **options)
    return loss, torch.autograd.grad(loss, leaves, slope.double())


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str, factor: float = 1) -> None:
    """By the norm of the difference: logits and their gradients are rounded to the dtype on the way."""
    limit = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[dtype]
    error = (actual.detach().double() - expected).norm() / expected.double().norm().clamp(min=1e-30)
    assert error < factor * limit, f"{what} is off by {error:.2g}"


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(
    ("reduction", "dtype", "chunk_rows"),
    [
        ("mean", torch.float32, 3),
        ("sum", torch.float32, None),
        ("none", torch.float32, 3),
        ("mean", torch.bfloat16, 3),
        ("none", torch.bfloat16, None),
        ("mean", torch.float16, 3),
        ("none", torch.float16, 3),
    ],
)
def test_matches_linear_and_cross_entropy(
    route: Route, reduction: str, dtype: torch.dtype, chunk_rows: int | None
) -> None:
    input, weight, bias, labels = tensors(route.device, dtype)
    options = {"reduction": reduction, "label_smoothing": 0.1}

    def run() -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(input, weight, labels, bias, chunk_rows=chunk_rows, **options)
        return loss, *torch.autograd.grad(loss, (input, weight, bias), slope)

    slope = torch.rand(() if reduction != "none" else ROWS, device=route.device) + 0.5
    with _library.implementation(route.implementation):
        first, again = run(), run()
    loss, gradients = exact(input, weight, bias, labels, slope, **options)
    assert first[0].dtype == torch.float32
    assert_near(first[0], loss, dtype, "loss")
    for name, tensor, actual, expected in zip(
        ("input", "weight", "bias"), (input, weight, bias), first[1:], gradients, strict=True
    ):
        assert actual.dtype == tensor.dtype
        assert_near(actual, expected, dtype, f"the gradient of the {name}")
    assert_equal_bits(first, again)


@pytest.mark.parametrize("route", routes())
def test_a_retained_graph_gives_the_same_twice(route: Route) -> None:
    input, weight, _, labels = tensors(route.device, torch.float32)
    with _library.implementation(route.implementation):
        loss = linear_cross_entropy(input, weight, labels, chunk_rows=3)
        first = torch.autograd.grad(loss, (input, weight), retain_graph=True)
        kept = [g.clone() for g in first]
        again = torch.autograd.grad(loss, (input, weight), torch.full_like(loss, 3.0))
    assert_equal_bits(first, kept)
    for a, b in zip(again, first, strict=True):
        torch.testing.assert_close(a, 3 * b)


@pytest.mark.parametrize("route", routes())
def test_gradients_of_parameters_are_not_copied(route: Route) -> None:
    """The tensor that was summed into becomes `.grad`: its memory is needed once."""
    input, weight, _, labels = tensors(route.device, torch.float32)
    with _library.implementation(route.implementation):
        loss = linear_cross_entropy(input, weight, labels)
    address = loss.grad_fn.gradients[1].data_ptr()
    loss.backward()
    assert weight.grad.data_ptr() == address


@pytest.mark.parametrize("route", routes())
def test_without_gradients_none_are_computed(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    input, weight, _, labels = tensors(route.device, torch.float32)
    monkeypatch.setattr(chunks, "add_product", lambda *arguments, **options: pytest.fail("computed"))
    with _library.implementation(route.implementation), torch.no_grad():
        loss = linear_cross_entropy(input, weight, labels)
    assert loss.grad_fn is None
    assert_near(loss, exact(input, weight, None, labels, loss)[0], torch.float32, "loss")


@pytest.mark.parametrize("route", routes())
def test_all_rows_ignored(route: Route) -> None:
    """As `torch.nn.functional.cross_entropy`: no mean, but gradients of zero."""
    input, weight, bias, labels = tensors(route.device, torch.float32)
    with _library.implementation(route.implementation):
        loss = linear_cross_entropy(input, weight, torch.full_like(labels, 7), bias, ignore_index=7, reduction="sum")
        mean = linear_cross_entropy(input, weight, torch.full_like(labels, 7), bias, ignore_index=7)
    assert loss == 0
    assert mean.isnan()
    for reduced in (loss, mean):
        assert all(not g.any() for g in torch.autograd.grad(reduced, (input, weight, bias)))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(route: Route, dtype: torch.dtype) -> None:
    """Products in half precision; the gradients of float32 parameters are summed in float32."""
    input, weight, bias, labels = tensors(route.device, torch.float32)
    with _library.implementation(route.implementation), torch.autocast(route.device, dtype):
        loss = linear_cross_entropy(input, weight, labels, bias, chunk_rows=3)
        half = linear_cross_entropy(input.detach().to(dtype), weight, labels, bias, chunk_rows=3)
    gradients = torch.autograd.grad(loss, (input, weight, bias))
    expected, wanted = exact(input, weight, bias, labels, torch.ones_like(loss))
    assert loss.dtype == torch.float32
    assert torch.equal(loss, half)
    assert_near(loss, expected, dtype, "loss")
    for actual, gradient in zip(gradients, wanted, strict=True):
        assert actual.dtype == torch.float32
        assert_near(actual, gradient, dtype, "a gradient")


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_small_factors_survive_float16(route: Route) -> None:
    """The mean over 1000 rows of a softmax over 1000 classes has two digits left in float16; scaled, it has three."""
    input = torch.full((1000, 1), 0.5, device=route.device, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(1000, 1, device=route.device, dtype=torch.float16, requires_grad=True)
    labels = torch.zeros(1000, device=route.device).long()
    scale = 65536.0
    with _library.implementation(route.implementation):
        loss = linear_cross_entropy(input, weight, labels, chunk_rows=300)
        (gradient,) = torch.autograd.grad(loss * scale, weight)
    assert_close(gradient[1:], torch.full((999, 1), 0.5e-3 * scale, dtype=torch.float64))


def test_many_chunks_of_bfloat16_are_summed_in_float32() -> None:
    """Equal parts vanish one after the other in a bfloat16 sum that has grown to 256 times their size."""
    rows = 512
    input = torch.ones(rows, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(rows).long()
    expected = torch.tensor([[-0.5 * rows], [0.5 * rows]])
    for asked, right in ((None, True), (torch.float32, True), (torch.bfloat16, False)):
        options = {"reduction": "sum", "chunk_rows": 1, "accumulation_dtype": asked}
        (gradient,) = torch.autograd.grad(linear_cross_entropy(input, weight, labels, **options), weight)
        assert gradient.dtype == torch.bfloat16
        assert torch.equal(gradient.float(), expected) == right


@pytest.mark.parametrize(
    ("rows", "classes", "asked", "size"),
    [
        (8192, 131072, None, 2048),
        (8191, 131072, None, 2048),
        (1100, 131072, None, 576),
        (768, 131072, None, 768),
        (16384, 131072, None, 2048),
        (1 << 20, 131072, None, 2048),
        (16384, 32000, None, 8192),
        (8192, 50304, None, 4096),
        (4096, 50304, None, 2048),
        (100, 1000, None, 100),
        (100, 1000, 7, 7),
        (100, 1000, 700, 100),
        (0, 1000, None, 1),
        (10, 1 << 28, None, 1),
    ],
)
def test_chunk_size(rows: int, classes: int, asked: int | None, size: int) -> None:
    found = config.chunk_size(rows, classes, asked)
    assert found == size
    assert asked is not None or found == 1 or found * classes <= config.CHUNK_ELEMENTS[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_parts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs take them where classes do not fill 16 bytes."""
    *leaves, labels = tensors("cpu", dtype)
    slope = torch.tensor(1.5)
    expected_loss, expected = exact(*leaves, labels, slope)
    monkeypatch.setattr(config, "parts_of_products", lambda *_: [slice(0, 32), slice(32, 37)])
    loss = linear_cross_entropy(*leaves[:2], labels, leaves[2], chunk_rows=3)
    assert_near(loss, expected_loss, dtype, "loss")
    gradients = torch.autograd.grad(loss, leaves, slope)
    for name, actual, wanted in zip(("input", "weight", "bias"), gradients, expected, strict=True):
        assert_near(actual, wanted, dtype, name)


@pytest.mark.parametrize(("classes", "parts"), [(50257, [50256, 1]), (50256, [50256]), (5, [5]), (0, [0])])
def test_classes_that_products_take_at_a_time(classes: int, parts: list[int]) -> None:
    found = config.parts_of_products(classes, torch.bfloat16, on_gpu=True)
    assert [part.stop - part.start for part in found] == parts
    assert sum(parts) == classes


def test_logits_are_never_all_there() -> None:
    input, labels = torch.randn(40, FEATURES, requires_grad=True), torch.zeros(40).long()
    weight, bias = torch.randn(CLASSES, FEATURES, requires_grad=True), torch.randn(CLASSES, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            found = function(*args, **(kwargs or {}))
            if isinstance(found, Tensor):
                largest = max(largest, found.untyped_storage().nbytes() // 4)
            return found

    with _library.implementation("torch"), Watch():
        linear_cross_entropy(input, weight, labels, bias, chunk_rows=2).backward()
    assert CLASSES * FEATURES <= largest < 40 * CLASSES


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"reduction": "median"}, ValueError, "'median' is not known; use mean, sum, none"),
        ({"chunk_rows": 0}, ValueError, "chunk_rows=0"),
        ({"accumulation_dtype": torch.int32}, TypeError, "accumulation_dtype must be floating-point"),
        ({"weight": torch.randn(5, 9)}, ValueError, r"weight has shape \[5, 9\], expected \[classes, 8\]"),
        ({"target": torch.zeros(4).long()}, ValueError, r"target has shape \[4\], expected \[7\]"),
        ({"target": torch.zeros(7)}, TypeError, "labels must be int64"),
        ({"bias": torch.zeros(4)}, ValueError, r"bias has shape \[4\], expected \[37\]"),
        ({"weight": torch.randn(37, 8).half()}, TypeError, "weight is torch.float16, the input torch.float32"),
        ({"weight": torch.randn(37, 8, device="meta")}, ValueError, "weight is on meta"),
        ({"label_smoothing": -0.1}, ValueError, "smoothing -0.1"),
    ],
)
def test_bad_arguments_are_refused(change: dict, error: type[Exception], words: str) -> None:
    input, weight, bias, labels = tensors("cpu", torch.float32)
    arguments = {"input": input, "weight": weight, "target": labels, "bias": bias, **change}
    with pytest.raises(error, match=words):
        linear_cross_entropy(**arguments)


@pytest.mark.gpu
def test_memory_is_an_eighth_of_that_of_all_logits() -> None:
    rows, features, classes = 4096, 512, 131072
    input = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(classes, features, device="cuda", dtype=torch.bfloat16) * 0.05).requires_grad_()
    labels = torch.randint(0, classes, (rows,), device="cuda")

    def peak(function) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(function(), (input, weight))
        return torch.cuda.max_memory_allocated() - before

    whole = peak(lambda: functional.cross_entropy(functional.linear(input, weight), labels))
    assert 8 * peak(lambda: linear_cross_entropy(input, weight, labels, chunk_rows=312)) < whole


def test_an_input_computed_from_the_weight_is_not_counted_twice() -> None:
    """Embeddings whose weight is the classifier's too."""

    def derivatives(loss) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        weight = torch.linspace(-1, 1, 24).reshape(6, 4).requires_grad_()
        labels = torch.tensor([1, 2, 5])
        (first,) = torch.autograd.grad(loss(weight[labels - 1].tanh(), weight, labels), weight, create_graph=True)
        return first, torch.autograd.grad(first.square().sum(), weight)[0]

    found = derivatives(linear_cross_entropy)
    expected = derivatives(lambda x, w, labels: torch.nn.functional.cross_entropy(x @ w.t(), labels))
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", ["linear_cross_entropy", "kept", "computed again", "token loss"])
def test_memory_between_rows_is_not_a_number(function: str, dtype: torch.dtype) -> None:
    """With AMX oneDNN reads behind the rows of a half-precision matrix whose length is no multiple of 32."""
    generator = torch.Generator().manual_seed(0)
    input, weight = (
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in ((48, 8), (50, 8))
    )
    labels = torch.randint(0, 50, (48,), generator=generator)
    for rows in (48, 36, 33):
        x, t = input[:rows], labels[:rows]
        if function == "linear_cross_entropy":
            loss = linear_cross_entropy(x, weight, t)
        elif function == "token loss":
            loss = linear_token_loss(x, weight, t, None, lambda log_probs, _: -log_probs / rows)[0]  # noqa: B023
        else:
            loss = -linear_log_probs(x, weight, t, keep_logits=function == "kept").log_probs.mean()
        expected, wanted = exact(x, weight, None, t, torch.ones(()))
        gradients = torch.autograd.grad(loss, (input, weight))
        assert_near(loss, expected, dtype, "loss")
        assert_near(gradients[0][:rows], wanted[0], dtype, "the input's gradient", 2)
        assert_near(gradients[1], wanted[1], dtype, "the weight's gradient", 2)
