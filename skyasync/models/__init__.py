"""Models that are trained and asked: backends that compute, and what of a model they share. Imports no torch."""

VOCABULARY, VALUE, SCORE = "vocabulary", "value", "score"
"""What a model says of a token: a causal language model's logits; one number, by a head that is new if the files lack
it; one number, by a head that the files hold."""
