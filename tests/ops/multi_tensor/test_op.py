"""Scaling, sums and norms over lists of tensors, by every route, against float64."""

import pytest
import torch
from torch import Tensor

from apex.ops import _library
from apex.ops.multi_tensor import axpby, l2norm, max_norm, scale, update_scale_hysteresis, zero
from apex.ops.multi_tensor import mask as mask_tensors
from apex.ops.multi_tensor.dispatch import _MOST_GROUPS, _groups_by_signature
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SIZES = (5, 300, 0, 64, 1, 129)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def make(device: str, dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = SIZES) -> list[Tensor]:
    return [torch.randn(size, device=device).to(dtype) for size in sizes]


def dispatch(route: Route, *dtypes: torch.dtype):
    """The implementation asked for; float64 has only the torch path."""
    return _library.implementation("auto" if torch.float64 in dtypes else route.implementation)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("in_dtype", FLOATS)
def test_scale(in_dtype: torch.dtype, out_dtype: torch.dtype, route: Route) -> None:
    inputs = make(route.device, in_dtype)
    outputs = [torch.empty_like(tensor, dtype=out_dtype) for tensor in inputs]
    flag = torch.zeros(1, dtype=torch.int32, device=route.device)
    with dispatch(route, in_dtype, out_dtype):
        scale(inputs, outputs, 0.25, overflow=flag)
    for output, tensor in zip(outputs, inputs, strict=True):
        assert_close(output, tensor.double() * 0.25)
    assert not flag.item()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", [(0, 0), (1, 299), (3, 63), (4, 0)])
def test_scale_finds_what_is_not_finite(where: tuple[int, int], bad: float, route: Route) -> None:
    inputs = make(route.device, torch.float16)
    inputs[where[0]][where[1]] = bad
    for dtype in (torch.int32, torch.float32):
        flag = torch.zeros(1, dtype=dtype, device=route.device)
        with _library.implementation(route.implementation):
            scale(inputs, [torch.empty_like(tensor) for tensor in inputs], 1.0, overflow=flag)
        assert flag.item() == 1


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("mixed", [False, True])
def test_nonfinite_elements_are_counted(mixed: bool, route: Route) -> None:
    """Per tensor, infinite elements and NaNs; also where tensors of several dtypes go separate ways."""
    inputs = make(route.device, torch.float16)
    if mixed:
        inputs[1] = inputs[1].float()
    inputs[1][[3, 70, 299]] = torch.tensor([float("inf"), float("-inf"), float("nan")], device=route.device).to(
        inputs[1].dtype
    )
    inputs[3][5] = float("nan")
    outputs = [torch.empty_like(tensor, dtype=torch.float32) for tensor in inputs]
    for call in (
        lambda **options: scale(inputs, outputs, 0.5, **options),
        lambda **options: axpby(inputs, outputs, outputs, 0.5, 0.0, checks="x", **options),
    ):
        flag = torch.zeros(1, device=route.device)
        counts = torch.zeros(len(inputs), 2, dtype=torch.int32, device=route.device)
        with _library.implementation(route.implementation):
            call(overflow=flag, nonfinite_counts=counts)
        assert flag.item() == 1
        assert counts.tolist() == [[0, 0], [2, 1], [0, 0], [0, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize("route", routes())
def test_scale_in_place_by_a_factor_on_the_device(route: Route) -> None:
    tensors = make(route.device)
    expected = [tensor.double() * 3 for tensor in tensors]
    with _library.implementation(route.implementation):
        scale(tensors, tensors, torch.tensor(3.0, device=route.device))
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert_close(tensor, wanted)


@pytest.mark.parametrize("route", routes())
def test_as_many_programs_of_one_tensor_as_of_several(route: Route) -> None:
    # On a GPU a program takes 1024 elements, in the interpreter 128; twice as many of a tensor that so has one program.
    small, large = (2000, 3000) if route.device == "cuda" else (200, 300)
    for sizes in ((small,) * 3, (large,), (small,) * 3):
        tensors = [torch.rand(size, device=route.device) for size in sizes]
        expected = [2 * tensor for tensor in tensors]
        with _library.implementation(route.implementation):
            scale(tensors, tensors, 2.0)
        assert all(map(torch.equal, tensors, expected))


@pytest.mark.parametrize("route", routes())
def test_noop_flag_turns_work_off(route: Route) -> None:
    inputs, outputs = make(route.device), make(route.device)
    before = [tensor.clone() for tensor in outputs]
    flag = torch.ones(1, dtype=torch.int32, device=route.device)
    with _library.implementation(route.implementation):
        scale(inputs, outputs, 2.0, noop=flag)
    assert_equal_bits(outputs, before)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_zero(device: str) -> None:
    sparse = torch.eye(3, device=device).to_sparse()
    tensors = [*make(device), *make(device, torch.float16), torch.ones(4, 2, device=device).t(), sparse]
    zero(tensor for tensor in tensors)
    assert not any(tensor.to_dense().any() for tensor in tensors)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("checks", ["x", "y", "xy", ""])
def test_axpby_checks_what_it_is_told_to(checks: str, route: Route) -> None:
    for poisoned in ("x", "y"):
        x, y = make(route.device, torch.float16), make(route.device)
        outputs = [torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in x]
        flag = torch.zeros(1, dtype=torch.int32, device=route.device)
        expected = [2.0 * a.double() - 0.5 * b.double() for a, b in zip(x, y, strict=True)]
        with _library.implementation(route.implementation):
            axpby(x, y, outputs, 2.0, -0.5, overflow=flag, checks=checks)
            for output, wanted in zip(outputs, expected, strict=True):
                assert_close(output, wanted)
            assert not flag.item()
            axpby(x, y, outputs, torch.tensor(2.0, device=route.device), -0.5)
            for output, wanted in zip(outputs, expected, strict=True):
                assert_close(output, wanted)
            (x if poisoned == "x" else y)[1][7] = float("inf")
            axpby(x, y, outputs, 2.0, -0.5, overflow=flag, checks=checks)
        assert bool(flag.item()) == (poisoned in checks)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("sum_is_checked", [False, True])
def test_axpby_finds_sums_that_overflow(sum_is_checked: bool, route: Route) -> None:
    """Float16 ends at 65504. What was not finite in `y` before is no news."""
    x, y = make(route.device, torch.float16), make(route.device, torch.float16)
    x[1][[3, 70]], y[1][[3, 70]] = -40000.0, -40000.0
    y[3][5] = float("inf")
    x[4][0], y[4][0] = 40000.0, 20000.0
    factors = torch.tensor(1.0, device=route.device), torch.tensor(0.5, device=route.device)
    for a, b, overflows in ((1.0, 1.0, True), (1.0, 0.5, False), (*factors, False)):
        outputs = [torch.empty_like(tensor) for tensor in x]
        flag = torch.zeros(1, device=route.device)
        counts = torch.zeros(len(x), 2, dtype=torch.int32, device=route.device)
        with _library.implementation(route.implementation):
            axpby(x, y, outputs, a, b, overflow=flag, nonfinite_counts=counts, checks="x", checks_sum=sum_is_checked)
        for output, first, second in zip(outputs, x, y, strict=True):
            torch.testing.assert_close(output, (float(a) * first.float() + float(b) * second.float()).half())
        assert bool(flag.item()) == (sum_is_checked and overflows)
        assert counts[1].tolist() == [2 * (sum_is_checked and overflows), 0]
        assert counts.sum() == counts[1].sum()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", FLOATS)
def test_norms(dtype: torch.dtype, route: Route) -> None:
    tensors = make(route.device, dtype)
    whole = torch.cat([tensor.double() for tensor in tensors])
    with dispatch(route, dtype):
        norm, each = l2norm(tensors, per_tensor=True)
        alone, nothing = l2norm(tensors)
        again, _ = l2norm(tensors)
        largest, largest_each = max_norm(tensors, per_tensor=True)
    assert norm.shape == (1,)
    assert norm.dtype == torch.float32
    assert_close(norm, whole.norm().reshape(1))
    assert_close(each, torch.stack([tensor.double().norm() for tensor in tensors]))
    assert_close(largest, whole.abs().max().reshape(1))
    assert_close(
        largest_each, torch.stack([t.double().abs().max() if t.numel() else t.new_zeros(()).double() for t in tensors])
    )
    assert nothing.numel() == 0
    assert_close(alone, whole.norm().reshape(1))
    assert_equal_bits([alone], [again])


@pytest.mark.parametrize("route", routes())
def test_norm_of_mixed_dtypes_and_layouts(route: Route) -> None:
    images = torch.randn(2, 3, 4, 5, device=route.device).to(memory_format=torch.channels_last)
    odd = torch.randn(101, device=route.device)[1:]
    strided = torch.randn(20, 6, device=route.device)[:, ::2]
    tensors = [*make(route.device), *make(route.device, torch.bfloat16), images, odd, strided]
    with _library.implementation("auto" if route.implementation == "triton" else "torch"):
        norm, each = l2norm(tensors, per_tensor=True)
    assert_close(norm, torch.cat([tensor.double().flatten() for tensor in tensors]).norm().reshape(1))
    assert_close(each, torch.stack([tensor.double().norm() for tensor in tensors]))


@pytest.mark.parametrize("route", routes())
def test_norm_and_scaled_copy_in_one_pass(route: Route) -> None:
    tensors = make(route.device, torch.float16)
    outputs = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
    with _library.implementation(route.implementation):
        norm, _ = l2norm(tensors, outputs=outputs, factor=0.5)
        same, _ = l2norm(tensors, outputs=outputs, factor=torch.tensor(0.5, device=route.device))
    assert_close(norm, torch.cat(tensors).double().norm().reshape(1) * 0.5)
    assert_equal_bits([norm], [same])
    for output, tensor in zip(outputs, tensors, strict=True):
        assert_close(output, tensor.double() * 0.5)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("norm", [l2norm, max_norm])
def test_norm_of_what_is_not_finite(norm, route: Route) -> None:
    for bad in (float("inf"), float("nan")):
        tensors = make(route.device)
        tensors[1][100] = bad
        with _library.implementation(route.implementation):
            total, each = norm(tensors, per_tensor=True)
        assert not total.isfinite().item()
        assert each.isfinite().tolist() == [True, False, True, True, True, True]
        assert total.isnan().item() == each[1].isnan().item() == (bad != bad)


@pytest.mark.parametrize("route", routes())
def test_tensors_replaced_by_others_at_their_addresses(route: Route) -> None:
    """A table that was made for other sizes, dtypes or addresses is not used again."""
    buffer = torch.randn(4096, device=route.device)
    with _library.implementation(route.implementation):
        for sizes in ((100, 200), (200, 100), (300, 50), (100, 200)):
            for offset in (0, 16, 1):
                views = [buffer[offset:][: sizes[0]], buffer[offset + 1000 :][: sizes[1]]]
                for dtype in (torch.float32, torch.bfloat16):
                    tensors = views if dtype == torch.float32 else [view.view(dtype) for view in views]
                    tensors = (
                        [tensor.nan_to_num(0, 1, 1).clamp(-2, 2) for tensor in tensors]
                        if dtype != torch.float32
                        else tensors
                    )
                    norm, _ = l2norm(tensors)
                    assert_close(norm, torch.cat(tensors).double().norm().reshape(1))


@pytest.mark.parametrize("route", routes())
def test_as_many_programs_for_other_numbers_of_tensors(route: Route) -> None:
    """Where each tensor has one program there is no table of programs, which another launch of as many has."""
    tensors = torch.randn(1024, device=route.device).split(512)
    with _library.implementation(route.implementation):
        for given in (tensors[:1], [tensor[:100] for tensor in tensors], tensors[:1]):
            assert_close(l2norm(given)[0], torch.cat(list(given)).double().norm().reshape(1))


def test_no_tensors() -> None:
    norm, each = l2norm([], per_tensor=True)
    assert norm.item() == 0
    assert each.shape == (0,)
    scale([], [], 2.0)


@pytest.mark.parametrize(
    ("inputs", "outputs", "error", "message"),
    [
        ([torch.ones(3)], [], ValueError, "outputs has 0 tensors|inputs has 1 tensors"),
        ([torch.ones(3)], [torch.ones(4)], ValueError, "elements"),
        ([torch.ones(3, dtype=torch.int32)], [torch.ones(3)], TypeError, "int32"),
        ([torch.ones(3).to_sparse()], [torch.ones(3)], TypeError, "sparse"),
        ([torch.ones(3, device="meta")], [torch.ones(3)], ValueError, "meta"),
    ],
)
def test_refusals(inputs: list[Tensor], outputs: list[Tensor], error: type[Exception], message: str) -> None:
    before = [tensor.clone() for tensor in outputs]
    with pytest.raises(error, match=message):
        scale(inputs, outputs, 2.0)
    assert_equal_bits(outputs, before)


def test_a_flag_on_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="flag is on meta"):
        scale([torch.ones(3)], [torch.ones(3)], 1.0, overflow=torch.zeros(1, device="meta"))


def test_tables_are_forgotten_in_the_end() -> None:
    pytest.importorskip("triton")
    with _library.implementation("triton"):
        for size in range(_MOST_GROUPS + 3):
            l2norm([torch.ones(size + 1)])
    assert len(_groups_by_signature) == _MOST_GROUPS


def test_loss_scale_with_hysteresis() -> None:
    """Two overflows in a row are forgiven, the third lowers the scale, and so does every one after it."""
    current, growth, patience = torch.tensor([1024.0]), torch.zeros(1, dtype=torch.int32), torch.full((1,), 3)
    patience = patience.to(torch.int32)
    scales = []
    for overflow in (1, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0):
        update_scale_hysteresis(current, growth, patience, torch.tensor([float(overflow)]), 2.0, 0.5, 2, 3)
        scales.append(current.item())
    assert scales == [1024, 1024, 512, 256, 256, 512, 512, 512, 512, 1024, 1024, 2048]


def test_loss_scale_does_not_grow_to_infinity() -> None:
    current, growth, patience = torch.tensor([2.0**127]), torch.zeros(1, dtype=torch.int32), torch.ones(1).int()
    update_scale_hysteresis(current, growth, patience, torch.zeros(1), 4.0, 0.5, 1, 1)
    assert current.item() == 2.0**127
    assert growth.item() == 0


def test_a_scale_below_the_smallest_normal_number_is_zero() -> None:
    """As in upstream's kernel; a number without all its digits would not grow back to where it came from."""
    smallest = torch.finfo(torch.float32).smallest_normal
    current = torch.tensor([4 * smallest])
    growth, patience = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    scales = []
    for _ in range(3):
        update_scale_hysteresis(current, growth, patience, torch.ones(1), 2.0, 0.5, 2, 1)
        scales.append(float(current))
    assert scales == [2 * smallest, smallest, 0.0]


@pytest.mark.gpu
def test_more_than_two_billion_elements() -> None:
    huge = torch.ones(2**31 + 5, dtype=torch.bfloat16, device="cuda")
    huge[-1] = 100.0
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    largest, _ = max_norm([huge])
    assert largest.item() == 100
    scale([huge], [huge], 2.0, overflow=flag)
    assert huge[-1].item() == 200
    assert huge[-2].item() == 2
    assert not flag.item()


@pytest.mark.gpu
def test_calls_on_two_streams_do_not_share_a_table() -> None:
    first, second = (make("cuda", sizes=(100_000, 3000)) for _ in range(2))
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for tensors, stream in zip((first, second), streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(l2norm(tensors)[0])
    torch.cuda.synchronize()
    assert_equal_bits(found[0::2], found[:1] * 20)
    assert_equal_bits(found[1::2], found[1:2] * 20)
    assert_close(found[0], torch.cat(first).double().norm().reshape(1), reduction=10)


@pytest.mark.parametrize("route", routes())
def test_masks_zero_whatever_is_there(route: Route) -> None:
    """NaN too; tensors of several dtypes and layouts, in one call."""
    shapes = [(3, 5), (40, 30), (4, 6, 2, 2)]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes for dtype in (torch.float32, torch.bfloat16)]
    tensors[-2] = tensors[-2].to(memory_format=torch.channels_last)
    masks = [torch.rand_like(tensor, dtype=torch.float32) > 0.5 for tensor in tensors]
    expected = [torch.where(mask, tensor, 0) for tensor, mask in zip(tensors, masks, strict=True)]
    for tensor, mask in zip(tensors, masks, strict=True):
        tensor[~mask] = float("nan")
    here = [tensor.to(route.device) for tensor in tensors]
    with dispatch(route):
        mask_tensors(here, [mask.to(route.device) for mask in masks])
    assert all(torch.equal(tensor.cpu(), wanted) for tensor, wanted in zip(here, expected, strict=True))
