"""The tiny models and processes of the workers' tests."""

from tests.workers.conftest import bundles, cfg, model_path, ranks, tied_model, untied_model  # noqa: F401
