"""float8 copies of matrices, and their products."""

from .blocks import block_product, cast_blocks
from .op import DTYPES, FAMILY, amax, cast_both, formats, obstacle, product
from .reference import BLOCK, MX_BLOCK, empty_scales, mx_product, widened_blocks
