"""Upstream's compiled module of this name: layer norm over the rows of a matrix, of any width.

The output has gamma's dtype; statistics are float32. Upstream returns its kernel's partial sums as the last two results
of `ln_bwd`; here these are the final gradients, as one row.
"""

from __future__ import annotations

from torch import Tensor

from apex.ops._checks import check_shape
from apex.ops.norm import NORM, checked_shape, joined_statistics


def ln_fwd(x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float) -> list[Tensor]:
    """Return [output, mean, reciprocal deviation]."""
    (row_length,) = checked_shape(x, gamma.shape, gamma, beta)
    output, statistics = NORM.run(x, gamma, beta, row_length, epsilon, True, False, gamma.dtype, x.dtype)
    rsigma, mean = statistics.unbind()
    return [output, mean, rsigma]


def ln_bwd(dz, x_or_z, mu_, rsigma, gamma, beta_=None, memory_efficient=False) -> list[Tensor]:
    """Return [dx, dgamma, dbeta, dgamma_part, dbeta_part]."""
    (row_length,) = checked_shape(x_or_z, gamma.shape, gamma, beta_)
    if memory_efficient and beta_ is None:
        raise ValueError("ln_bwd with memory_efficient=True needs beta_ to recover the input from the output")
    # Without memory_efficient beta is not needed for the maths, but its gradient is still computed.
    beta = gamma if beta_ is None else beta_
    statistics = joined_statistics(mu_, rsigma, x_or_z, row_length, True, memory_efficient)
    check_shape("the gradient", dz, x_or_z.shape, x_or_z.device)
    settings = (row_length, 0.0, True, memory_efficient, dz.dtype, x_or_z.dtype)
    saved = (x_or_z, gamma, beta, statistics)
    dx, dgamma, dbeta = NORM.run_backward((dz,), saved, settings, (True, True, True))
    return [dx, dgamma, dbeta, dgamma.float()[None], dbeta.float()[None]]
