"""Policy losses: one token loss per formula; reductions and corrections are applied outside.

Every loss takes ``[batch, length]`` tensors and returns the loss of each token (to be minimised),
alone or with a dictionary of per-token statistics. ``current`` carries the gradient. ``anchor`` is
the policy in the ratio's denominator: the proximal policy, or the behaviour policy with
``ratio_anchor=behaviour``.
"""
