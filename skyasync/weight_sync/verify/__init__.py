"""Proofs that engines have the weights that the trainer sent."""
