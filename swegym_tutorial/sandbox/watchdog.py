"""Delete a backend's folder and end its processes when the driver is gone, however it went.

A driver that is killed can clean nothing up, so each backend starts this file as a small child of its own
session (`python -I -S watchdog.py ROOT PARENT`), which waits for the end of its stdin, a pipe that only the
driver holds. After a clean close ROOT is gone already, and it just ends. Uses the standard library alone and
imports nothing of the package, since it runs without site-packages.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

MARKER = "SWEGYM_SANDBOX"  # environment variable that every process of a sandbox is started with
LOOKS = 10  # for marked processes, however long they take
PATIENCE = 25.0  # seconds in which a folder that dying processes still write to must be gone


def kill_marked(place: str, patience: float = 2.0) -> None:
    """Kill every process started for a sandbox at or below `place`, until two looks in a row find none.

    A process that just becomes another program shows no environment, and is looked at again. Goes by what /proc
    shows, so it finds processes in other sessions and those whose parents died; not one that changed its
    environment, and none on systems without /proc. The patience is for what goes on forking: there are
    always LOOKS, since a busy machine may let the time pass before the second one.
    """
    needle = f"{MARKER}={place.rstrip('/')}/".encode()
    end, clean, looks = time.monotonic() + patience, 0, 0
    while clean < 2 and (looks < LOOKS or time.monotonic() < end):
        found, between = _marked(needle)
        clean, looks = 0 if found or between else clean + 1, looks + 1
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def _marked(needle: bytes) -> tuple[list[int], bool]:
    """Return the processes with that in their environment, and whether any just becomes another program."""
    found, between = [], False
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb", buffering=0) as file:
                if needle in (environment := file.read(1 << 20)):
                    found.append(int(name))
            between = between or (not environment and _between(name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found, between


def _between(pid: str) -> bool:
    """Whether a process that showed no environment is, or was then, without that of its new program alone."""
    with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        fields = file.read(4096).rpartition(b")")[2].split()  # from the third on: see proc(5)
    if len(fields) < 49 or fields[20] == b"0":  # its memory's size: it ended meanwhile
        return False
    start, end = fields[47:49]  # of its environment
    return end == b"0" or start != end


def _wait_for_driver(parent: int) -> None:
    """Return when stdin ends. A forked child may hold the pipe for longer, so the parent is looked at too."""
    while os.getppid() == parent:
        if select.select([0], [], [], 2.0)[0] and not os.read(0, 1):
            return


def main(root: str, parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _wait_for_driver(parent)
    end = time.monotonic() + PATIENCE
    while os.path.lexists(root) and time.monotonic() < end:
        kill_marked(root)
        subprocess.run(["chmod", "-R", "u+rwX", root], stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", root], stderr=subprocess.DEVNULL)
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
