"""Colossal-AI's names for pipelines; `apex.transformer.pipeline_parallel` has the schedules."""
