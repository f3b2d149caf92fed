"""Colossal-AI's path of pipelines; `apex.transformer.pipeline_parallel` has the schedules."""
