"""Streams of devices, as launches ask for them."""

import pytest
import torch

from apex.ops import _device


def test_there_is_no_stream_off_a_gpu() -> None:
    assert _device.stream_here(torch.device("cpu").index) is None
    assert _device.stream_here(torch.empty(1, device="meta").device.index) is None


@pytest.mark.gpu
def test_the_stream_of_the_current_device() -> None:
    index = torch.cuda.current_device()
    assert _device.stream_here(index) == torch.cuda.current_stream().cuda_stream == 0
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        assert _device.stream_here(index) == other.cuda_stream
