"""Verifiable rewards in two domains, each with its own reward function."""
