"""Newton-Schulz iteration in PyTorch operators: the definition, and the implementation when no kernel runs.

    X   [batch, rows, columns]   matrices, divided by their Frobenius norms
    n   min(rows, columns)
    R   [batch, n, n]            X Xᵀ for wide matrices, Xᵀ X for tall ones
    Z   [batch, n, n]            b R + c R², so that a step is X <- (a I + Z) X for wide matrices

R, Z and every product of the two are polynomials of one symmetric matrix: they commute, and are symmetric themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Coefficients = Sequence[tuple[float, float, float]]
# product(left, right, alpha, addend, beta) = alpha left rightᵀ + beta addend, [batch, n, n]; the result is symmetric.
SymmetricProduct = Callable[[Tensor, Tensor, float, Tensor | None, float], Tensor]

# Step before which the Gram form computes R from X again. Without it, rounding errors of R grow: 0.099 instead of 0.020
# in float16.
RESTART = 2


def product(left: Tensor, right: Tensor, alpha: float, addend: Tensor | None, beta: float) -> Tensor:
    """Return `alpha left rightᵀ + beta addend` by PyTorch's product."""
    if addend is None:
        result = torch.bmm(left, right.mT)
        return result if alpha == 1.0 else result.mul_(alpha)
    return torch.baddbmm(addend, left, right.mT, beta=beta, alpha=alpha)


def normalized(matrices: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return the matrices divided by the larger of their Frobenius norm and `eps`, computed in float32 or wider."""
    wide = torch.float64 if matrices.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True, dtype=wide)
    return torch.mul(matrices, norm.clamp_(min=eps).reciprocal_(), out=torch.empty_like(matrices, dtype=dtype))


def standard(
    X: Tensor, coefficients: Coefficients, product: SymmetricProduct = product, out: Tensor | None = None
) -> Tensor:
    """Return X after `X <- a X + (b R + c R²) X` for each triple of coefficients, in `out` if it is given."""
    wide, last = X.shape[1] <= X.shape[2], len(coefficients) - 1
    for index, (a, b, c) in enumerate(coefficients):
        short = X if wide else X.mT
        R = product(short, short, 1.0, None, 0.0)
        Z = product(R, R, c, R, b)
        del short, R  # memory for the next product: see `config.peak_elements`
        target = out if index == last else None
        X = torch.baddbmm(X, *((Z, X) if wide else (X, Z)), beta=a, out=target)
        del Z
    return X if out is None or coefficients else out.copy_(X)


def gram(
    X: Tensor, coefficients: Coefficients, product: SymmetricProduct = product, out: Tensor | None = None
) -> Tensor:
    """Return the result of `standard`, computed on R alone: X takes part in the first and last product and a restart.

    Q is the product of the steps' factors `a I + Z`, so that the result is Q X.
    """
    wide = X.shape[1] <= X.shape[2]

    def applied(Q: Tensor, X: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.bmm(Q, X, out=out) if wide else torch.bmm(X, Q, out=out)

    def squared(X: Tensor) -> Tensor:
        return product(X, X, 1.0, None, 0.0) if wide else product(X.mT, X.mT, 1.0, None, 0.0)

    last, Q, R = len(coefficients) - 1, None, None
    for index, (a, b, c) in enumerate(coefficients):
        if index == RESTART and Q is not None:
            X, Q, R = applied(Q, X), None, None
        if R is None:
            R = squared(X)
        Z = product(R, R, c, R, b)
        # Matrices that are not read again are dropped before the next product: see `config.peak_elements`.
        if index in (last, RESTART - 1):
            R = None
        else:
            R = product(R, Z, 1.0, R, a)
            R = product(Z, R, 1.0, R, a)
        if Q is None:
            Q = Z
            Q.diagonal(dim1=1, dim2=2).add_(a)  # Z is not read again
        else:
            Q = product(Q, Z, 1.0, Q, a)
        del Z
    if Q is None:
        return X if out is None else out.copy_(X)
    return applied(Q, X, out)
