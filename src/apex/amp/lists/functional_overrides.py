"""Functions of `torch.nn.functional` by their dtype under O1; BFLOAT16_FUNCS is for O4."""

import torch

from ...ops.autocast.rules import BAN_MESSAGE, BANNED
from .torch_overrides import CONVOLUTIONS

MODULE = torch.nn.functional

FP16_FUNCS = [*CONVOLUTIONS, "linear", "scaled_dot_product_attention"]

BFLOAT16_FUNCS = list(FP16_FUNCS)

# `gelu` is not listed: it runs in its input's dtype, with float32 inside.
FP32_FUNCS = [
    *("interpolate", "grid_sample", "softplus", "softmin", "log_softmax", "softmax"),
    *("layer_norm", "group_norm", "local_response_norm", "normalize", "cosine_similarity", "pdist"),
    *("poisson_nll_loss", "cosine_embedding_loss", "cross_entropy", "hinge_embedding_loss", "huber_loss", "kl_div"),
    *("l1_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss"),
    *("multi_margin_loss", "nll_loss", "binary_cross_entropy_with_logits", "smooth_l1_loss", "soft_margin_loss"),
    *("triplet_margin_loss", "ctc_loss"),
]

# A tuple, because changing it would have no effect: `amp.init(allow_banned=True)` lets them run, in float32.
BANNED_FUNCS = ((BANNED, BAN_MESSAGE),)
