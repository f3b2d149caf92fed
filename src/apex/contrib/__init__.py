"""Further fused modules and optimizers; subpackages are imported at first use."""

from .._lazy import lazy_subpackages

__getattr__, __dir__ = lazy_subpackages(
    __name__,
    [
        "bottleneck",
        "clip_grad",
        "combine_tensors",
        "conv_bias_relu",
        "cudnn_gbn",
        "fmha",
        "focal_loss",
        "gpu_direct_storage",
        "group_norm",
        "groupbn",
        "index_mul_2d",
        "layer_norm",
        "llm_losses",
        "multihead_attn",
        "nccl_allocator",
        "nccl_p2p",
        "openfold_triton",
        "optimizers",
        "peer_memory",
        "sparsity",
        "torchsched",
        "transducer",
        "xentropy",
    ],
)
