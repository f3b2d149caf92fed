"""Newton-Schulz iteration of batches of matrices, which Muon needs at every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import check_tensors
from .._device import facts
from .._host import HOST
from .._launch_arguments import Described, has_descriptors
from .._tolerance import excess
from . import config, reference

kernels = _library.LazyModule(f"{__package__}.kernels")

METHODS = ("auto", "standard", "gram")


def newton_schulz(
    matrices: Tensor,
    coefficients: Sequence[tuple[float, float, float]],
    eps: float = 1e-7,
    method: str = "auto",
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return matrices with the singular vectors of `matrices`, [..., rows, columns], and singular values near 1.

    Matrices are divided by their Frobenius norm, or by `eps` if that is larger; each triple (a, b, c) is one step
    X <- a X + (b X Xᵀ + c (X Xᵀ)²) X. "standard" multiplies X at every step, as `torch.optim.Muon` does. "gram" works
    on X Xᵀ, which is quicker for matrices that are not square; it needs float16 or a wider dtype. "auto" takes "gram"
    where kernels run, unless `dtype` is bfloat16. `dtype` is the dtype of all products: bfloat16 for "standard" and
    float16 for "gram" by default, float64 for float64 matrices. `out`, contiguous and of that dtype, gets the result,
    and may be the memory of `matrices`. Not differentiable.
    """
    check_tensors(matrices=matrices)
    if matrices.dim() < 2 or not matrices.is_floating_point():
        raise ValueError(f"matrices must be floating point [..., rows, columns], got {list(matrices.shape)}")
    if method not in METHODS:
        raise ValueError(f"method={method!r} is none of {', '.join(METHODS)}")
    for triple in coefficients:
        if len(triple) != 3 or not all(abs(number) < math.inf for number in triple):
            raise ValueError(f"coefficients must be triples of finite numbers, got {triple!r}")
    batch = matrices.detach().reshape(math.prod(matrices.shape[:-2]), *matrices.shape[-2:])
    method, dtype = resolved(batch.shape[1:], matrices.dtype, batch.device, method, dtype)
    if method == "gram" and dtype == torch.bfloat16:
        raise ValueError("method='gram' in bfloat16 is off by 16%; use dtype=torch.float16, or method='standard'")
    small = min(batch.shape[1:]) <= config.SMALL
    if not batch.numel():
        return matrices.detach().to(dtype, copy=True) if out is None else out
    runs_kernel = not small and _library.runs_triton(FAMILY, torch.empty(0, dtype=dtype, device=batch.device))
    product = launch if runs_kernel else reference.product
    divide = normalized if runs_kernel and batch.dtype != torch.float64 else reference.normalized
    iterate = reference.gram if method == "gram" else reference.standard
    target = None if out is None else out.view(batch.shape)
    with _library.autocast_off(batch):  # it would cast operands of the products, but not `out`
        # No name here holds the normalised matrices, so that the iteration can free them.
        return iterate(divide(batch, eps, dtype), coefficients, product, target).view(matrices.shape)


def resolved(
    shape: Sequence[int], input_dtype: torch.dtype, device: torch.device, method: str, dtype: torch.dtype | None
) -> tuple[str, torch.dtype]:
    """Return the method and the dtype of products that `newton_schulz` takes for matrices of this shape and dtype."""
    if method == "auto":
        probe = torch.empty(0, dtype=torch.float16, device=device)
        fits = min(shape) > config.SMALL and dtype != torch.bfloat16
        method = "gram" if fits and _library.runs_triton(FAMILY, probe) else "standard"
    if dtype is None:
        half = torch.float16 if method == "gram" else torch.bfloat16
        dtype = torch.float64 if input_dtype == torch.float64 else half
    return method, dtype


def launch(left: Tensor, right: Tensor, alpha: float, addend: Tensor | None, beta: float) -> Tensor:
    """Return `alpha left rightᵀ + beta addend` by the kernel; the caller knows that the result is symmetric."""
    batch, n, depth = left.shape
    out = torch.empty(batch, n, n, dtype=left.dtype, device=left.device)
    device, sizes = facts(left.device), (n, depth, *left.stride(), *right.stride())
    layout = _described_as(left, right) if config.loads_by_descriptor(device, batch, n, depth) else None
    side, step, num_warps, num_stages = config.tile(device, layout is not None)
    matrices: Any = (left, right)
    if layout is not None:
        block = (side, step) if layout == "rows" else (step, side)
        matrices = [Described((each if layout == "rows" else each.mT).flatten(0, 1), block) for each in matrices]
    even = n % side == 0 and depth % step == 0
    options: dict[str, Any] = {"EVEN": even, "LARGE": n * n >= 2**31, "WIDE": left.device == HOST, "DESCRIBED": layout}
    options |= {"num_warps": num_warps, "num_stages": num_stages}
    tiles = -(-n // side)
    grid = (tiles * (tiles + 1) // 2, batch)
    tensors = (*matrices, addend, out)
    kernels.symmetric_product(grid, tensors, sizes, (alpha, beta), TILE=side, DEPTH=step, **options)
    return out


def _described_as(left: Tensor, right: Tensor) -> str | None:
    """Return which dimension of the matrices is contiguous, "rows" or "columns"; None if descriptors do not fit."""
    if not has_descriptors() or any(each.data_ptr() % 16 for each in (left, right)):
        return None
    if left.is_contiguous() and right.is_contiguous():
        return "rows"
    return "columns" if left.mT.is_contiguous() and right.mT.is_contiguous() else None


def normalized(matrices: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return the matrices divided by the larger of their Frobenius norm and `eps`; a kernel divides."""
    matrices = matrices.contiguous()
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), dtype=torch.float32)
    out = torch.empty_like(matrices, dtype=dtype)
    elements = matrices[0].numel()
    grid = (-(-elements // config.COPY_BLOCK), len(matrices))
    block, warps = config.COPY_BLOCK, config.COPY_WARPS
    kernels.divided_copy(grid, (matrices, norms, out), (elements,), (eps,), BLOCK=block, num_warps=warps)
    return out


def self_check(device: torch.device) -> float:
    """Return the larger error of the methods "standard" and "gram", as a multiple of the tolerance."""
    # Matrices of at most `SMALL` do not reach the kernel. Larger ones take half a minute on processors without float16.
    runs_kernel = _library.runs_triton(FAMILY, torch.empty(0, dtype=torch.float16, device=device))
    rows, columns = (config.SMALL + 8, config.SMALL + 40) if runs_kernel else (96, 128)
    numbers = torch.arange(rows * columns, dtype=torch.float64, device=HOST)
    matrices = (numbers * 0.7).sin().view(1, rows, columns)
    triples = [(3.4445, -4.7750, 2.0315)] * 5
    expected = newton_schulz(matrices, triples, method="standard")
    errors = []
    for method in ("standard", "gram"):
        actual = newton_schulz(matrices.to(device, torch.float32), triples, method=method, dtype=torch.float16)
        # Five steps amplify rounding errors of float16 by the product of the first coefficients' slopes.
        errors.append(float(excess(actual.to(HOST), expected, torch.float16)) / 3.4445**5)
    return max(errors)


SUMMARY = "Newton-Schulz iteration by symmetric products, for Muon"
HALVES = frozenset({torch.float16, torch.bfloat16})
SMALL_INPUTS = f"matrices with a side of at most {config.SMALL}: PyTorch's products"
FAMILY = _library.register_family(
    _library.OpFamily("newton_schulz", SUMMARY, self_check, triton_dtypes=HALVES, small_inputs=SMALL_INPUTS)
)
