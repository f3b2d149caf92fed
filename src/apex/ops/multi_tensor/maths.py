"""The functions that update rules call, for PyTorch's tensors; `triton.language` has the same under the same names.

See `rules.py`: a rule is written once, and runs with this module or with `triton.language` as its `tl`.
"""

from __future__ import annotations

import torch

sqrt = torch.sqrt
abs = torch.abs
maximum = torch.maximum
minimum = torch.minimum
where = torch.where
float16 = torch.float16
float32 = torch.float32
