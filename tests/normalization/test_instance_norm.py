import pytest
import torch
from torch import nn

from apex.normalization import InstanceNorm3dNVFuser


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("track", [True, False])
def test_equals_torch_in_training_and_evaluation(affine: bool, track: bool) -> None:
    ours = InstanceNorm3dNVFuser(3, affine=affine, track_running_stats=track)
    theirs = nn.InstanceNorm3d(3, affine=affine, track_running_stats=track)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 4, 5, 6)
    for _ in range(2):
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    for mine, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other)


def test_keeps_channels_last() -> None:
    x = torch.randn(2, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d)
    output = InstanceNorm3dNVFuser(3)(x)
    assert output.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(output, nn.InstanceNorm3d(3)(x))


def test_other_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match="5-D"):
        InstanceNorm3dNVFuser(3)(torch.randn(2, 3, 4, 5))
