"""The module of upstream's Python-only SyncBatchNorm; it exports the same class as `optimized_sync_batchnorm`."""

from .optimized_sync_batchnorm import SyncBatchNorm as SyncBatchNorm
