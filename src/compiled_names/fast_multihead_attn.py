"""Upstream's compiled module of this name: multihead attention step by step, forward and backward, without autograd.

Inputs are [length, batch, embedding]. Packed projections hold each head's queries, keys and values next to each other.
Probabilities and dropout masks (bytes, 1 for kept elements) are [batch * heads, queries, keys]. A pad_mask is
[batch, keys], or [queries, keys] with use_time_mask; nonzero hides a key, but functions with "additive" in their name
add the mask. Without training nothing is dropped, and dropout masks have no elements. All floating dtypes are accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from apex.ops import multihead
from apex.ops.multihead import explicit
from apex.ops.norm import NORM, joined_statistics


def _mask(use_mask: bool, use_time_mask: bool, pad_mask: Tensor, additive: bool = False) -> multihead.Mask | None:
    return multihead.make_mask(pad_mask if use_mask else None, bool(use_time_mask), additive)


def _scale(inputs: Tensor, heads: int) -> float:
    multihead.check_heads(inputs.shape[-1], int(heads))
    return (inputs.shape[-1] // int(heads)) ** -0.5


def _softmax_forward(use_mask, is_training, heads, input, pad_mask, dropout_prob, additive: bool) -> list[Tensor]:
    """Return [dropout_results, dropout_mask, softmax_results]."""
    heads, (batch_heads, queries, keys) = int(heads), input.shape
    mask = _mask(use_mask, False, pad_mask, additive)
    multihead.check_mask(mask, queries, keys, batch_heads // heads, input.device)
    dropout = float(dropout_prob) if is_training else 0.0
    dropped, probabilities, noise = explicit.masked_softmax(input, heads, mask, dropout)
    return [dropped, explicit.kept_bytes(noise, probabilities, dropout), probabilities]


def _softmax_backward(output_grads, softmax_results, dropout_mask, dropout_prob) -> Tensor:
    return explicit.softmax_backward(output_grads, softmax_results, float(dropout_prob), dropout_mask)


def additive_mask_softmax_dropout_forward(use_mask, is_training, heads, input, pad_mask, dropout_prob):
    return _softmax_forward(use_mask, is_training, heads, input, pad_mask, dropout_prob, additive=True)


def additive_mask_softmax_dropout_backward(use_mask, heads, output_grads, softmax_results, dropout_mask, dropout_prob):
    return _softmax_backward(output_grads, softmax_results, dropout_mask, dropout_prob)


def mask_softmax_dropout_forward(use_mask, is_training, heads, input, pad_mask, dropout_prob):
    return _softmax_forward(use_mask, is_training, heads, input, pad_mask, dropout_prob, additive=False)


def mask_softmax_dropout_backward(
    use_mask, heads, output_grads, softmax_results, dropout_mask, padding_mask, dropout_prob
):
    """Return the gradient of the logits; hidden keys have probability zero and so gradient zero without the mask."""
    return _softmax_backward(output_grads, softmax_results, dropout_mask, dropout_prob)


def _forward(
    use_mask, use_time_mask, is_training, heads, inputs, weights, biases, pad_mask, dropout_prob, additive=False
) -> list[Tensor]:
    """Return [packed projections, softmax_results (logits if `additive`), dropout_results, dropout_mask,
    matmul2_results, outputs]."""
    mask = _mask(use_mask, use_time_mask, pad_mask, additive)
    dropout = float(dropout_prob) if is_training else 0.0
    settings = {"heads": int(heads), "scale": _scale(inputs[0], heads), "dropout": dropout}
    outputs, packed, core = explicit.forward(inputs, weights, biases, mask=mask, **settings)
    scores = core.logits if additive else core.probabilities
    kept = explicit.kept_bytes(core.noise, core.probabilities, dropout)
    return [*packed, scores, core.dropped, kept, core.context, outputs]


def _backward(
    heads, output_grads, matmul2_results, dropout_results, softmax_results, packed, inputs, weights, dropout_mask,
    dropout_prob, biases: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of inputs and weights, and with `biases` also of the biases."""
    core = matmul2_results, softmax_results, dropout_results, dropout_mask
    settings = int(heads), _scale(inputs[0], heads), float(dropout_prob), biases
    gradients = explicit.backward(output_grads, inputs, weights, packed, core, settings)
    return [gradient for gradient in gradients if gradient is not None]


def self_attn_forward(
    use_mask, use_time_mask, is_training, heads, inputs, input_weights, output_weights, pad_mask, dropout_prob
):
    """Return [input_lin_results, softmax_results, dropout_results, dropout_mask, matmul2_results, outputs]."""
    options, weights = (use_mask, use_time_mask, is_training, heads), (input_weights, output_weights)
    return _forward(*options, (inputs,), weights, (None, None), pad_mask, dropout_prob)


def self_attn_backward(
    heads, output_grads, matmul2_results, dropout_results, softmax_results, input_lin_results, inputs, input_weights,
    output_weights, dropout_mask, dropout_prob, *, biases=False,
):  # fmt: skip
    """Return [input_grads, input_weight_grads, output_weight_grads]."""
    core, weights = (matmul2_results, dropout_results, softmax_results), (input_weights, output_weights)
    saved = (input_lin_results,), (inputs,), weights, dropout_mask, dropout_prob
    return _backward(heads, output_grads, *core, *saved, biases)


def self_attn_bias_forward(
    use_mask, use_time_mask, is_training, heads, inputs, input_weights, output_weights, input_biases, output_biases,
    pad_mask, dropout_prob, *, additive=False,
):  # fmt: skip
    """Return [input_lin_results, softmax_results, dropout_results, dropout_mask, matmul2_results, outputs]."""
    options, weights = (use_mask, use_time_mask, is_training, heads), (input_weights, output_weights)
    return _forward(*options, (inputs,), weights, (input_biases, output_biases), pad_mask, dropout_prob, additive)


def self_attn_bias_backward(*arguments):
    """Return the results of `self_attn_backward`, followed by [input_bias_grads, output_bias_grads]."""
    return self_attn_backward(*arguments, biases=True)


def self_attn_bias_additive_mask_forward(*arguments):
    """Return the results of `self_attn_bias_forward`, but bmm1_results (unmasked logits) for softmax_results."""
    return self_attn_bias_forward(*arguments, additive=True)


def self_attn_bias_additive_mask_backward(
    heads, output_grads, matmul2_results, dropout_results, bmm1_results, pad_mask, input_lin_results, inputs,
    input_weights, output_weights, dropout_mask, dropout_prob,
):  # fmt: skip
    """Return [input_grads, input_weight_grads, output_weight_grads, input_bias_grads, output_bias_grads]."""
    mask = _mask(pad_mask is not None and pad_mask.numel() > 0, False, pad_mask, additive=True)
    softmax_results = explicit.masked_softmax(bmm1_results, int(heads), mask, 0.0)[1]
    saved = matmul2_results, dropout_results, softmax_results, input_lin_results, inputs, input_weights, output_weights
    return self_attn_bias_backward(heads, output_grads, *saved, dropout_mask, dropout_prob)


def _norm_settings(inputs: Tensor) -> tuple:
    return inputs.shape[-1], multihead.NORM_EPS, True, False, inputs.dtype, inputs.dtype


def _norm(inputs: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return layer norm, mean and reciprocal deviation."""
    results, statistics = NORM.run(inputs, gamma, beta, *_norm_settings(inputs))
    invvar, mean = statistics.unbind()
    return results, mean, invvar


def _norm_backward(gradient, inputs, mean, invvar, gamma, beta) -> tuple[Tensor, Tensor, Tensor]:
    statistics = joined_statistics(mean, invvar, inputs, inputs.shape[-1], True, False)
    saved = (inputs, gamma, beta, statistics)
    return NORM.run_backward((gradient,), saved, _norm_settings(inputs), (True, True, True))  # type: ignore[return-value]


def _dropout_add(results: Tensor, residual: Tensor, is_training: bool, dropout_prob) -> tuple[Tensor, Tensor]:
    """Return the sum of dropout and residual, and a byte per element, 1 if it was kept."""
    if not is_training:
        return results + residual, results.new_empty((0, *results.shape[1:]), dtype=torch.uint8)
    dropped, kept = torch.native_dropout(results, float(dropout_prob), True)
    return dropped + residual, kept.to(torch.uint8)


def _dropout_add_backward(gradient: Tensor, kept: Tensor, dropout_prob) -> Tensor:
    return gradient * kept * (1.0 / (1.0 - float(dropout_prob))) if kept.numel() else gradient


def self_attn_norm_add_forward(
    use_mask, use_time_mask, is_training, heads, inputs, lyr_nrm_gamma_weights, lyr_nrm_beta_weights, input_weights,
    output_weights, pad_mask, dropout_prob,
):  # fmt: skip
    """Return [lyr_nrm_results, lyr_nrm_mean, lyr_nrm_invvar, input_lin_results, softmax_results, dropout_results,
    dropout_mask, matmul2_results, dropout_add_mask, outputs]."""
    normed, mean, invvar = _norm(inputs, lyr_nrm_gamma_weights, lyr_nrm_beta_weights)
    *results, attended = self_attn_forward(
        use_mask, use_time_mask, is_training, heads, normed, input_weights, output_weights, pad_mask, dropout_prob
    )
    outputs, kept = _dropout_add(attended, inputs, is_training, dropout_prob)
    return [normed, mean, invvar, *results, kept, outputs]


def self_attn_norm_add_backward(
    heads, output_grads, matmul2_results, dropout_results, softmax_results, input_lin_results, lyr_nrm_results,
    lyr_nrm_mean, lyr_nrm_invvar, inputs, lyr_nrm_gamma_weights, lyr_nrm_beta_weights, input_weights, output_weights,
    dropout_mask, dropout_add_mask, dropout_prob,
):  # fmt: skip
    """Return [input_grads, lyr_nrm_gamma_grads, lyr_nrm_beta_grads, input_weight_grads, output_weight_grads]."""
    d_attended = _dropout_add_backward(output_grads, dropout_add_mask, dropout_prob)
    saved = matmul2_results, dropout_results, softmax_results, input_lin_results, lyr_nrm_results
    d_normed, *d_weights = self_attn_backward(
        heads, d_attended, *saved, input_weights, output_weights, dropout_mask, dropout_prob
    )
    norm = lyr_nrm_mean, lyr_nrm_invvar, lyr_nrm_gamma_weights, lyr_nrm_beta_weights
    d_inputs, d_gamma, d_beta = _norm_backward(d_normed, inputs, *norm)
    return [d_inputs + output_grads, d_gamma, d_beta, *d_weights]


def encdec_multihead_attn_forward(
    use_mask, use_time_mask, is_training, heads, inputs_q, inputs_kv, input_weights_q, input_weights_kv,
    output_weights, pad_mask, dropout_prob,
):  # fmt: skip
    """Return [input_lin_q_results, input_lin_kv_results, softmax_results, dropout_results, dropout_mask,
    matmul2_results, outputs]."""
    options, weights = (
        (use_mask, use_time_mask, is_training, heads),
        (input_weights_q, input_weights_kv, output_weights),
    )
    return _forward(*options, (inputs_q, inputs_kv), weights, (None,) * 3, pad_mask, dropout_prob)


def encdec_multihead_attn_backward(
    heads, output_grads, matmul2_results, dropout_results, softmax_results, input_lin_q_results, input_lin_kv_results,
    inputs_q, inputs_kv, input_weights_q, input_weights_kv, output_weights, dropout_mask, dropout_prob,
):  # fmt: skip
    """Return [input_q_grads, input_kv_grads, input_weight_q_grads, input_weight_kv_grads, output_weight_grads]."""
    core, weights = (
        (matmul2_results, dropout_results, softmax_results),
        (input_weights_q, input_weights_kv, output_weights),
    )
    saved = (input_lin_q_results, input_lin_kv_results), (inputs_q, inputs_kv), weights, dropout_mask, dropout_prob
    return _backward(heads, output_grads, *core, *saved)


def encdec_multihead_attn_norm_add_forward(
    use_mask, use_time_mask, is_training, heads, inputs_q, inputs_kv, lyr_nrm_gamma_weights, lyr_nrm_beta_weights,
    input_weights_q, input_weights_kv, output_weights, pad_mask, dropout_prob,
):  # fmt: skip
    """Return [lyr_nrm_results, lyr_nrm_mean, lyr_nrm_invvar, input_lin_q_results, input_lin_kv_results,
    softmax_results, dropout_results, dropout_mask, matmul2_results, dropout_add_mask, outputs]."""
    normed, mean, invvar = _norm(inputs_q, lyr_nrm_gamma_weights, lyr_nrm_beta_weights)
    weights = input_weights_q, input_weights_kv, output_weights
    *results, attended = encdec_multihead_attn_forward(
        use_mask, use_time_mask, is_training, heads, normed, inputs_kv, *weights, pad_mask, dropout_prob
    )
    outputs, kept = _dropout_add(attended, inputs_q, is_training, dropout_prob)
    return [normed, mean, invvar, *results, kept, outputs]


def encdec_multihead_attn_norm_add_backward(
    heads, output_grads, matmul2_results, dropout_results, softmax_results, input_lin_q_results, input_lin_kv_results,
    lyr_nrm_results, lyr_nrm_mean, lyr_nrm_invvar, inputs_q, inputs_kv, lyr_nrm_gamma_weights, lyr_nrm_beta_weights,
    input_weights_q, input_weights_kv, output_weights, dropout_mask, dropout_add_mask, dropout_prob,
):  # fmt: skip
    """Return [input_q_grads, input_kv_grads, lyr_nrm_gamma_grads, lyr_nrm_beta_grads, input_weight_q_grads,
    input_weight_kv_grads, output_weight_grads]."""
    d_attended = _dropout_add_backward(output_grads, dropout_add_mask, dropout_prob)
    saved = matmul2_results, dropout_results, softmax_results, input_lin_q_results, input_lin_kv_results
    weights = input_weights_q, input_weights_kv, output_weights
    d_normed, d_kv, *d_weights = encdec_multihead_attn_backward(
        heads, d_attended, *saved, lyr_nrm_results, inputs_kv, *weights, dropout_mask, dropout_prob
    )
    norm = lyr_nrm_mean, lyr_nrm_invvar, lyr_nrm_gamma_weights, lyr_nrm_beta_weights
    d_inputs, d_gamma, d_beta = _norm_backward(d_normed, inputs_q, *norm)
    return [d_inputs + output_grads, d_kv, d_gamma, d_beta, *d_weights]
