"""The Booster's checkpoints at Colossal-AI's path."""

from ..booster.checkpoint_io import CheckpointIO

GeneralCheckpointIO = CheckpointIO

__all__ = ["CheckpointIO", "GeneralCheckpointIO"]
