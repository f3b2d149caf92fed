"""Multihead attention with its projections, layer norm and residual."""

from .checks import check_dropout, check_heads
from .masks import Mask, MaskKind, broadcastable, check_mask, make_mask
from .op import FAMILY, NORM_EPS, attend, attention, dot_product_attention, dropout_add
