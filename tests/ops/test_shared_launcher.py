"""The launcher that all kernels share under Triton 3.6."""

import math
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from apex.normalization import FusedLayerNorm
from apex.ops import _launch, _shared_launcher

NO_SCRATCH = {"global_scratch_size": 0, "profile_scratch_size": 0}
METADATA = SimpleNamespace(launch_cooperative_grid=False, launch_pdl=False, **NO_SCRATCH)
HEAD = (5, 1, 1, 9, 77, False, False, None, None, (4, 1, 128), None, None, None)
TYPES = {"x": "*fp32", "y": "constexpr", "n": "i32", "one": "constexpr", "m": "i64", "eps": "fp32", "B": "constexpr"}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments of the C function, which is not compiled."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(_shared_launcher, "_c_function", lambda capacity: lambda *arguments: calls.append(arguments))
    return calls


def _kernel(types: dict[str, Any], metadata: Any = METADATA) -> SimpleNamespace:
    launcher = _shared_launcher.make(SimpleNamespace(signature=types, constants={}), metadata)
    return SimpleNamespace(run=launcher, function=77, packed_metadata=(4, 1, 128))


def _bits(number: float) -> int:
    return struct.unpack("i", struct.pack("f", number))[0]


@pytest.mark.parametrize(
    ("number", "bits"), [(1.5, _bits(1.5)), (-1e300, _bits(-math.inf)), (math.nan, _bits(math.nan))]
)
def test_parameters_are_passed_as_integers_without_constants(
    launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, number: float, bits: int
) -> None:
    kernel = _kernel(TYPES)
    direct = _launch.PreparedLaunch(None, (5,), (12, 1, 2**33), (64,), 4, 1)._direct_launch(kernel, 2)  # type: ignore[arg-type]
    direct(9, [0x1000, 0], (number,))
    arguments = (0x1000, 12, 2**33, bits)
    assert launched.pop() == (*HEAD, *arguments, *[0] * 16)
    x = torch.zeros(3)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    kernel.run(*HEAD[:5], *HEAD[9:], x, None, 12, 1, 2**33, number, 64)
    assert launched.pop() == (*HEAD, x.data_ptr(), *arguments[1:], *[0] * 16)


def test_memory_that_a_gpu_cannot_read_is_refused(launched: list[tuple[Any, ...]]) -> None:
    kernel = _kernel({"x": "*fp32"})
    with pytest.raises(ValueError, match="cannot read a CPU tensor"):
        kernel.run(*HEAD[:5], *HEAD[9:], torch.zeros(3))
    kernel.run(*HEAD[:5], *HEAD[9:], torch.zeros(0))  # has no memory
    assert launched == [(*HEAD, *[0] * 20)]


def test_unsigned_integers_keep_their_bits(launched: list[tuple[Any, ...]]) -> None:
    kernel, seed = _kernel({"x": "*fp32", "seed": "u64"}), 2**64 - 5
    _launch.PreparedLaunch(None, (5,), (seed,), (), 4, 1)._direct_launch(kernel, 1)(9, [0x1000], ())  # type: ignore[arg-type]
    kernel.run(*HEAD[:5], *HEAD[9:], torch.zeros(0), seed)
    assert [call[len(HEAD) + 1] for call in launched] == [-5, -5]


def test_several_tensors_of_which_one_is_absent_and_no_floats(launched: list[tuple[Any, ...]]) -> None:
    types = {"x": "*fp32", "y": "constexpr", "z": "*bf16", "n": "i32"}
    direct = _launch.PreparedLaunch(None, (5,), (12,), (), 4, 1)._direct_launch(_kernel(types), 3)  # type: ignore[arg-type]
    direct(9, [0x1000, 0, 0x2000], ())
    assert launched == [(*HEAD, 0x1000, 0x2000, 12, *[0] * 17)]


def test_a_kernel_of_many_parameters_has_a_larger_function(launched: list[tuple[Any, ...]]) -> None:
    direct = _launch.PreparedLaunch(None, (5,), (7,) * 40, (), 4, 1)._direct_launch(  # type: ignore[arg-type]
        _kernel({"x": "*fp32", **{f"n{index}": "i32" for index in range(40)}}), 1
    )
    direct(9, [0x1000], ())
    assert launched == [(*HEAD, 0x1000, *[7] * 40, *[0] * 23)]


@pytest.mark.parametrize(
    ("types", "scratch"),
    [
        pytest.param({"x": "tensordesc<fp32[8, 8]>"}, 0, id="descriptor"),
        pytest.param({"x": ("*fp32", "i32")}, 0, id="tuple"),
        pytest.param({f"n{index}": "i32" for index in range(65)}, 0, id="too many"),
        pytest.param({"x": "*fp32"}, 128, id="scratch memory"),
    ],
)
def test_other_kernels_get_tritons_own_launcher(
    monkeypatch: pytest.MonkeyPatch, types: dict[str, Any], scratch: int
) -> None:
    monkeypatch.setattr(_shared_launcher.nvidia, "CudaLauncher", lambda source, metadata: "Triton's")
    metadata = SimpleNamespace(**{**vars(METADATA), "profile_scratch_size": scratch})
    assert _kernel(types, metadata).run == "Triton's"


def test_the_drivers_launcher_is_restored_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def _init_handles(self) -> None:
            assert active.launcher_cls is _shared_launcher.make
            raise RuntimeError("no memory")

    active = SimpleNamespace(launcher_cls="Triton's")
    monkeypatch.setattr(_shared_launcher, "driver", SimpleNamespace(active=active))
    with pytest.raises(RuntimeError, match="no memory"):
        _shared_launcher.load(Kernel())
    assert active.launcher_cls == "Triton's"


@pytest.mark.gpu
@pytest.mark.skipif(not _launch.SHARES_LAUNCHER, reason="Triton has one function for all kernels itself")
def test_kernels_are_launched_without_c_code_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.nvidia import driver as nvidia

    layer = FusedLayerNorm(7000, elementwise_affine=False).cuda()
    x = torch.randn(1537, 7000, device="cuda", requires_grad=True)
    signatures: list[dict[int, str]] = []
    make = nvidia.make_launcher

    def recording(constants: Any, signature: dict[int, str], *rest: Any) -> str:
        signatures.append(signature)
        return make(constants, signature, *rest)

    monkeypatch.setattr(nvidia, "make_launcher", recording)
    for _ in range(2):
        y = layer(x)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert all(set(signature.values()) == {"i64"} for signature in signatures)
    wide = x.detach().double().requires_grad_()
    expected = torch.nn.functional.layer_norm(wide, (7000,), eps=layer.eps)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    expected_dx = torch.autograd.grad(expected, wide, torch.ones_like(wide))[0]
    torch.testing.assert_close(dx.double(), expected_dx, rtol=1e-5, atol=1e-5)
