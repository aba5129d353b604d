"""Helpers that belong to no other package: worker processes, threads, retries."""
