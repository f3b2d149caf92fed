"""float8 copies of matrices and products of them."""

from .op import DTYPES, FAMILY, amax, cast_both, formats, obstacle, product
