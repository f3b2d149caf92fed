"""Builders of the original apex's extensions; their `load()` returns this package's module at once."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from .builder import CUDAOpBuilder, OpBuilder

# The builder; its file in the original, which names its build variable; and the module's name if it differs.
_TABLE = """
AmpCBuilder amp_C
ApexCBuilder apex_C
BnpBuilder bnp
DistributedAdamBuilder distributed_adam distributed_adam_cuda
DistributedLambBuilder distributed_lamb distributed_lamb_cuda
FastMultiheadAttnBuilder fast_multihead_attn
FocalLossBuilder focal_loss focal_loss_cuda
FusedAdamBuilder fused_adam fused_adam_cuda
FusedBiasSwiGLUBuilder fused_bias_swiglu
FusedConvBiasReluBuilder fused_conv_bias_relu
FusedDenseBuilder fused_dense fused_dense_cuda
FusedIndexMul2dBuilder fused_index_mul_2d
FusedLambBuilder fused_lamb fused_lamb_cuda
FusedLayerNormBuilder fused_layer_norm fused_layer_norm_cuda
FusedRopeBuilder fused_rope fused_rotary_positional_embedding
FusedWeightGradientMlpCudaBuilder fused_weight_gradient_mlp fused_weight_gradient_mlp_cuda
GenericScaledMaskedSoftmaxCudaBuilder generic_scaled_masked_softmax_cuda
MlpBuilder mlp mlp_cuda
NCCLAllocatorBuilder nccl_allocator _apex_nccl_allocator
NCCLP2PBuilder nccl_p2p nccl_p2p_cuda
PeerMemoryBuilder peer_memory peer_memory_cuda
ScaledMaskedSoftmaxCudaBuilder scaled_masked_softmax_cuda
ScaledSoftmaxCudaBuilder scaled_softmax_cuda
ScaledUpperTriangMaskedSoftmaxCudaBuilder scaled_upper_triang_masked_softmax_cuda
SyncBnBuilder syncbn
TransducerJointBuilder transducer_joint transducer_joint_cuda
TransducerLossBuilder transducer_loss transducer_loss_cuda
XentropyBuilder xentropy xentropy_cuda
"""


class _ReadyBuilder(CUDAOpBuilder):
    """A builder with nothing to compile."""

    def absolute_name(self) -> str:
        return self.NAME

    def sources(self) -> list[str]:
        return []

    def load(self, verbose: bool = True) -> ModuleType:
        """Return this package's module with the extension's functions."""
        return importlib.import_module(self.NAME)

    jit_load = load

    def builder(self) -> Any:
        raise TypeError(f"{self.NAME} has nothing to compile: leave it out of ext_modules; load() returns the module")


def _make(name: str, file: str, module: str = "") -> type[OpBuilder]:
    flag = "APEX_BUILD_CPP_OPS" if file == "apex_C" else "APEX_BUILD_CUDA_OPS"
    contents = {"NAME": module or file, "BUILD_VAR": f"APEX_BUILD_{file.upper()}", "INCLUDE_FLAG": flag}
    return type(name, (_ReadyBuilder,), {**contents, "__module__": f"apex.op_builder.{file}"})


BUILDERS: dict[str, type[OpBuilder]] = {row.split()[0]: _make(*row.split()) for row in _TABLE.strip().splitlines()}
ALL_OPS: dict[str, OpBuilder] = {builder.NAME: builder() for builder in BUILDERS.values()}


class BuilderUtils:
    """A lookup of builders by class name."""

    def get_op_builder(self, class_name: str) -> type[OpBuilder] | None:
        """Return the builder class, or None if there is none."""
        return BUILDERS.get(class_name)

    def create_op_builder(self, class_name: str) -> OpBuilder | None:
        """Return a new builder, or None if there is none."""
        return BUILDERS[class_name]() if class_name in BUILDERS else None
