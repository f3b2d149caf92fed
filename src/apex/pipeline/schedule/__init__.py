"""Colossal-AI's names for pipeline schedules, which are in `apex.transformer.pipeline_parallel`."""
