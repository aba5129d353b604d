"""Inference engines by their library; ``skyasync.inference.interface`` has the table of them."""
