"""What happens to memory that a process frees, where C's library is GNU's; with another one nothing is done.

Invariant: only the cost of memory changes, never a number.

By default the library gives large tensors back to the system as soon as they are freed. The next ones are new pages of
zeros, each of which must be faulted in: 170,000 of them in an update of SmolLM2-135M on a CPU, a tenth of its time. A
process that computes the same again and again retains them instead.
"""

from __future__ import annotations

import contextlib
import ctypes

RETAINED = (1 << 31) - 1  # bytes at the heap's end, besides holes in it; also the largest number that ``mallopt`` takes
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>


def keep_freed() -> None:
    """From here on this process keeps what it frees, about ``RETAINED`` bytes of it, for what it allocates next."""
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, RETAINED)
        mallopt(_TRIM_THRESHOLD, RETAINED)


def give_back() -> None:
    """What this process has freed, to the system."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
