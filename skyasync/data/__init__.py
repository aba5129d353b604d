"""Prompts, datasets, sources, mixtures."""
