"""What the C library does with memory that is freed. Knows nothing of what it was used for."""

from __future__ import annotations

import contextlib
import ctypes
import os

MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD
LARGE = 128 << 10  # bytes: its own default, which it raises to 32 MB as soon as a large block was freed


def give_back() -> None:
    """Have large blocks go back to the system as soon as they are freed: in this whole process, from now on.

    Prompts are lists of a megabyte, and hundreds of threads make and free them: what glibc keeps of them in its many
    arenas was a fifth of all memory in tests/benchmarks/memory.py. Does nothing where there is no glibc, or where the
    user's environment sets the threshold.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "glibc.malloc.mmap_threshold" in tunables:
        return
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE)
