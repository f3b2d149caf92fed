"""Experts of a mixture: rows sorted by expert, grouped products with a gated unit, a sum over each token's experts."""

from .main_grad import moe_experts_main_grad
from .op import FAMILY, MOE_EXPERTS, moe_experts
from .reference import ACTIVATIONS
