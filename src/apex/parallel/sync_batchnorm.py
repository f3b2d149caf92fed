"""The SyncBatchNorm that upstream has without its compiled modules: the same one here."""

from .optimized_sync_batchnorm import SyncBatchNorm as SyncBatchNorm
