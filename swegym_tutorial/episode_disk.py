"""How much disk the recorded attempts take, and what is deleted when it is too much.

A full run makes 200,000 attempts, so nothing is walked while it runs: what was there before is counted once, in
the background, and from then on each save tells its bytes. Knows nothing of what is in the files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path

from .episode_files import is_left_over

BLOCK = 4096  # bytes: a file takes whole blocks of the disk
FOLDERS = 2 * BLOCK  # bytes that an attempt's folder and the one in it take
KEPT = 0.9  # of the limit is left when attempts were deleted, so that it isn't done for each attempt


def on_disk(size: int) -> int:
    """Return the bytes that a file of `size` bytes takes."""
    return -(-size // BLOCK) * BLOCK


class EpisodeDisk:
    """Keeps the attempts below `episodes` under a limit. Its methods may be called from any thread.

    The oldest attempts of the training go first, and those of evaluations, which are few and are what a run is
    measured by, only when none of the training is left. An attempt that is still being written, or that somebody
    will read again, is never deleted.
    """

    def __init__(self, episodes: Path, limit: float, log: Callable[..., None]) -> None:
        """limit: bytes. log: takes an event's name and its fields, as RunFolder.log does."""
        self._root = episodes
        self._limit = limit
        self._log = log
        self._change = threading.Condition()  # guards what follows
        self._total = 0
        self._open: dict[str, int] = {}  # folder below the root -> bytes
        self._finished: dict[bool, dict[str, int]] = {
            False: {},
            True: {},
        }  # evaluation? -> the same, oldest first
        self._ended: set[str] = set()  # those that have ended, and are open as somebody will read them again
        self._held: Counter[str] = Counter()  # how many will
        self._released: deque[str] = deque()  # which need no lock, as they come while objects are freed
        self._busy = True  # counting or deleting
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="episode-disk", daemon=True)

    def start(self) -> None:
        """Count what is there in the background; nothing is deleted before that is done."""
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """End the counting or deleting, after the attempt that it is at."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def total(self) -> int:
        """The bytes of all attempts that are known; what was there before is in it once it is counted."""
        with self._change:
            return self._total

    def settled(self, timeout: float) -> bool:
        """Wait until what was there is counted and what is too much is deleted; returns whether that has come."""
        with self._change:
            return self._change.wait_for(lambda: not self._busy and not self._too_much(), timeout)

    def begin(self, folder: Path) -> None:
        """An attempt is about to be written, for the first time or anew: it stays until `finish`."""
        name = self._name(folder)
        with self._change:
            self._total -= self._finished[_is_evaluation(name)].pop(name, 0) + self._open.get(name, 0)
            self._open[name] = FOLDERS
            self._ended.discard(name)
            self._total += FOLDERS

    def wrote(self, folder: Path, *sizes: int, freed: int = 0) -> None:
        """Files of these sizes in bytes were written for an attempt that began, and one of `freed` was deleted."""
        name, taken = self._name(folder), sum(map(on_disk, sizes)) - on_disk(freed)
        with self._change:
            if name in self._open:
                self._open[name] += taken
                self._total += taken

    def finish(self, folder: Path) -> None:
        """An attempt ended, graded or lost, and may be deleted from now on, unless it is held."""
        names = {self._name(folder)}
        with self._change:
            self._ended |= names
            while self._released:
                name = self._released.popleft()
                self._held[name] -= 1
                names.add(name)
            for name in names & self._ended:
                if self._held[name] > 0:
                    continue
                self._ended.discard(name)
                del self._held[name]
                if (taken := self._open.pop(name, None)) is not None:
                    self._finished[_is_evaluation(name)][name] = taken
            if self._total > self._limit:
                self._change.notify_all()

    def hold(self, folder: Path) -> None:
        """Somebody will read an attempt again that is still open: it stays until `release`."""
        with self._change:
            self._held[self._name(folder)] += 1

    def release(self, folder: Path) -> None:
        """Nobody will, from now on; it is noted when the next attempt ends. May be called at any moment."""
        self._released.append(self._name(folder))

    def _name(self, folder: Path) -> str:
        return os.path.relpath(folder, self._root)

    # -- A thread of its own -----------------------------------------------------------------------

    def _work(self) -> None:
        self._count()
        while True:
            with self._change:
                self._busy = False
                self._change.notify_all()
                self._change.wait_for(lambda: self._closed or self._too_much())
                if self._closed:
                    return
                self._busy = True
                chosen = self._choose()
            self._delete(chosen)

    def _too_much(self) -> bool:
        return self._total > self._limit and any(self._finished.values())

    def _count(self) -> None:
        """Take in the attempts of earlier parts of the run, in the order of their ends."""
        there = sorted((ended, name, taken) for name, taken, ended in self._there())
        with self._change:
            for kind in self._finished:
                known = self._open.keys() | self._finished[kind].keys()
                old = {n: taken for _, n, taken in there if _is_evaluation(n) is kind and n not in known}
                self._total += sum(old.values())
                self._finished[kind] = old | self._finished[kind]

    def _there(self) -> Iterator[tuple[str, int, int]]:
        """Yield each attempt's folder, its bytes and when it was last written to, in ns."""
        for name, path, ended in _earlier(self._root, lambda: self._closed):
            yield name, FOLDERS + _size(path), ended

    def _choose(self) -> list[tuple[str, int]]:
        """Take the oldest finished attempts out of the account, until what is left is well below the limit."""
        chosen: list[tuple[str, int]] = []
        for kind in (False, True):
            for name, taken in self._finished[kind].items():
                if self._total <= KEPT * self._limit:
                    break
                self._total -= taken
                chosen.append((name, taken))
            for name, _ in chosen:
                self._finished[kind].pop(name, None)
        return chosen

    def _delete(self, chosen: list[tuple[str, int]]) -> None:
        count = freed = 0
        trouble = ""
        for name, taken in chosen:
            if self._closed:
                break
            with self._change:
                if name in self._open or name in self._finished[_is_evaluation(name)]:  # made anew meanwhile
                    continue
                aside = self._root / f".{name.replace(os.sep, '+')}"
                try:  # one step, so that an attempt of this name can be written meanwhile
                    (self._root / name).rename(aside)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    trouble = str(error)
                    continue
            try:
                shutil.rmtree(aside)
            except OSError as error:
                trouble = str(error)
                continue
            count, freed = count + 1, freed + taken
        with contextlib.suppress(OSError):  # the disk is full: room has just been made for the next line
            if count:
                self._log("episodes_deleted", count=count, bytes=freed)
            if trouble:
                self._log("note", text=f"some recorded attempts could not be deleted: {trouble}")


class Cleaner:
    """Removes in the background what earlier parts of the run left, where no limit has the attempts counted."""

    def __init__(self, episodes: Path) -> None:
        self._root = episodes
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._closed.clear()
        self._thread = threading.Thread(target=self._work, name="episode-disk", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        for _ in _earlier(self._root, self._closed.is_set):
            pass

    def close(self, timeout: float = 5.0) -> None:
        """End it, after the attempt that it is at."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout)


def _earlier(root: Path, closed: Callable[[], bool]) -> Iterator[tuple[str, str, int]]:
    """Yield the attempts' folders: name below the root, path, and when it was last written to, in ns.

    Removes what a killed process was writing into one, and what it was about to delete.
    """
    for phase in _folders(root):
        if phase.name.startswith("."):  # what an earlier part was about to delete when it ended
            shutil.rmtree(phase.path, ignore_errors=True)
            continue
        for job in _folders(phase.path):
            for attempt in _folders(job.path):
                if closed():
                    return
                try:
                    ended = attempt.stat(follow_symlinks=False).st_mtime_ns
                    _remove_left_over(attempt.path)
                except OSError:
                    continue
                yield f"{phase.name}/{job.name}/{attempt.name}", attempt.path, ended


def _remove_left_over(path: str) -> None:
    with os.scandir(path) as entries:
        parts = [each for each in entries if is_left_over(each.name)]
    for part in parts:
        with contextlib.suppress(OSError):  # of somebody else's, say: it takes room, and does no harm
            os.unlink(part.path)


def _is_evaluation(name: str) -> bool:
    return name.startswith("evaluation")


def _folders(path: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [each for each in entries if each.is_dir(follow_symlinks=False)]
    except OSError:  # not there, or deleted meanwhile
        return []


def _size(path: str) -> int:
    """Return the bytes that the files in a folder and below take."""
    total = 0
    try:
        with os.scandir(path) as entries:
            for each in entries:
                if each.is_dir(follow_symlinks=False):
                    total += _size(each.path)
                else:
                    total += on_disk(each.stat(follow_symlinks=False).st_size)
    except OSError:
        pass
    return total
