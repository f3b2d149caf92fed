"""Options of linear_cross_entropy and the outputs of linear_log_probs, against float64 on all logits."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from apex.ops import _library
from apex.ops.xentropy import TokenOutputs, chunks, linear_cross_entropy, linear_log_probs
from tests.ops.xentropy.test_linear import CLASSES, ROWS, assert_near, tensors
from tests.support.harness import Route, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CLASS_WEIGHT = torch.linspace(0.2, 2.0, CLASSES)
OPTIONS: dict[str, dict] = {
    "smoothing": {"label_smoothing": 0.1},
    "class_weight": {"class_weight": CLASS_WEIGHT},
    "scale": {"logit_scale": -0.7},
    "softcap": {"softcap": 1.5},
    "temperature": {"temperature": 0.6},
    "z_loss": {"z_loss": 0.05},
    "token_scaling": {"token_scaling": True},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
}
PAIRS = [
    pytest.param({**OPTIONS[a], **OPTIONS[b]}, id=f"{a}-{b}")
    for a, b in itertools.combinations(OPTIONS, 2)
    if {a, b} != {"sum", "none"}
]
EVERYTHING = {k: v for name, option in OPTIONS.items() if name not in ("sum", "none") for k, v in option.items()}
OUTPUTS = TokenOutputs._fields


def transformed(logits: Tensor, logit_scale: float = 1.0, softcap: float | None = None, temperature: float = 1.0):
    z = logits * logit_scale
    return (z if softcap is None else softcap * (z / softcap).tanh()) / temperature


def exact_loss(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    z_loss: float = 0.0,
    token_scaling: bool = False,
    reduction: str = "mean",
    **transform,
) -> Tensor:
    z = transformed(functional.linear(input, weight, bias), **transform)
    class_weight = None if class_weight is None else class_weight.to(z)
    counted = labels != -100
    losses = functional.cross_entropy(z, labels, class_weight, label_smoothing=label_smoothing, reduction="none")
    squares = z_loss * z.logsumexp(-1).square() * counted
    if token_scaling:
        own = z.softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0].detach()
        losses, squares = losses * own, squares * own
    if reduction == "none":
        return losses + squares
    if reduction == "sum":
        return (losses + squares).sum()
    total = counted.sum() if class_weight is None else class_weight[labels.clamp(min=0)].mul(counted).sum()
    return losses.sum() / total + squares.sum() / counted.sum()


def exact_outputs(input: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, **transform) -> TokenOutputs:
    z = transformed(functional.linear(input, weight, bias), **transform)
    log_p, ignored = z.log_softmax(-1), labels == -100
    values = (
        log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0],
        -(log_p.exp() * log_p).sum(-1),
        log_p.exp().square().sum(-1).log(),
        z.mean(-1),
        (z.argmax(-1) == labels).to(z),
        z.argmax(-1),
        z.logsumexp(-1),
    )
    return TokenOutputs(*(value.masked_fill(ignored, 0) for value in values))


def with_gradients(function: Callable[..., Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Return a result and the gradients of its sum, each row with a factor of its own."""
    value = function(*leaves)
    factors = torch.arange(1, value.numel() + 1, device=value.device).to(value).view(value.shape)
    return value, *torch.autograd.grad((value * factors).sum(), leaves)


def doubled(leaves: list[Tensor]) -> list[Tensor]:
    return [leaf.detach().double().requires_grad_() for leaf in leaves]


@pytest.mark.parametrize("options", PAIRS)
def test_pairs_of_options(options: dict) -> None:
    *leaves, labels = tensors("cpu", torch.float64)
    found = with_gradients(lambda x, w, b: linear_cross_entropy(x, w, labels, b, chunk_rows=3, **options), leaves)
    expected = with_gradients(lambda x, w, b: exact_loss(x, w, b, labels, **options), leaves)
    for name, actual, wanted in zip(("loss", "input", "weight", "bias"), found, expected, strict=True):
        assert_near(actual, wanted, torch.float64, name)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*OPTIONS, "everything"])
def test_options(route: Route, name: str, dtype: torch.dtype) -> None:
    options = dict(OPTIONS.get(name, EVERYTHING))
    if "class_weight" in options:
        options["class_weight"] = CLASS_WEIGHT.to(route.device)
    *leaves, labels = tensors(route.device, dtype)

    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(x, w, labels, b, chunk_rows=3, **options)

    with _library.implementation(route.implementation):
        found, again = with_gradients(run, leaves), with_gradients(run, leaves)
    expected = with_gradients(lambda x, w, b: exact_loss(x, w, b, labels, **options), doubled(leaves))
    for what, actual, wanted in zip(("loss", "input", "weight", "bias"), found, expected, strict=True):
        # Gradients under a power of a probability inherit the rounding of the logits several times.
        assert_near(actual, wanted, dtype, what, 3 if name in ("everything", "token_scaling") else 2)
    assert_equal_bits(found, again)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("keep_logits", [True, False])
@pytest.mark.parametrize("transform", [{}, {"logit_scale": 0.7, "softcap": 2.0, "temperature": 1.3}])
def test_outputs(route: Route, dtype: torch.dtype, keep_logits: bool, transform: dict) -> None:
    if dtype == torch.float64 and route.implementation == "triton":
        pytest.skip("the kernels' arithmetic is float32")
    *leaves, labels = tensors(route.device, dtype)
    options = {"outputs": OUTPUTS, "keep_logits": keep_logits, "chunk_rows": 3, **transform}

    def both(outputs: TokenOutputs) -> Tensor:
        return torch.stack([outputs.log_probs, 0.5 * outputs.entropy])

    with _library.implementation(route.implementation):
        found = linear_log_probs(*leaves[:2], labels, leaves[2], **options)
        gradients = with_gradients(lambda x, w, b: both(linear_log_probs(x, w, labels, b, **options)), leaves)
    wide = doubled(leaves)
    expected = exact_outputs(*wide, labels, **transform)
    for name, actual, wanted in zip(OUTPUTS, found, expected, strict=True):
        if name in ("argmax", "is_top1"):  # half-precision logits have ties that float64 has not
            assert torch.equal(actual, wanted.to(actual.dtype)) or dtype == torch.bfloat16
        else:
            assert actual.requires_grad == (name in ("log_probs", "entropy"))
            assert_near(actual, wanted.detach(), dtype, name, 2)
        assert not actual[labels == -100].any()
    wanted_gradients = with_gradients(lambda *w: both(exact_outputs(*w, labels, **transform)), wide)
    for actual, wanted in zip(gradients, wanted_gradients, strict=True):
        assert_near(actual, wanted, dtype, "a gradient", 3)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("classes", [3, 16, 37, 1025, 4100])
def test_odd_numbers_of_classes(route: Route, classes: int) -> None:
    """Ends of rows before and behind the kernels' blocks; the greatest logit is first, last and twice in a row."""
    input = torch.eye(4, device=route.device)
    weight = torch.randn(classes, 4, device=route.device).clamp(-2, 2)
    weight[0, 0] = weight[-1, 1] = weight[1, 2] = weight[-1, 2] = 3.0
    labels = torch.tensor([0, classes - 1, classes - 1, 1], device=route.device)
    with _library.implementation(route.implementation):
        found = linear_log_probs(input, weight, labels, outputs=OUTPUTS)
        losses, same = linear_cross_entropy(input, weight, labels, outputs=OUTPUTS, softcap=5.0, reduction="sum")
    for outputs, transform in ((found, {}), (same, {"softcap": 5.0})):
        expected = exact_outputs(input.double(), weight.double(), None, labels, **transform)
        for name, actual, wanted in zip(OUTPUTS, outputs, expected, strict=True):
            assert_near(actual, wanted, torch.float32, name, 2)
        assert outputs.argmax[:3].tolist() == [0, classes - 1, 1]
    torch.testing.assert_close(losses, -same.log_probs.sum())


def test_all_rows_ignored_and_no_rows() -> None:
    input, weight, bias, labels = tensors("cpu", torch.float32)
    for options in OPTIONS.values():
        if options.get("reduction") == "none":
            continue
        loss = linear_cross_entropy(input, weight, torch.full_like(labels, -100), bias, **options)
        assert loss.isnan() or options.get("reduction") == "sum"
        assert all(not g.any() for g in torch.autograd.grad(loss, (input, weight, bias)))
    found = linear_log_probs(input, weight, torch.full_like(labels, -100), bias, outputs=OUTPUTS)
    assert not any(value.any() for value in found)
    empty = linear_log_probs(input[:0], weight, labels[:0], bias, outputs=OUTPUTS)
    assert all(value.shape == (0,) for value in empty)
    assert not any(g.any() for g in torch.autograd.grad(empty.log_probs.sum(), (weight, bias)))


def test_shapes_follow_the_target() -> None:
    input, weight, _, labels = tensors("cpu", torch.float32)
    strided = torch.stack([input[:6], input[:6]], 1).transpose(0, 1).reshape(2, 3, 2, -1)[:, :, 0]
    target = labels[:6].view(2, 3).t().contiguous().t()
    found = linear_log_probs(strided, weight, target, outputs=("entropy",))
    assert found.entropy.shape == (2, 3)
    assert found.log_probs is None
    expected = exact_outputs(strided.reshape(6, -1).double(), weight.double(), None, target.reshape(-1))
    assert_near(found.entropy.reshape(-1), expected.entropy.detach(), torch.float32, "entropy")


def test_excluded_classes_have_no_part_in_the_entropy() -> None:
    input, weight, bias, labels = tensors("cpu", torch.float32)
    bias = bias.detach().clone()
    bias[5:] = -torch.inf
    found = linear_log_probs(input, weight, labels % 5, bias, outputs=("log_probs", "entropy"))
    expected = exact_outputs(input.double(), weight.double()[:5], bias.double()[:5], labels % 5)
    assert_near(found.entropy, expected.entropy.detach(), torch.float32, "entropy")
    (gradient,) = torch.autograd.grad(found.entropy.sum() + found.log_probs.sum(), input)
    wanted = torch.autograd.grad(expected.entropy.sum() + expected.log_probs.sum(), input)[0]
    assert_near(gradient, wanted.double(), torch.float32, "a gradient")


def test_kept_logits_save_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    input, weight, _, labels = tensors("cpu", torch.float32)
    size = ROWS * chunks.row_stride(CLASSES) * 4
    seen = []
    original = chunks.walk
    monkeypatch.setattr(chunks, "walk", lambda *a, **k: seen.append(k.get("filled", False)) or original(*a, **k))
    for keep_logits, kept in (("auto", True), (False, False), (size, True), (size - 1, False)):
        seen.clear()
        found = linear_log_probs(input, weight, labels, keep_logits=keep_logits).log_probs
        first = torch.autograd.grad(found.sum(), (input, weight), retain_graph=True)
        again = torch.autograd.grad(found.sum(), (input, weight))
        assert seen == [False, kept, kept]
        assert_equal_bits(first, again)


@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=["plain", *OPTIONS])
def test_gradcheck(options: dict) -> None:
    generator = torch.Generator().manual_seed(1)
    leaves = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in ((4, 3), (5, 3), (5,))]
    labels = torch.tensor([0, -100, 4, 2])
    options = {**options, "class_weight": CLASS_WEIGHT[:5]} if "class_weight" in options else options

    def function(input, weight, bias):
        return linear_cross_entropy(input, weight, labels, bias, chunk_rows=3, **options)

    def outputs(input, weight, bias):
        transform = {k: v for k, v in options.items() if k in ("logit_scale", "softcap", "temperature")}
        return linear_log_probs(input, weight, labels, bias, outputs=("log_probs", "entropy"), **transform)[:2]

    if "token_scaling" not in options:  # its factor is a constant for the derivative alone
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)
    if set(options) <= {"logit_scale", "softcap", "temperature"}:
        assert torch.autograd.gradcheck(outputs, leaves)
        assert torch.autograd.gradgradcheck(outputs, leaves)


@pytest.mark.parametrize("needed", [(True, False), (False, True)])
def test_frozen_head_or_input(needed: tuple[bool, bool]) -> None:
    input, weight, _, labels = tensors("cpu", torch.float32)
    both = torch.autograd.grad(linear_log_probs(input, weight, labels).log_probs.sum(), (input, weight))
    for tensor, need in zip((input, weight), needed, strict=True):
        tensor.requires_grad_(need)
    linear_log_probs(input, weight, labels).log_probs.sum().backward()
    assert [tensor.grad is not None for tensor in (input, weight)] == list(needed)
    assert torch.equal(input.grad if needed[0] else weight.grad, both[needed.index(True)])


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_compiled_without_graph_breaks(route: Route) -> None:
    *leaves, labels = tensors(route.device, torch.float32)
    options = {**EVERYTHING, "class_weight": CLASS_WEIGHT.to(route.device)}

    def function(input, weight, bias):
        loss, outputs = linear_cross_entropy(input, weight, labels, bias, outputs=("entropy", "is_top1"), **options)
        none = linear_cross_entropy(input, weight, labels, bias, reduction="none", label_smoothing=0.1)
        rows = linear_log_probs(input, weight, labels, bias, outputs=("log_probs", "entropy"), softcap=3.0)
        return loss + outputs.is_top1.sum() + none.sin().sum() + (rows.log_probs * rows.entropy).sum()

    backend = "inductor" if route.device == "cuda" else "aot_eager"
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        expected = with_gradients(function, leaves)
        found = with_gradients(torch.compile(function, fullgraph=True, backend=backend), leaves)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"temperature": 0.0}, ValueError, "temperature=0.0 must be a positive number"),
        ({"softcap": -1.0}, ValueError, "softcap=-1.0 must be a positive number"),
        ({"logit_scale": 0.0}, ValueError, "logit_scale=0.0 must be finite and not zero"),
        ({"z_loss": -0.1}, ValueError, "z_loss=-0.1 must not be negative"),
        ({"smoothing": "uniform"}, ValueError, "smoothing 'uniform' is not known; use torch, megatron"),
        ({"outputs": ("perplexity",)}, ValueError, "outputs .* must be a sequence of log_probs, entropy"),
        ({"outputs": "entropy"}, ValueError, "must be a sequence of"),
        ({"keep_logits": "never"}, ValueError, "keep_logits='never' must be"),
        ({"class_weight": torch.ones(3)}, ValueError, r"class_weight has shape \[3\], expected \[37\]"),
        ({"class_weight": torch.ones(37).requires_grad_()}, ValueError, "class_weight requires a gradient"),
        ({"sequence_parallel": True}, ValueError, "sequence_parallel=True needs a process group"),
    ],
)
def test_bad_options_are_refused(change: dict, error: type[Exception], words: str) -> None:
    input, weight, bias, labels = tensors("cpu", torch.float32)
    with pytest.raises(error, match=words):
        linear_cross_entropy(input, weight, labels, bias, **change)


def test_megatrons_smoothing_leaves_the_target_out() -> None:
    *leaves, labels = tensors("cpu", torch.float64)
    found = with_gradients(
        lambda x, w, b: linear_cross_entropy(x, w, labels, b, label_smoothing=0.1, smoothing="megatron"), leaves
    )
    uniform = 0.1 * CLASSES / (CLASSES - 1)
    expected = with_gradients(lambda x, w, b: exact_loss(x, w, b, labels, label_smoothing=uniform), leaves)
    for actual, wanted in zip(found, expected, strict=True):
        assert_near(actual, wanted, torch.float64, "a result")


@pytest.mark.gpu
def test_cuda_graph_capture() -> None:
    input = torch.randn(512, 64, device="cuda", requires_grad=True)
    weight = torch.randn(5001, 64, device="cuda", requires_grad=True)
    labels = torch.randint(0, 5001, (512,), device="cuda")
    class_weight = torch.rand(5001, device="cuda")

    def step():
        options = {"chunk_rows": 200, "softcap": 20.0, "z_loss": 1e-3, "class_weight": class_weight}
        loss, outputs = linear_cross_entropy(input, weight, labels, outputs=OUTPUTS, **options)
        rows = linear_log_probs(input, weight, labels, outputs=("log_probs", "entropy"))
        loss = loss + (rows.log_probs * rows.entropy).sum()
        return loss, outputs.argmax, *torch.autograd.grad(loss, (input, weight))

    with _library.implementation("triton"):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):  # compile before capture
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            input.copy_(torch.randn_like(input))
        graph.replay()
        torch.cuda.synchronize()
        expected = step()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.gpu
def test_memory_beyond_gradients_is_one_chunk() -> None:
    rows, features, classes, chunk_rows = 4096, 512, 131072, 512
    input = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(classes, features, device="cuda", dtype=torch.bfloat16) * 0.05).requires_grad_()
    labels = torch.randint(0, classes, (rows,), device="cuda")
    gradients = 2 * (input.numel() + weight.numel())
    for loss in (
        lambda: linear_cross_entropy(input, weight, labels, softcap=30.0, z_loss=1e-4, chunk_rows=chunk_rows),
        lambda: linear_log_probs(input, weight, labels, keep_logits=False, chunk_rows=chunk_rows).log_probs.sum(),
    ):
        torch.autograd.grad(loss(), (input, weight))  # cuBLAS allocates its workspace in the first product
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(loss(), (input, weight))
        peak = torch.cuda.max_memory_allocated() - before
        assert peak < gradients + 1.1 * 2 * chunk_rows * classes
