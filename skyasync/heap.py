"""Freed memory of a process: of the host, if its C library is GNU's, and of a GPU.

Invariant: only the cost of memory changes, never a number.

By default glibc gives large tensors back to the system as soon as they are freed. The next ones are
new pages of zeros, each of which must be faulted in: 170,000 of them in an update of SmolLM2-135M
on a CPU, a tenth of its time. A process that repeats the same computation retains them instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os

log = logging.getLogger(__name__)

# Bytes at the heap's end, besides holes in it. It is the largest number that ``mallopt`` takes.
RETAINED = (1 << 31) - 1
# Parameters of ``mallopt`` (malloc.h).
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3


def keep_freed() -> None:
    """Have this process retain about ``RETAINED`` freed bytes for its next allocations."""
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, RETAINED)
        mallopt(_TRIM_THRESHOLD, RETAINED)


def freeze_start() -> None:
    """Exclude all present objects of the process from garbage collection; they stay to its end.

    Libraries that an engine or the controller loads at its start are a million objects. Python
    walks them again and again while requests and answers come and go.
    """
    gc.collect()  # else garbage would stay too
    gc.freeze()


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_SEGMENTS_OPTION = "expandable_segments"


def use_expandable_segments() -> None:
    """Set torch's allocator for this process, unless the environment configures it.

    Call it before the process uses a GPU. Micro-batches differ in size, and a freed block of a
    fixed segment fits none of the next ones.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"{_SEGMENTS_OPTION}:True"


def use_fixed_segments() -> None:
    """Remove expandable segments from torch's settings in the environment.

    Call it before this process uses a GPU. Engines map the memory of a policy on the same GPU. A
    handle to an expandable segment is a file descriptor, which containers usually do not let
    another process open. vLLM rejects such segments if its engines sleep.
    """
    for name in ALLOCATOR_VARIABLES:
        options = os.environ.get(name, "").split(",")
        remaining = []
        for option in options:
            key = option.partition(":")[0].strip()
            if key != _SEGMENTS_OPTION:
                remaining.append(option)
        if len(remaining) == len(options):
            continue
        log.warning(
            "%s: %s is ignored, because engines map the memory of this process (trainer.placement.colocate_all)",
            name,
            _SEGMENTS_OPTION,
        )
        if remaining:
            os.environ[name] = ",".join(remaining)
        else:
            del os.environ[name]


def give_back() -> None:
    """Return freed memory to the system."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
