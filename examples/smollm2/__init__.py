"""SmolLM2-135M-Instruct: the same loop on a real pretrained model."""
