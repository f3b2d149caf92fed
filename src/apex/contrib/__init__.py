"""Further fused modules and optimizers; subpackages are imported at first use."""

from .._lazy import lazy_subpackages

__getattr__, __dir__ = lazy_subpackages(
    __name__,
    [
        "clip_grad",
        "combine_tensors",
        "group_norm",
        "layer_norm",
        "multihead_attn",
        "optimizers",
    ],
)
