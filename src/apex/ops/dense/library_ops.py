"""What `torch.compile` sees of the dense layers beside plain matrix products.

Operators return tensors, not None: an absent one is empty.
"""

from __future__ import annotations

from .. import _library
from .op import accumulate_now, activation_backward_now


def _activation_backward(dy, saved, activation, bias_grad):
    dz, dbias = activation_backward_now(dy, saved, activation, bias_grad, in_place=False)
    return dz.contiguous(), dy.new_empty(0) if dbias is None else dbias


def _activation_backward_fake(dy, saved, activation, bias_grad):
    return dy.new_empty(dy.shape), dy.new_empty(dy.shape[1] if bias_grad else 0)


def _refuse_derivative(ctx, *gradients):
    raise RuntimeError(
        "torch.ops.apex.activation_backward has no derivative; dense_gelu_dense and mlp of apex.ops.dense have second "
        "derivatives where they are not compiled"
    )


_library.register_op(
    "activation_backward(Tensor dy, Tensor saved, str activation, bool bias_grad) -> (Tensor, Tensor)",
    _activation_backward,
    _activation_backward_fake,
    backward=_refuse_derivative,
    setup_context=lambda ctx, inputs, output: None,
)
_library.register_op(
    "wgrad_gemm_accum(Tensor input, Tensor d_output, Tensor(a!) d_weight) -> ()",
    accumulate_now,
    lambda input, d_output, d_weight: None,
)
