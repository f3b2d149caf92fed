"""Operators that run in another dtype under apex.amp than under PyTorch's autocast, or have no rule there.

PyTorch's lists for GPUs were made from apex's; its lists for CPUs differ. Names are `aten` operators, with
the overload if only one is meant.
"""

from __future__ import annotations


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Run in float32 for any input dtype.
FLOAT_ON_CPU = _names(
    "acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan "
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus "
    "cumprod cumsum dist sum sum.dim_IntList renorm logsumexp "
    "norm.Scalar norm.ScalarOpt_dim frobenius_norm.dim nuclear_norm nuclear_norm.dim "
    "linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord pdist cosine_similarity "
    "softmax.int log_softmax.int layer_norm group_norm rms_norm "
    "upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec "
    "_upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec "
    "upsample_linear1d.vec upsample_bilinear2d.vec upsample_trilinear3d.vec upsample_bicubic2d.vec "
    "_upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec"
)
FLOAT_EVERYWHERE = _names(
    "std std.dim std.correction var var.dim var.correction grid_sampler ctc_loss.IntList ctc_loss.Tensor"
)

# Run in the half-precision dtype of the session.
HALF_ON_CPU = _names(
    "addmv addr mv chain_matmul linalg_multi_dot "
    "lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data "
    "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
)

# Run in the widest dtype among the inputs.
WIDEST_ON_CPU = _names("bilinear cross dot vdot tensordot index_put scatter_add")

# In-place variants of functions on the float32 list: a half-precision tensor cannot hold the result.
REFUSED_IN_PLACE = _names(
    "acos_ asin_ cosh_ erfinv_ exp_ expm1_ log_ log10_ log1p_ log2_ reciprocal_ rsqrt_ sinh_ tan_ "
    "pow_.Scalar pow_.Tensor cumprod_ cumsum_ renorm_"
)

IN_PLACE_MESSAGE = (
    "{name} was called in place with a {dtype} argument under amp, which runs this function in float32, and a tensor "
    "cannot change its type. Call {plain} and use the tensor that it returns, or call .float() before, or put the code "
    "under amp.disable_casts()"
)

BANNED = "binary_cross_entropy"

BAN_MESSAGE = (
    "binary_cross_entropy (torch.nn.BCELoss) was given {dtype} under amp, where a sigmoid has rounded its output to 0 "
    "or 1 and the logarithm is lost. Better: torch.nn.BCEWithLogitsLoss without the sigmoid. Or compute the sigmoid in "
    "float32: amp.register_float_function(torch, 'sigmoid') before amp.initialize, or .float() on its input. "
    "amp.init(allow_banned=True) runs the loss in float32 as it is"
)
