"""What a sandbox may use, and the meter that looks at it while a command runs.

The kernel's per-process limits hold one process; the sum over processes and files is held by looking at it from
time to time. Knows process ids and folders; nothing of commands' output or namespaces.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

FIRST_LOOK = 0.2  # seconds: most commands end sooner and cost nothing
MEMORY_EVERY = 0.15  # seconds between two looks at processes and memory
DISK_EVERY = 0.5  # seconds between two looks at files
COST = 25  # a look that took t seconds is not repeated before COST x t: at most 4% of the time
FILES_PER_MB = 100  # how many files and folders may come with each MB of the disk limit


@dataclass(frozen=True)
class Limits:
    """The limits of one sandbox: all its processes together, all its files together."""

    memory_mb: int  # resident memory of all processes; also each one's address space
    disk_mb: int  # files in /testbed, /tmp and /home/agent; also one file's size
    processes: int  # processes and threads at one time
    cpu_seconds: int  # of each process


class Meter:
    """Watches the use of one sandbox over its commands, and says in words what is over the limit.

    It looks first after FIRST_LOOK seconds of a command, then about every MEMORY_EVERY seconds at memory and
    processes and every DISK_EVERY at files. So a command can go over by what it manages to take between two
    looks: about 0.2 s of touching memory (some 0.5 GB a core), about 0.5 s of writing to disk. Short commands
    are added up until they make FIRST_LOOK seconds; what they took too much is told and ends none of them. Not
    seen are files that are deleted and still open, unattached shared memory, what lies deeper than a path can
    tell, and, for an ordinary user, what lies in unreadable folders.
    """

    def __init__(self, folders: tuple[Path, ...], limits: Limits) -> None:
        self._folders, self._limits = folders, limits
        self.disk_excess: str | None = None  # what the last look at the files found too much
        self._found = 0, 0  # bytes and number of files at that look
        self._most = limits.disk_mb << 20, limits.disk_mb * FILES_PER_MB
        self._allowed = self._most  # to the command that runs; beyond it, it must be deleting
        self._unseen = 0.0  # seconds of commands since that look
        self.due = self._disk_due = 0.0

    def begin(self) -> None:
        """A command starts now; sets `due`, the time (time.monotonic) of the first look.

        Where there is too much on disk already, that much is allowed, so that there is the time to delete; and
        from then on never more than the least that was found, until all is within the limit again.
        """
        size, count = map(_lowered, self._most, self._allowed, self._found)
        self._allowed = size, count
        self.due = self._disk_due = time.monotonic() + FIRST_LOOK

    def look(self, pid: int) -> str | None:
        """Look at the processes under pid and, where it is time, at the files; sets `due` anew."""
        start = time.monotonic()
        excess = self._processes(pid)
        now = time.monotonic()
        self.due = now + max(MEMORY_EVERY, COST * (now - start))
        if excess is None and now >= self._disk_due:
            before = self._found
            excess = self._look_at_disk()
            found = zip(before, self._found, self._allowed, strict=True)
            if all(new <= allowed or new < old for old, new, allowed in found):
                excess = None
            after = time.monotonic()
            self._disk_due = after + max(DISK_EVERY, COST * (after - now))
        return excess

    def end(self, seconds: float) -> str | None:
        """A command ended after so many seconds. Returns what is too much on disk, where this looked at it."""
        self._unseen += seconds
        if self._unseen >= FIRST_LOOK or self.disk_excess:
            return self._look_at_disk()
        return None

    def _processes(self, pid: int) -> str | None:
        pids = list(descendants(pid))
        if len(pids) > self._limits.processes + 2:  # bubblewrap's own, which the kernel does not count in
            return f"{len(pids)} processes ran at once; the limit is {self._limits.processes}"
        limit = self._limits.memory_mb << 20
        used = sum(_memory(p, exact=False) for p in pids)
        if used > limit:  # resident memory counts shared pages once a process; the exact figure is slower
            used = sum(_memory(p, exact=True) for p in pids)
        if used > limit:
            return f"its processes took {used >> 20} MB of memory; the limit is {self._limits.memory_mb} MB"
        return None

    def _look_at_disk(self) -> str | None:
        self._unseen = 0.0
        size = count = 0
        for folder in self._folders:
            for used in disk_use(folder):
                size, count = size + used, count + 1
        self._found = size, count
        self.disk_excess = None
        if size > self._most[0]:
            self.disk_excess = f"files take {size >> 20} MB; the limit is {self._limits.disk_mb} MB"
        elif count > self._most[1]:
            self.disk_excess = f"there are {count} files and folders; the limit is {self._most[1]}"
        return self.disk_excess


def _lowered(most: int, allowed: int, found: int) -> int:
    """Return what the next command is allowed: the limit, or beyond it the least found since the first excess."""
    return max(most, found if allowed == most else min(allowed, found))


def descendants(pid: int) -> Iterator[int]:
    """Yield the ids of all processes below pid. It is a snapshot: processes come and go meanwhile."""
    waiting = [pid]
    while waiting:
        for child in _children(waiting.pop()):
            waiting.append(child)
            yield child


def _children(pid: int) -> list[int]:
    try:
        found: list[int] = []
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                found += map(int, file.read(1 << 20).split())
        return found
    except OSError:  # ended meanwhile, or a system whose /proc does not list children
        if os.path.exists("/proc/self/task") and not os.path.exists(f"/proc/{pid}"):
            return []
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.Error:
        return []


def _memory(pid: int, *, exact: bool) -> int:
    try:
        process = psutil.Process(pid)
        if exact:
            full = process.memory_full_info()
            return getattr(full, "pss", full.rss)
        return process.memory_info().rss
    except psutil.Error:
        return 0


def disk_use(folder: Path) -> Iterator[int]:
    """Yield the bytes on disk of every file and folder below `folder`, following no link."""
    waiting = [os.fspath(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    yield entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:  # deleted meanwhile, unreadable, or deeper than a path can tell
            continue
