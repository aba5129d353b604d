"""One model at a time is loaded in a process.

transformers changes its own classes while it loads a model (ties and initialisation are switched off for the time), so
two threads that load at once may leave them changed: from then on no model of the process has tied weights.
"""

from __future__ import annotations

import threading

#: Held by whoever loads or builds a model; a loader that holds it may call another.
ONE_AT_A_TIME = threading.RLock()
