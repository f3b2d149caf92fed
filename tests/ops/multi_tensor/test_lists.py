"""Applying rules: masters, stochastic rounding, flags and numbers on the device; by every route."""

import threading

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from apex.ops import _library
from apex.ops.multi_tensor import Lists, make_lists, rules, scale
from apex.ops.multi_tensor.codecs import NoisePlace
from apex.ops.multi_tensor.dispatch import groups_of, known_groups
from apex.ops.multi_tensor.torch_lists import TorchLists
from apex.ops.multi_tensor.triton_lists import TritonLists
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SIZES = (5, 300, 0, 64, 1)
HYPER = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1, "step": 2}


def make(device: str, *dtypes: torch.dtype) -> list[list[Tensor]]:
    return [[torch.rand(size, device=device).to(dtype) for size in SIZES] for dtype in dtypes]


def exact(slots: list[list[Tensor]]) -> list[list[Tensor]]:
    """Parameters, moments after an AdamW step written out in float64."""
    results = []
    for p, g, m, v in zip(*([tensor.double() for tensor in tensors] for tensors in slots), strict=True):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        p = p * (1 - 0.1 * 0.1) - 0.1 * (m / (1 - 0.9**2)) / ((v / (1 - 0.99**2)).sqrt() + 1e-6)
        results.append((p, m, v))
    return [list(column) for column in zip(*results, strict=True)]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 4, (torch.float16, torch.float16, torch.float32, torch.float32)])
def test_adam_step(dtypes: tuple[torch.dtype, ...], route: Route) -> None:
    slots = make(route.device, *dtypes)
    expected = exact(slots)
    with _library.implementation(route.implementation):
        lists = make_lists([*slots, None])
        assert isinstance(lists, TritonLists if route.implementation == "triton" else TorchLists)
        lists.apply(rules.ADAM, HYPER, (True, False))
    for slot, wanted in zip((0, 2, 3), expected, strict=True):
        for tensor, value in zip(slots[slot], wanted, strict=True):
            assert_close(tensor, value)


@pytest.mark.parametrize("route", routes())
def test_numbers_on_the_device_and_a_copy_in_half_precision(route: Route) -> None:
    slots = make(route.device, torch.float32, torch.bfloat16, torch.float32, torch.float32)
    copies = [torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in slots[0]]
    expected = exact([slots[0], [g * 0.5 for g in slots[1]], *slots[2:]])
    number = lambda value: torch.tensor(value, dtype=torch.float64, device=route.device)  # noqa: E731
    hyper = {**HYPER, "lr": number(0.1), "step": number(2.0)}
    zero, half = torch.zeros(1, device=route.device), torch.full((1,), 0.5, device=route.device)
    with _library.implementation(route.implementation):
        make_lists([*slots, None], copies).apply(rules.ADAM, hyper, (True, False), noop=zero, grad_scale=half)
    for tensor, copy, value in zip(slots[0], copies, expected[0], strict=True):
        assert_close(tensor, value)
        assert_close(copy, tensor.double())
        # Triton's interpreter cuts off where hardware rounds to nearest.
        assert route == Route("cpu", "triton") or torch.equal(copy, tensor.bfloat16())


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_noop_leaves_everything(dtype: torch.dtype, route: Route) -> None:
    slots = make(route.device, *(torch.float32,) * 4)
    before = [tensor.clone() for tensors in slots for tensor in tensors]
    flag = torch.ones(1, dtype=dtype, device=route.device)
    with _library.implementation(route.implementation):
        make_lists([*slots, None]).apply(rules.ADAM, HYPER, (True, False), noop=flag)
    assert_equal_bits([tensor for tensors in slots for tensor in tensors], before)


@pytest.mark.parametrize("route", routes())
def test_stochastic_rounding_is_right_on_average_and_repeatable(route: Route) -> None:
    """A parameter of 1 minus steps of 1/1024 never moves when rounded to nearest: bfloat16 has 1/256 below 1."""
    runs = []
    with _library.implementation(route.implementation):
        for _ in range(2):
            params = [torch.ones(4000 if route.device == "cuda" else 1000, dtype=torch.bfloat16, device=route.device)]
            grads = [torch.full_like(params[0], 1 / 1024)]
            lists = make_lists([params, grads, None, None, None])
            for seed in range(1, 17):
                lists.apply(rules.PLAIN_SGD, {"lr": 1.0}, seed=seed)
            runs.append(params[0])
    assert_equal_bits(runs[:1], runs[1:])
    assert runs[0].float().mean().item() == pytest.approx(1 - 16 / 1024, abs=1e-3)
    assert runs[0].unique().numel() > 3
    nearest = torch.ones(3, dtype=torch.bfloat16) - 1 / 1024
    assert nearest.eq(1).all()


@pytest.mark.parametrize("route", routes())
def test_stochastic_rounding_of_shards_has_the_bits_of_the_whole(route: Route) -> None:
    """Rows, columns, and columns of rows."""
    torch.manual_seed(3)
    values, gradients = torch.randn(12, 20).bfloat16(), torch.randn(12, 20).bfloat16()

    def rounded(places: list[NoisePlace], *cut: slice) -> torch.Tensor:
        param, gradient = (each[cut].clone(memory_format=torch.contiguous_format) for each in (values, gradients))
        others = [torch.zeros(3, dtype=torch.bfloat16) for _ in range(2)]
        params, grads = (
            [each.to(route.device) for each in some] for some in zip(others, (param, gradient), strict=True)
        )
        with _library.implementation(route.implementation):
            lists = make_lists([params, grads, None, None, None])
            lists.noise_places = torch.tensor(places, device=route.device) if places else None
            lists.apply(rules.PLAIN_SGD, {"lr": 0.125}, seed=77)
        return params[1]

    other, everything = NoisePlace(0, 0, 3, 3), rounded([], slice(None))
    for rows, columns in ((slice(5, 12), slice(0, 20)), (slice(0, 12), slice(7, 11)), (slice(3, 4), slice(10, 20))):
        run = columns.stop - columns.start
        place = NoisePlace(1, rows.start * 20 + columns.start, run, 20)
        assert_equal_bits([rounded([other, place], rows, columns)], [everything[rows, columns].contiguous()])


def test_stochastic_rounding_has_the_same_bits_on_both_paths() -> None:
    pytest.importorskip("triton")
    results = []
    for implementation in ("torch", "triton"):
        torch.manual_seed(3)
        params, grads = ([torch.randn(size).bfloat16() for size in SIZES] for _ in range(2))
        grads[1][0], grads[1][1] = float("inf"), float("nan")
        with _library.implementation(implementation):
            make_lists([params, grads, None, None, None]).apply(rules.PLAIN_SGD, {"lr": 0.125}, seed=77)
        assert params[1][1].isnan()
        params[1][1] = 0.0  # which NaN it is depends on the processor
        results.append(params)
    assert_equal_bits(*results)


@pytest.mark.parametrize("route", routes())
def test_odd_offsets_and_strides(route: Route) -> None:
    """Views that start anywhere and tensors whose memory is in another order or has holes."""
    base = [torch.rand(700, device=route.device) for _ in range(4)]
    for cut in (
        lambda t: t[3:400],
        lambda t: t[1:401].view(4, 4, 5, 5).contiguous(memory_format=torch.channels_last),
        lambda t: t[:600].view(20, 30).t(),
        lambda t: t[:600].view(20, 30)[:, ::3],
    ):
        slots = [[cut(tensor.clone())] for tensor in base]
        expected = exact(slots)
        with _library.implementation("auto" if route.implementation == "triton" else "torch"):
            make_lists([*slots, None]).apply(rules.ADAM, HYPER, (True, False))
        assert_close(slots[0][0], expected[0][0])
        assert_close(slots[3][0], expected[2][0])


@pytest.mark.parametrize("route", routes())
def test_measured_sums_go_into_the_next_pass(route: Route) -> None:
    tensors = make(route.device, torch.float32)[0]
    with _library.implementation(route.implementation):
        lists = make_lists([None, tensors, None, None, None])
        found = lists.apply(rules.SQUARE_SUM, {})
        total = lists.total(found, rules.SQUARE_SUM, root=True)
    assert found.shape == (len(SIZES), 2)
    assert_close(found[:, 0], torch.stack([tensor.double().square().sum() for tensor in tensors]), reduction=300)
    assert_close(total, torch.cat(tensors).double().norm().reshape(1))


@pytest.mark.parametrize("route", routes())
def test_a_pass_that_measures_writes_no_copy(route: Route) -> None:
    slots = make(route.device, torch.float32, torch.bfloat16)
    copies = [torch.full_like(tensor, 3.0, dtype=torch.bfloat16) for tensor in slots[0]]
    with _library.implementation(route.implementation):
        lists = make_lists([*slots, None, None, None], copies)
        lists.apply(rules.SQUARE_SUM, {})
        assert all(copy.eq(3.0).all() for copy in copies)
        lists.apply(rules.PLAIN_SGD, {"lr": 0.0})
    for copy, tensor in zip(copies, slots[0], strict=True):
        assert_close(copy, tensor.double())


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [True, False])
def test_cuda_graph(warm: bool) -> None:
    """Gradients that are made inside the graph have other addresses than before; a replay must find them again."""
    slots = make("cuda", *(torch.float32,) * 4)
    twin = [[tensor.clone() for tensor in tensors] for tensors in slots]
    lists = make_lists([*slots, None]) if warm else None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = [tensor * 2 for tensor in slots[1]]
        if lists is None:
            lists = make_lists([slots[0], gradients, *slots[2:], None])
        lists.point_to([slots[0], gradients, *slots[2:], None])
        lists.apply(rules.ADAM, HYPER, (True, False))
    lists.point_to([*slots, None])  # an eager step in between must not disturb the graph's table
    graph.replay()
    graph.replay()
    doubled = [tensor * 2 for tensor in twin[1]]  # held: lists keep addresses, not tensors
    eager = make_lists([twin[0], doubled, *twin[2:], None])
    for _ in range(2):
        eager.apply(rules.ADAM, HYPER, (True, False))
    assert_equal_bits(slots[0], twin[0])


@pytest.mark.parametrize("route", routes())
def test_layouts(route: Route) -> None:
    """Kernels take channels-last tensors, and no other mixture of layouts; the numbers are the same."""
    channels_last = torch.randn(4, 3, 2, 2, device=route.device).to(memory_format=torch.channels_last)
    pointwise = torch.randn(4, 3, 1, 1, device=route.device)
    pointwise_too = pointwise.as_strided((4, 3, 1, 1), (3, 1, 3, 3))  # as contiguous as the other
    plain = torch.randn(4, 3, 2, 2, device=route.device)
    gaps = torch.randn(4, 6, 2, 2, device=route.device)[:, ::2]
    for inputs, like, fits in (
        ([channels_last, pointwise, plain], [channels_last, pointwise_too, plain], True),
        ([channels_last, pointwise], [plain, pointwise], False),
        ([plain, pointwise], [channels_last, pointwise], False),
        ([gaps, plain], [gaps, plain], False),
    ):
        outputs = [torch.empty_like(tensor) for tensor in like]
        if like[0] is gaps:
            outputs[0] = torch.empty(4, 6, 2, 2, device=route.device)[:, ::2]
        for _ in range(2):  # the second time with tables that are there
            with _library.implementation(route.implementation):
                scale(inputs, outputs, 0.5)
                assert (known_groups((outputs, inputs)) is not None) is (fits and route.implementation == "triton")
            for output, tensor in zip(outputs, inputs, strict=True):
                assert torch.equal(output, tensor * 0.5)
                output.zero_()


@pytest.mark.parametrize("route", [parameter for parameter in routes() if parameter.id == "interpreter"])
def test_threads_do_not_share_tables(route: Route) -> None:
    """Tensors of the same sizes that another thread scales do not take the place of those that are about to be."""
    mine, theirs = ([torch.ones(40, device=route.device) for _ in range(2)] for _ in range(2))

    def found(tensors: list[Tensor]) -> Lists:
        ((_, lists),) = groups_of((tensors, tensors), ("outputs", "inputs"))
        return lists

    with _library.implementation(route.implementation):
        for _ in range(3):  # made, known by its sizes, known by its tensors
            lists = found(mine)
            other = threading.Thread(target=found, args=(theirs,))
            other.start()
            other.join()
            lists.apply(rules.SCALE, {"factor": 2.0})
    assert [tensor.unique().item() for tensor in (*mine, *theirs)] == [8.0, 8.0, 1.0, 1.0]


def test_tables_are_found_only_where_kernels_may_run() -> None:
    """PyTorch's operators take over while torch.func, a forward-mode derivative or a trace looks on, or by request."""
    pytest.importorskip("triton")
    tensors = [torch.ones(41), torch.ones(43)]
    found = []

    def look(x: Tensor) -> Tensor:
        found.append(known_groups((tensors, tensors)) is not None)
        return x.sum()

    with _library.implementation("triton"):
        scale(tensors, tensors, 1.0)
        look(tensors[0])
        torch.func.grad(look)(torch.ones(2))
        torch.jit.trace(look, (torch.ones(2),), check_trace=False)
        with forward_ad.dual_level():
            look(tensors[0])
    with _library.implementation("torch"):
        look(tensors[0])
    assert found == [True, False, False, False, False]
