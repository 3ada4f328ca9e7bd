"""End a backend's containers when the driver is gone, however it went; and tell whether a driver lives.

A driver that is killed can clean nothing up. So a backend whose sandboxes are elsewhere starts this module as a
small child (`python -m swegym_tutorial.sandbox.reaper KIND BACKEND PARENT`), which waits for the end of its
stdin, a pipe that only the driver holds, and then asks the kind's module to reap_backend(BACKEND).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

PATIENCE = 60.0  # seconds in which a service that does not answer is asked again
QUIET = 15.0  # seconds without a find, after which nothing is thought to be on its way any more
_DONE = b"done\n"


@functools.cache
def machine() -> str:
    """Where process ids mean what they mean here: the host's name, and a digest that containers and reboots change.

    Names alone are no identity: many containers and laptops have the same.
    """
    parts = [str(uuid.getnode())]
    with contextlib.suppress(OSError):
        parts = [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return f"{socket.gethostname()[:40]}.{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:8]}"


def driver_id() -> str:
    """Who this process is, on any machine and for all time: machine:pid:start."""
    return f"{machine()}:{os.getpid()}:{_start_of(os.getpid())}"


def is_gone(driver: str) -> bool | None:
    """Whether the process of that driver_id() has ended; None where that cannot be told from here."""
    place, _, number = driver.rpartition(":")[0].rpartition(":")
    if place != machine() or not number.isdigit():
        return None
    return _start_of(int(number)) != driver.rpartition(":")[2]


def _start_of(pid: int) -> str:
    """When a process started, in a form that no setting of the clock changes where there is /proc; "" if gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]  # ticks since the machine's start
    except OSError:
        pass
    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else str(round(process.create_time()))
    except psutil.Error:
        return ""


class Reaper:
    """The child process. close() once the backend has removed all of its own, or could not."""

    def __init__(self, kind: str, backend: str) -> None:
        package = Path(__file__).resolve().parent.parent.parent
        paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, kind, backend, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def close(self, done: bool = True) -> None:
        """Let it go; where not all is done it goes on trying for a while by itself."""
        assert self._child.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            if done:
                self._child.stdin.write(_DONE)
            self._child.stdin.close()
        if done:
            self._child.wait()


def _driver_is_done(parent: int) -> bool:
    """Wait for the driver's end; return whether it said that nothing is left to do."""
    heard = b""
    while os.getppid() == parent:  # a forked child may hold the pipe for longer than the driver lives
        if select.select([0], [], [], 2.0)[0]:
            data = os.read(0, 64)
            heard += data
            if not data or heard.endswith(_DONE):
                break
    return heard.endswith(_DONE)


def main(kind: str, backend: str, parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if _driver_is_done(parent):
        return
    module = importlib.import_module(f"{__package__}.{kind}")
    end, quiet_until = time.monotonic() + PATIENCE, time.monotonic() + QUIET
    while time.monotonic() < min(end, quiet_until):
        with contextlib.suppress(Exception):  # the service may be away for a while; there is nobody to tell
            if module.reap_backend(backend):
                quiet_until = time.monotonic() + QUIET
        time.sleep(1.0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
