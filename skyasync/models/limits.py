"""How much workers compute at once: read by them, and by memory plans, which import no torch."""

from __future__ import annotations

MICRO_BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Where the user sets none. On a CPU the activations should stay in its caches: of a tiny model 4,096 tokens are
computed about 1.4 times faster than 16,384 at once (benchmarks/update_speed.py)."""

MIN_SAVED_TOKENS = 0.2
"""Share of all tokens that sharing prompts must save; a dense attention mask is slower than a causal one."""

MAX_LOGITS = 1 << 27
"""Most logits held at once (half a GiB in float32); beyond it they are recomputed in the backward pass, in pieces."""

STEPPED_AT_ONCE = 1 << 22
"""Numbers of which an optimizer with a short state makes float32 copies at once."""

MAX_PADDING = 0.05
"""Share of padding up to which rows stand one below the other; with more they stand end to end, where a model can."""
