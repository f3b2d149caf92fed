"""Architectures of timm with random weights: the smallest of a family, on images of 64 pixels."""

from __future__ import annotations

from typing import Any

import timm
import torch.nn.functional as F
from torch import Tensor

from .cases import Case, Entry, ids, rand

SIDE = 64
# By how the size of the images is told.
MODELS = {
    "as an argument": """
        cait_xxs24_224 coat_tiny convit_tiny deit_tiny_patch16_224 efficientformerv2_s0 efficientvit_m0 gcvit_xxtiny
        gmlp_ti16_224 levit_128s maxvit_pico_rw_256 mobileone_s1 pit_ti_224 repvit_m1 vit_dwee_patch16_reg1_gap_256
        vit_tiny_patch16_dinov3_qkvb vit_tiny_r_s16_p8_224 visformer_tiny
        xcit_nano_12_p8_224
    """,
    "not": """
        convnext_zepto_rms cpubone_nano crossvit_tiny_240 cs3darknet_focus_s cspnext_tiny densenet121 dla46x_c dpn68
        edgenext_xx_small efficientnet_b0 efficientvim_m1 efficientvit_b0 ese_vovnet19b_slim_dw fasternet_t0 fastvit_t8
        ghostnet_050 hardcorenas_b hgnetv2_b0 hrnet_w18_small iformer_t inception_next_atto lcnet_035 lcnetv2_small
        legacy_seresnet18 lowformer_b0 mambaout_femto mobilevit_xxs nf_regnet_b0 poolformerv2_s12 pvt_v2_b0 regnetx_002
        repghostnet_050 resnest14d resnet10t resnetv2_18 rexnet_100 shvit_s1 skresnet18 starnet_s050 swiftformer_xs
        tiny_vit_5m_224
    """,
    "by the model": """
        test_byobnet test_coatnet test_convnext test_convnext2 test_convnext3 test_efficientnet test_efficientnet_evos
        test_efficientnet_gn test_efficientnet_ln test_mambaout test_maxvit test_nfnet test_resnet test_vit test_vit2
        test_vit3 test_vit4 test_vit_relpos
    """,
}


def make(name: str, has_size: bool) -> Case:
    """Return a classifier of four images."""
    model: Any = timm.create_model(name, pretrained=False, num_classes=10, **({"img_size": SIDE} if has_size else {}))
    side = model.pretrained_cfg["input_size"][-1] if name.startswith("test_") else SIDE
    return Case(model, (rand(4, 3, side, side), ids(10, 4)), _loss)


def _loss(model: Any, images: Tensor, labels: Tensor) -> Tensor:
    outputs = model(images)
    outputs = outputs[0] if isinstance(outputs, tuple) else outputs
    return F.cross_entropy(outputs, labels)


def entry(name: str, has_size: bool) -> Entry:
    return Entry(name, "timm", lambda: make(name, has_size))


ENTRIES = [entry(name, how == "as an argument") for how, names in MODELS.items() for name in names.split()]
