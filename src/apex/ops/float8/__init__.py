"""float8 copies of matrices, and their products."""

from .blocks import block_product, cast_blocks
from .config import MOST_PARTIALS
from .op import DTYPES, FAMILY, amax, cast_both, formats, has_amax_kernel, obstacle, product, write_amax
from .reference import BLOCK, MX_BLOCK, empty_scales, mx_product, widened_blocks
