"""What a run left behind: processes, folders of sandboxes, threads."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")
# The SDK keeps one thread with its event loop for all clients, and that loop threads for blocking calls, for the
# life of the process.
OF_THE_SDK = ("_background_thread_func", "asyncio_")


def processes(*places: Path | str) -> list[psutil.Process]:
    """Return the other processes whose command line or environment names one of these."""
    needles = [str(place).encode() for place in places]
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            text = b"\0".join(
                Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("cmdline", "environ")
            )
            gone = process.status() == psutil.STATUS_ZOMBIE
        except (OSError, psutil.Error):  # ended meanwhile
            continue
        if not gone and any(needle in text for needle in needles):
            found.append(process)
    return found


def folders(place: Path) -> list[Path]:
    """Return the sandbox folders in a place."""
    return sorted(place.glob("swegym-*"))


def threads(before: Iterable[threading.Thread]) -> list[threading.Thread]:
    """Return the threads that are new since `before`, without the SDK's."""
    known = set(before)
    return [
        thread
        for thread in threading.enumerate()
        if thread not in known and not any(word in thread.name for word in OF_THE_SDK)
    ]


def after_patience(look: Callable[[], list[T]], seconds: float) -> list[T]:
    """Look until nothing is found, at most so long; returns what was found last."""
    end = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


@contextmanager
def temporary_place() -> Iterator[Path]:
    """Give a folder whose name nothing else has, to find what is left by; in memory where that can be."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=memory if os.access(memory, os.W_OK) else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
