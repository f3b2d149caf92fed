"""Log records with the rank of their process."""

from __future__ import annotations

import logging


class RankInfoFormatter(logging.Formatter):
    """A formatter that fills in `%(rank_info)s`: "rank 1 of 4", or nothing outside a process group."""

    def format(self, record: logging.LogRecord) -> str:
        record.rank_info = _rank_info()
        return super().format(record)


def _rank_info() -> str:
    import torch.distributed as distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return ""
    return f"rank {distributed.get_rank()} of {distributed.get_world_size()}"
