"""float8 copies of matrices, and their products."""

from .blocks import block_product, cast_blocks
from .config import WRITE_PARTIALS
from .op import (
    DTYPES,
    FAMILY,
    amax,
    amax_dtypes,
    cast_both,
    fills_memory,
    formats,
    obstacle,
    product,
    write_amax,
)
from .reference import BLOCK, MX_BLOCK, empty_scales, mx_product, widened_blocks
