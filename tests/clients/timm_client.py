"""timm: its fused optimizers, its ApexScaler and its norms on apex's kernels.

timm asks for a GPU before it makes an optimizer of apex, and is told here that there is one. It imports torchvision,
which needs a build for exactly this PyTorch. Where there is none a stand-in without content takes its place: nothing
here transforms images.
"""

import sys
from unittest import mock

try:
    import torchvision  # noqa: F401

    STAND_IN = ""
except (ImportError, RuntimeError):
    STAND_IN = " (without torchvision)"
    parts = ("datasets", "ops", "ops.misc", "transforms", "transforms.functional", "utils")
    for name in ("torchvision", *(f"torchvision.{part}" for part in parts)):
        sys.modules[name] = mock.MagicMock()
    sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d = type("FrozenBatchNorm2d", (), {})
    sys.modules["torchvision.models.feature_extraction"] = None  # timm does without it

import timm
import torch
from checks import falls, run
from timm.optim import create_optimizer_v2
from timm.utils import ApexScaler

import apex
from apex import amp

OPTIMIZERS = {
    "fusedsgd": (apex.optimizers.FusedSGD, 0.1),
    "fusedadam": (apex.optimizers.FusedAdam, 2e-3),
    "fusedadamw": (apex.optimizers.FusedAdam, 2e-3),
    "fusedlamb": (apex.optimizers.FusedLAMB, 1e-2),
    "fusednovograd": (apex.optimizers.FusedNovoGrad, 1e-2),
}


def make_optimizer(model: torch.nn.Module, **settings: object) -> torch.optim.Optimizer:
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        return create_optimizer_v2(model, **settings)


def model_and_data() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=4
    )
    labels = torch.arange(16) % 4
    return model, torch.randn(4, 3, 32, 32)[labels] + 0.1 * torch.randn(16, 3, 32, 32), labels


def check_fused_optimizers() -> str:
    """`create_optimizer_v2` with each of its fused optimizers, on a vision transformer"""
    ends = []
    for name, (kind, rate) in OPTIMIZERS.items():
        torch.manual_seed(0)
        model, images, labels = model_and_data()
        optimizer = make_optimizer(model, opt=name, lr=rate, weight_decay=0.01, momentum=0.9)
        assert isinstance(optimizer, kind)
        losses = []
        for _ in range(40):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        ends.append(f"{name}: {falls(losses)}")
    return "; ".join(ends) + STAND_IN


def check_apex_scaler() -> str:
    """`ApexScaler` as in timm's train.py: O1, clipping, its state saved and loaded"""
    model, images, labels = model_and_data()
    optimizer = make_optimizer(model, opt="fusedadam", lr=2e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    scaler = ApexScaler()
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        losses.append(loss.item())
    state = scaler.state_dict()
    assert state == amp.state_dict()
    assert state["loss_scaler0"]["unskipped"] > 0
    scaler.load_state_dict(state)
    amp.shutdown()
    return falls(losses) + STAND_IN


def check_norms() -> str:
    """`timm.layers.LayerNorm` and `RmsNorm` in fast-norm mode, which call `apex.normalization.fused_layer_norm`"""
    timm.layers.set_fast_norm(True)
    for norm in (timm.layers.LayerNorm(32), timm.layers.RmsNorm(32)):
        x = torch.randn(4, 32, requires_grad=True)
        fast = norm(x)
        timm.layers.set_fast_norm(False)
        plain = type(norm)(32)(x)
        timm.layers.set_fast_norm(True)
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)
        fast.sum().backward()
    timm.layers.set_fast_norm(False)
    return "equal those of PyTorch" + STAND_IN


run(__name__, "timm")
