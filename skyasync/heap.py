"""What happens to memory that a process frees: of the host, where C's library is GNU's, and of a GPU.

Invariant: only the cost of memory changes, never a number.

By default the library gives large tensors back to the system as soon as they are freed. The next ones are new pages of
zeros, each of which must be faulted in: 170,000 of them in an update of SmolLM2-135M on a CPU, a tenth of its time. A
process that computes the same again and again retains them instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

RETAINED = (1 << 31) - 1  # bytes at the heap's end, besides holes in it; also the largest number that ``mallopt`` takes
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of <malloc.h>


def keep_freed() -> None:
    """From now on this process retains about ``RETAINED`` bytes of what it frees, for its next allocations."""
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, RETAINED)
        mallopt(_TRIM_THRESHOLD, RETAINED)


def use_expandable_segments() -> None:
    """Set torch's allocator for this process, before it uses a GPU, unless the environment configures it.

    Micro-batches differ in size, and a freed block of a fixed segment fits none of the next ones.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if not any(name in os.environ for name in names):
        os.environ[names[1]] = "expandable_segments:True"


def give_back() -> None:
    """Return freed memory to the system."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
