"""Colossal-AI's policies, which rewrite models by class. There are none here."""
