"""The joint and the loss of speech transducers (RNN-T)."""

from . import _transducer_ref
from .transducer import TransducerJoint, TransducerLoss

__all__ = ["TransducerJoint", "TransducerLoss", "_transducer_ref"]
