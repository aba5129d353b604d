"""Models, and the backends that compute with them. This module imports no torch."""

VOCABULARY, VALUE, SCORE = "vocabulary", "value", "score"
"""What a model says of a token: a causal language model's logits; one number, by a head that is new if the files lack
it; one number, by a head that the files hold."""
