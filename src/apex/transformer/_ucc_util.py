"""Whether PyTorch has UCC."""

import torch.distributed as dist

HAS_UCC: bool = dist.is_available() and dist.is_ucc_available()
