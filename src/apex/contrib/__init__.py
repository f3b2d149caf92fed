"""Further fused modules and optimizers; subpackages are imported at first use."""

from .._lazy import lazy_subpackages

__getattr__, __dir__ = lazy_subpackages(
    __name__,
    [
        "clip_grad",
        "combine_tensors",
        "conv_bias_relu",
        "fmha",
        "focal_loss",
        "group_norm",
        "index_mul_2d",
        "layer_norm",
        "multihead_attn",
        "openfold_triton",
        "optimizers",
        "transducer",
        "xentropy",
    ],
)
