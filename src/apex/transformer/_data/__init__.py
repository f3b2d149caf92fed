"""Batch samplers that select the samples of each data-parallel rank."""

from ._batchsampler import MegatronPretrainingRandomSampler, MegatronPretrainingSampler

__all__ = ["MegatronPretrainingRandomSampler", "MegatronPretrainingSampler"]
