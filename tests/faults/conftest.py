"""The runs of the end-to-end tests, on the session's Ray cluster."""

from tests.end_to_end.conftest import models, train

__all__ = ["models", "train"]
