"""float8 copies of matrices, and their products."""

from .op import DTYPES, FAMILY, amax, cast_both, formats, obstacle, product
