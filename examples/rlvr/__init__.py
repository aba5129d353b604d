"""Verifiable rewards in two domains, each with a judge of its own."""
