"""Learning rate schedulers: `apex.nn.lr_scheduler`."""

from . import lr_scheduler

__all__ = ["lr_scheduler"]
