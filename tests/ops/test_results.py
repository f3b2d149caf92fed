"""Results of plans: sizes, strides, dtype and device are those that were planned, and of every shape its own."""

import pytest
import torch

from apex.ops import _device, _library, norm
from apex.ops._results import Like, contiguous_strides, like, maker
from tests.harness import Route, routes


@pytest.mark.parametrize("sizes", [(), (3,), (2, 3, 4), (1, 5), (4, 0, 2)])
def test_strides_of_a_contiguous_tensor(sizes: tuple[int, ...]) -> None:
    assert contiguous_strides(sizes) == torch.empty(sizes).stride()


def test_what_a_parameter_is_like() -> None:
    assert like(None) is None
    assert like(torch.nn.Parameter(torch.empty(2, 3, dtype=torch.float16))) == Like((2, 3), torch.float16)


def test_there_is_no_stream_off_a_gpu() -> None:
    assert _device.stream_here(torch.device("cpu").index) is None
    assert _device.stream_here(torch.empty(1, device="meta").device.index) is None


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_maker_makes_what_it_was_told(device: str) -> None:
    like_this = torch.empty(2, 8, 5, 5, dtype=torch.bfloat16, device=device).to(memory_format=torch.channels_last)
    where = like_this.device
    stream = _device.stream_here(where.index)
    assert (stream is None) == (device != "cuda")
    for make, strides in (
        (maker(like_this.shape, like_this.dtype, where, like_this.stride()), like_this.stride()),
        (maker(like_this.shape, like_this.dtype, where), (200, 25, 5, 1)),
    ):
        made = [make(stream), make(stream), make(None)]
        assert all(each.shape == like_this.shape and each.stride() == strides for each in made)
        assert all(each.dtype == like_this.dtype and each.device == where for each in made)
        assert device == "meta" or len({each.data_ptr() for each in made}) == 3


@pytest.mark.gpu
def test_the_stream_of_the_current_device() -> None:
    index = torch.cuda.current_device()
    assert _device.stream_here(index) == torch.cuda.current_stream().cuda_stream == 0
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        assert _device.stream_here(index) == other.cuda_stream


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_results_lie_on_the_device_of_the_plan() -> None:
    where = torch.device("cuda", 1)
    make = maker((4,), torch.float32, where)
    with torch.cuda.device(0):
        assert _device.stream_here(1) is None
        assert make(_device.stream_here(1)).device == where
    with torch.cuda.device(1):
        assert make(_device.stream_here(1)).device == where


@pytest.mark.parametrize("route", routes())
def test_as_many_rows_of_another_shape_have_results_of_their_own(route: Route) -> None:
    with _library.implementation(route.implementation):
        for sizes, over in (((2, 3, 32), (32,)), ((6, 32), (32,)), ((6, 4, 8), (4, 8)), ((6, 4, 8), (8,))):
            x = torch.randn(sizes, device=route.device, requires_grad=True)
            weight, bias = (torch.rand(over, device=route.device, requires_grad=True) for _ in range(2))
            output = norm.layer_norm(x, over, weight, bias)
            gradients = torch.autograd.grad(output, (x, weight, bias), torch.randn_like(output))
            assert output.shape == x.shape
            assert [each.shape for each in gradients] == [x.shape, weight.shape, bias.shape]
