"""The constant HAS_UCC: True if PyTorch was built with UCC."""

import torch.distributed as dist

HAS_UCC: bool = dist.is_available() and dist.is_ucc_available()
