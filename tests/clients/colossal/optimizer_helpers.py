"""Two helpers of the tests of optimizers, without the helpers of distributed tensors beside them."""

import torch


def force_assign_grad(p, g_dtype, grad=None):
    """Give a parameter a gradient of another dtype."""
    original, p.data = p.data, p.data.to(g_dtype)
    p.grad = (torch.randn_like(p) if grad is None else grad).to(g_dtype)
    p.data = original


def setup_param_groups(model):
    """Return groups with and without weight decay."""
    plain = {id(p) for n, p in model.named_parameters() if "bias" in n or "LayerNorm.weight" in n}
    groups = [[p for p in model.parameters() if (id(p) in plain) == is_plain] for is_plain in (False, True)]
    return [{"params": params, "weight_decay": decay} for params, decay in zip(groups, (0.1, 0.0), strict=True)]
