"""The launcher: recording, the cached path, alignment, devices and streams."""

from types import SimpleNamespace

import pytest
import torch

from apex.ops import _device, _library, norm
from apex.ops.norm import op
from tests.support.harness import assert_close

pytest.importorskip("triton")

import triton
import triton.language as tl

from apex.ops import _launch
from apex.ops._launch import KERNELS, record_launches


def _import_norm_kernels() -> None:
    op.kernels_forward.norm_forward_rows, op.kernels_backward.norm_backward_rows, op.kernels_sums.sum_partials  # noqa: B018


def test_every_kernel_is_registered() -> None:
    _import_norm_kernels()
    assert set(KERNELS) >= {
        "norm_forward_rows",
        "norm_forward_long",
        "norm_backward_rows",
        "norm_backward_held",
        "norm_backward_wide",
        "norm_backward_row_means",
        "norm_backward_columns",
        "sum_partials",
    }


def test_recording_launches_nothing() -> None:
    x = torch.full((4, 16), 3.0)
    with _device.pretend(_device.INTERPRETER), record_launches() as collected:
        settings = (16, 1e-5, True, False, torch.float32, torch.float32)
        output, _ = op.launch_forward(x.to("meta"), None, None, *settings)
    assert output.is_meta
    assert [launch.prepared.kernel.name for launch in collected] == ["norm_forward_rows"]


def test_recording_asks_no_tensor_for_its_address() -> None:
    """A FakeTensor, of which a launch is planned, warns where that is done."""

    class WithoutAddress(torch.Tensor):
        def data_ptr(self) -> int:
            raise AssertionError

    x = torch.zeros(2).as_subclass(WithoutAddress)
    with record_launches() as launches:
        op.kernels_forward.norm_forward_rows.prepare((1,), num_warps=1)((x, None))
    assert launches[0].tensors[0] is x


class _Wrapper(torch.Tensor):
    """A tensor that has no memory itself, as a DTensor has none."""

    @staticmethod
    def __new__(cls, like: torch.Tensor):  # type: ignore[no-untyped-def]
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError(function)


def test_a_tensor_without_memory_is_refused_also_after_others_were_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.ones(4, 16), torch.ones(16)
    with _library.implementation("triton"), pytest.raises(TypeError, match="cannot take a _Wrapper"):
        norm.rms_norm(x, 16, _Wrapper(weight))
    _import_norm_kernels()
    launched: list[tuple] = []
    prepared = _launch.PreparedLaunch(KERNELS["sum_partials"], (1,), (2,), (3,), num_warps=1, num_stages=1)
    compiled = SimpleNamespace(run=lambda *arguments: launched.append(arguments), function=7, packed_metadata=(1, 1, 0))
    prepared._compiled[-1, x.dtype, None] = prepared._direct_launch(compiled, 2), 1
    monkeypatch.setattr(_launch, "current_device", lambda: -1)
    monkeypatch.setattr(_launch, "current_stream", lambda index: 5)
    prepared((x, None), (0.5,))
    assert launched == [(1, 1, 1, 5, 7, (1, 1, 0), None, None, None, x.data_ptr(), 0, 2, 0.5, 3)]
    with pytest.raises(TypeError, match="sum_partials cannot take a _Wrapper"):
        prepared((_Wrapper(x), None), (0.5,))


def test_kernels_for_addresses_that_are_no_multiples_of_16_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    _import_norm_kernels()
    prepared = _launch.PreparedLaunch(KERNELS["sum_partials"], (1,), (2,), (3,), num_warps=1, num_stages=1)
    monkeypatch.setattr(_launch, "current_device", lambda: -1)
    monkeypatch.setattr(_launch, "current_stream", lambda index: 5)
    launched: list[str] = []

    def launch_first(self, key, tensors, floats):  # type: ignore[no-untyped-def]
        name = f"program {len(self._compiled)}"
        self._compiled[key] = (lambda *arguments: launched.append(name), 0)

    monkeypatch.setattr(_launch.PreparedLaunch, "_launch_first", launch_first)
    memory = torch.ones(32)
    aligned, odd = memory[:16], memory[1:17]
    for _ in range(2):
        for pair in ((aligned, aligned), (odd, aligned), (aligned, odd), (odd, odd), (memory[4:20], aligned)):
            prepared(pair)
    # The first of these kinds, to which the last pair belongs, was launched once more.
    assert launched == [f"program {kind}" for kind in (0, 0, 1, 2, 3, 0)]


def test_integers_given_for_floats_are_made_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would compile the kernel for the value of an integer, and the next call would launch that again."""
    given: list[tuple] = []
    monkeypatch.setattr(
        _launch.PreparedLaunch, "_launch_first", lambda self, key, tensors, floats: given.append(floats)
    )
    with _library.implementation("triton"):
        norm.rms_norm(torch.ones(4, 16), 16, eps=1)
    assert given == [(1.0,)]
    assert type(given[0][0]) is float


@pytest.mark.gpu
def test_an_integer_eps_is_not_that_of_the_next_call() -> None:
    x = torch.randn(64, 1000, device="cuda")
    _import_norm_kernels()
    with _library.implementation("triton"):
        _device.forget_launches()
        for eps in (1, 2, 1e-5, 0):
            output = norm.rms_norm(x, 1000, eps=eps)
            assert_close(output, torch.nn.functional.rms_norm(x.double(), (1000,), eps=eps))


def test_pretended_device_ends_with_its_block() -> None:
    other = _device.DeviceFacts("other", "cuda", multiprocessors=7, warp_size=32, shared_memory=1 << 16)
    with _device.pretend(other):
        assert _device.facts(torch.device("cpu")) is other
    assert _device.facts(torch.device("cpu")) is _device.INTERPRETER


def test_rules_that_were_asked_by_device_answer_anew_for_a_pretended_one() -> None:
    """The keys are the same: of tensors without memory, say, which stand for those of every GPU."""
    arguments = ((4096, 512), 512, (torch.float32,) * 5, (True, False, True), torch.device("meta"))
    partials = []
    for multiprocessors in (7, 14):
        other = _device.DeviceFacts("other", "cuda", multiprocessors, warp_size=32, shared_memory=1 << 17)
        with _device.pretend(other):
            partials.append(norm.op._backward_launches(*arguments).partials)
    assert partials[0] < partials[1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_empty_tensors(device: str) -> None:
    there = torch.device(device)
    for sizes in ((7,), (2, 5), (3, 4, 5), (2, 1, 3), ()):
        strides = torch.empty(sizes).stride()
        assert _device.contiguous_strides(sizes) == strides
        made = _device.empty_on(there)(sizes, strides, torch.bfloat16)
        assert (made.shape, made.stride(), made.dtype, made.device) == (sizes, strides, torch.bfloat16, there)
    last = _device.empty_on(there)((2, 3, 4, 5), (60, 1, 15, 3), torch.float32)
    assert last.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises((TypeError, RuntimeError)):  # on every device, so that no launch passes torch.Size
        _device.empty_on(there)(torch.Size((2, 3)), (3, 1), torch.float32)


@pytest.mark.gpu
def test_facts_of_a_gpu() -> None:
    facts = _device.facts(torch.device("cuda", 0))
    assert facts.multiprocessors == torch.cuda.get_device_properties(0).multi_processor_count
    assert facts.shared_memory >= 48 * 1024
    assert _device.facts(torch.device("cuda")) is facts


@pytest.mark.gpu
def test_the_cached_path_gives_the_same_bits_as_the_first_launch() -> None:
    x = torch.randn(64, 1000, device="cuda")
    _import_norm_kernels()
    with _library.implementation("triton"):
        _device.forget_launches()
        results = [norm.rms_norm(x, 1000) for _ in range(3)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.gpu
def test_tensors_at_any_address_are_launched_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles kernels for addresses that are multiples of 16, and others for those that are not."""
    memory = torch.randn(64 * 1000 + 4, device="cuda")
    inputs = [memory[first : first + 64 * 1000].view(64, 1000) for first in (0, 1, 4, 2)]
    weights = [torch.rand(1001, device="cuda")[first:][:1000] for first in (0, 1)]
    pairs = [(x, weight) for x in inputs for weight in weights]
    _import_norm_kernels()
    with _library.implementation("triton"):
        for _ in range(2):
            for x, weight in pairs:
                assert_close(
                    norm.rms_norm(x, 1000, weight, eps=1e-5),
                    torch.nn.functional.rms_norm(x.double(), (1000,), weight.double(), eps=1e-5),
                )
            monkeypatch.delattr(_launch.PreparedLaunch, "_launch_first", raising=False)


@pytest.mark.gpu
def test_runs_on_the_current_stream() -> None:
    """A kernel on another stream would read the input before the delayed copy has filled it."""
    source = torch.randn(4096, 1024, device="cuda")
    x = torch.zeros_like(source)
    with _library.implementation("triton"):
        expected = norm.rms_norm(source, 1024)
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            x.copy_(source)
            actual = norm.rms_norm(x, 1024)
        torch.cuda.synchronize()
    assert torch.equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_device_of_its_tensors() -> None:
    x = torch.randn(8, 64, device="cuda:1")
    with torch.cuda.device(0), _library.implementation("triton"):
        for _ in range(2):
            output = norm.rms_norm(x, 64)
            assert output.device == x.device
            assert_close(output, torch.nn.functional.rms_norm(x.double(), (64,), eps=1e-5))


def dot(a, b):  # type: ignore[no-untyped-def]
    return tl.dot(a, b)


def test_a_function_may_be_named_as_an_attribute_that_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    function = triton.JITFunction(dot)
    monkeypatch.setitem(globals(), "dot", function)
    _launch.settle_hash(function)
    assert function.hash is not None
