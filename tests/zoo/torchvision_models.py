"""Models of torchvision with random weights: classification, segmentation, detection, video and optical flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor

from .cases import Case, Entry, ids, rand

CLASSIFIERS = """
    convnext_tiny densenet121 efficientnet_b0 mnasnet0_5 mobilenet_v2 mobilenet_v3_small regnet_x_400mf
    regnet_y_400mf resnet18 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 swin_v2_t
"""
SEGMENTERS = "deeplabv3_mobilenet_v3_large fcn_resnet50 lraspp_mobilenet_v3_large"
DETECTORS = (
    "fasterrcnn_mobilenet_v3_large_320_fpn fcos_resnet50_fpn retinanet_resnet50_fpn ssdlite320_mobilenet_v3_large"
)


def classify(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    outputs = model(images)
    if hasattr(outputs, "aux_logits2"):  # GoogLeNet
        more = F.cross_entropy(outputs.aux_logits1, labels) + F.cross_entropy(outputs.aux_logits2, labels)
        return F.cross_entropy(outputs.logits, labels) + 0.3 * more
    return F.cross_entropy(outputs, labels)


def segment(model: Any, images: Tensor, masks: Tensor) -> Tensor:
    return F.cross_entropy(model(images)["out"], masks)


def detect(model: Any, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
    return sum(model(images, targets).values())  # type: ignore[return-value]


def follow(model: Any, first: Tensor, second: Tensor, flow: Tensor) -> Tensor:
    """Return the loss of RAFT, whose later refinements weigh more."""
    made = model(first, second, num_flow_updates=3)
    return sum((0.8 ** (len(made) - 1 - i) * F.l1_loss(each, flow) for i, each in enumerate(made)), torch.zeros(()))


def classifier(name: str, side: int = 64, **settings: Any) -> Case:
    model = torchvision.models.get_model(name, weights=None, num_classes=10, **settings)
    return Case(model, (rand(4, 3, side, side), ids(10, 4)), classify)


def segmenter(name: str) -> Case:
    model = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=5)
    return Case(model, (rand(2, 3, 64, 64), ids(5, 2, 64, 64)), segment)


def detector(name: str, **settings: Any) -> Case:
    sizes = {} if "320" in name else {"min_size": 96, "max_size": 128}
    model = torchvision.models.get_model(
        name, weights=None, weights_backbone=None, num_classes=5, **{**sizes, **settings}
    )
    targets = []
    for _ in range(2):
        corner = torch.rand(3, 2) * 40
        boxes = torch.cat([corner, corner + 20 + torch.rand(3, 2) * 30], dim=1)
        targets.append({"boxes": boxes, "labels": 1 + ids(4, 3)})
    return Case(model, ([torch.rand(3, 96, 96) for _ in range(2)], targets), detect)


def vision_transformer() -> Case:
    model = torchvision.models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10)
    return Case(model, (rand(4, 3, 32, 32), ids(10, 4)), classify)


def swin() -> Case:
    model = torchvision.models.SwinTransformer(
        [4, 4], 32, [1, 1, 1], [2, 4, 8], [4, 4], stochastic_depth_prob=0.0, num_classes=10
    )
    return Case(model, (rand(4, 3, 64, 64), ids(10, 4)), classify)


def maxvit() -> Case:
    model = torchvision.models.MaxVit((64, 64), 32, 2, [32, 64], [1, 1], 32, 0.0, num_classes=10)
    return Case(model, (rand(4, 3, 64, 64), ids(10, 4)), classify)


def video(name: str) -> Case:
    model = torchvision.models.get_model(name, weights=None, num_classes=10)
    return Case(model, (rand(2, 3, 4, 48, 48), ids(10, 2)), classify)


def raft() -> Case:
    model = torchvision.models.optical_flow.raft_small(weights=None)
    return Case(model, (rand(1, 3, 128, 128), rand(1, 3, 128, 128), rand(1, 2, 128, 128)), follow)


def entry(name: str, make: Callable[..., Case], *args: Any, **settings: Any) -> Entry:
    return Entry(name, "torchvision", lambda: make(*args, **settings))


ENTRIES = [
    *(entry(name, classifier, name) for name in CLASSIFIERS.split()),
    entry("googlenet", classifier, "googlenet", init_weights=False, aux_logits=True),
    entry("vision transformer", vision_transformer),
    entry("swin", swin),
    entry("maxvit", maxvit),
    *(entry(name, segmenter, name) for name in SEGMENTERS.split()),
    *(entry(name, detector, name) for name in DETECTORS.split()),
    entry("r3d_18", video, "r3d_18"),
    entry("raft_small", raft),
]
