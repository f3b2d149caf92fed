"""Newton-Schulz iteration against a float64 singular value decomposition, by kernels and by operators."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from apex.ops import _launch_arguments, _library
from apex.ops.newton_schulz import config, newton_schulz, op, reference
from tests.support.harness import Route, routes

MUON = [(3.4445, -4.7750, 2.0315)] * 5
SHAPES = [(1, 6, 6), (3, 5, 11), (2, 12, 4), (1, 1, 7), (2, 7, 1)]


def matrices(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_svd(batch: Tensor, coefficients: list[tuple[float, float, float]]) -> Tensor:
    """Return the matrices with the polynomial applied to each of their singular values."""
    left, values, right = torch.linalg.svd(batch / batch.flatten(-2).norm(dim=-1)[..., None, None], full_matrices=False)
    for a, b, c in coefficients:
        values = a * values + b * values**3 + c * values**5
    return left @ (values[..., None] * right)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_polynomial_of_the_singular_values(method: str, shape: tuple[int, ...], steps: int) -> None:
    batch = matrices(*shape)
    result = newton_schulz(batch, MUON[:steps], method=method)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, by_svd(batch, MUON[:steps]), rtol=1e-9, atol=1e-9)


def test_triples_may_differ() -> None:
    batch = matrices(2, 4, 9)
    triples = [(4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (2.8366, -3.0525, 1.2012)]
    for method in ("standard", "gram"):
        torch.testing.assert_close(newton_schulz(batch, triples, method=method), by_svd(batch, triples))


class LiveElements(TorchDispatchMode):
    """Counter of the elements of tensors that operators have allocated and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for tensor in (each for each in tree_leaves(result) if isinstance(each, Tensor)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.sizes and storage.data_ptr() not in given:
                self.sizes[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
                weakref.finalize(storage, self.sizes.pop, storage.data_ptr(), None)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a caller's frame then holds the normalised matrices")
@pytest.mark.parametrize("shape", [(1, 64, 256), (1, 256, 64), (1, 64, 64)], ids=str)
def test_peak_memory(shape: tuple[int, ...]) -> None:
    batch, most = matrices(*shape), config.peak_elements(*shape[1:])
    peaks = {}
    for method in ("standard", "gram"):
        with LiveElements() as live:
            newton_schulz(batch, MUON, method=method)
        peaks[method] = live.peak
    # Frames of callers hold the normalised matrices once torch.compile has run in the process.
    assert most <= peaks["gram"] <= most + batch.numel() + 8
    assert peaks["standard"] <= peaks["gram"]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("shape", [(2, 140, 280), (1, 280, 140)], ids=str)
def test_half_precision(route: Route, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "SMALL", 128)  # products of half precision are slow on many CPUs
    batch = matrices(*shape)
    expected = by_svd(batch, MUON)
    given = batch.to(route.device, torch.bfloat16)
    expected_rounded = by_svd(given.cpu().double(), MUON)
    with _library.implementation(route.implementation):
        standard = newton_schulz(given, MUON, method="standard")
        gram = newton_schulz(given, MUON, method="gram")
    assert (standard.dtype, gram.dtype) == (torch.bfloat16, torch.float16)
    # Rounding errors of five steps. A CPU's sums of half precision depend on the processor: standard is off by 0.01 to
    # 0.1. Small singular values of R take the errors of float16: gram is off by 0.11 for the first shape and 0.07 for
    # the second, and by 0.26 and 0.18 without its restart.
    factor = 2 if route.device == "cpu" else 1
    assert relative_error(standard, expected) < 0.1 * factor
    assert relative_error(gram, expected_rounded) < (0.15 if shape[1] < shape[2] else 0.11)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(("n", "depth"), [(128, 64), (300, 70), (17, 200)])
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("described", [False, True])
def test_product_is_the_reference(
    route: Route, described: bool, n: int, depth: int, tall: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if route.implementation != "triton":
        pytest.skip("the kernel")
    if described:
        if not _launch_arguments.has_descriptors():
            pytest.skip("this Triton has no descriptors")
        n, depth = 128 * -(-n // 128), 64 * -(-depth // 64)
        monkeypatch.setattr(config, "loads_by_descriptor", lambda *_: True)
    left = matrices(2, n, depth).to(route.device, torch.float16)
    left = left.mT.contiguous().mT if tall else left
    addend = torch.randn(2, n, n, dtype=torch.float16, generator=torch.Generator().manual_seed(1)).to(route.device)
    addend = addend + addend.mT
    actual = op.launch(left, left, 0.5, addend, -2.0)
    exact = reference.product(left.double(), left.double(), 0.5, addend.double(), -2.0)
    # One rounding of the result, and float32 sums of `depth` products.
    torch.testing.assert_close(actual.double(), exact, rtol=2**-10, atol=depth * 2.0**-20)
    assert torch.equal(actual, actual.mT)
    assert torch.equal(op.launch(left, left, 0.5, addend, -2.0), actual)


@pytest.mark.skipif(not _launch_arguments.has_descriptors(), reason="this Triton has no descriptors")
@pytest.mark.parametrize(
    ("gpu", "shape", "block"),
    [
        ("sm_90", (11, 2048, 2048), (128, 64)),
        ("sm_90", (11, 8192, 2048), (64, 128)),
        ("sm_90", (11, 2048, 2000), None),  # a tile would reach into the next matrix
        ("sm_90", (1, 512, 512), None),
        ("sm_100", (11, 2048, 2048), None),
    ],
    ids=str,
)
def test_large_products_load_by_descriptors_on_hopper(
    gpu: str, shape: tuple[int, ...], block: tuple[int, int] | None
) -> None:
    compile_ahead = pytest.importorskip("apex.ops._compile_ahead")
    batch = torch.empty(shape, dtype=torch.float16, device="meta")
    short = batch if shape[1] <= shape[2] else batch.mT
    with compile_ahead.planning(compile_ahead.GPUS[gpu]) as launches:
        op.launch(short, short, 1.0, None, 0.0)
    assert [getattr(each, "block", None) for each in launches[0].tensors] == [block, block, None, None]
    if block is not None:
        assert block in compile_ahead.program(launches[0])[2]
        argument = launches[0].tensors[0].argument()
        assert list(argument.shape) == [shape[0] * shape[1], shape[2]]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("columns", [1024, 40])
def test_divided_copy_is_the_reference(route: Route, columns: int) -> None:
    if route.implementation != "triton":
        pytest.skip("the kernel")
    batch = (matrices(3, 12, columns) * torch.tensor([1e-12, 1.0, 1e12])[:, None, None]).to(
        route.device, torch.bfloat16
    )
    actual = op.normalized(batch, 1e-7, torch.float16)
    norm = batch.double().flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    # One rounding to float16, whose smallest numbers are 2**-24 apart, and float32 errors of the norm.
    torch.testing.assert_close(actual.double(), batch.double() / norm, rtol=2**-10, atol=2**-24)


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_result_in_the_memory_of_the_matrices(method: str, steps: int) -> None:
    batch = matrices(2, 6, 9)
    expected = newton_schulz(batch, MUON[:steps], method=method)
    assert newton_schulz(batch, MUON[:steps], method=method, out=batch).data_ptr() == batch.data_ptr()
    assert torch.equal(batch, expected)


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16])
def test_autocast_changes_nothing(autocast: torch.dtype, method: str) -> None:
    batch = matrices(2, 6, 8)
    for dtype in (torch.float64, torch.float32, torch.float16):
        expected = newton_schulz(batch, MUON, method=method, dtype=dtype)
        out = torch.empty_like(batch, dtype=dtype)
        with torch.autocast("cpu", autocast):
            assert torch.equal(newton_schulz(batch, MUON, method=method, dtype=dtype, out=out), expected)


def test_small_and_zero_matrices() -> None:
    for shape in ((0, 4, 5), (2, 0, 5), (3, 0)):
        assert newton_schulz(torch.zeros(shape), MUON).shape == shape
    assert torch.equal(newton_schulz(torch.zeros(4, 5), MUON), torch.zeros(4, 5, dtype=torch.bfloat16))
    tiny = newton_schulz(matrices(4, 5) * 1e-30, MUON, eps=1e-7)
    assert float(tiny.norm()) < 1e-18  # divided by eps, not by the norm


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="rows, columns"):
        newton_schulz(torch.zeros(3), MUON)
    with pytest.raises(ValueError, match="method='fast'"):
        newton_schulz(torch.zeros(3, 3), MUON, method="fast")
    with pytest.raises(ValueError, match="bfloat16"):
        newton_schulz(torch.zeros(3, 3), MUON, method="gram", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="triples"):
        newton_schulz(torch.zeros(3, 3), [(1.0, 2.0)])


def test_auto_is_standard_in_bfloat16_where_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "SMALL", 4)
    monkeypatch.setattr(op, "launch", reference.product)
    monkeypatch.setattr(op, "normalized", reference.normalized)
    monkeypatch.setattr(_library, "runs_triton", lambda *_: True)
    batch = matrices(1, 8, 12)
    expected = newton_schulz(batch, MUON, method="standard", dtype=torch.bfloat16)
    assert torch.equal(newton_schulz(batch, MUON, dtype=torch.bfloat16), expected)


def test_the_check_of_doctor_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    def launch(*arguments: Any) -> Tensor:
        launches.append(arguments)
        return reference.product(*arguments)

    monkeypatch.setattr(op, "launch", launch)
    monkeypatch.setattr(op, "normalized", reference.normalized)
    monkeypatch.setattr(_library, "runs_triton", lambda *_: True)
    assert op.self_check(torch.device("cpu")) <= 1
    assert launches
