"""The run folder: what a run writes, and how it is read, live or afterwards.

    config.json                     the settings
    events.jsonl                    one JSON object a line, appended and flushed line by line
    train-job<n>-checkpoint.json    what a resume needs, written atomically after each batch
    episodes/<phase>/<job>/g000000-a0/
        ungraded.npz                the attempt, until it is graded
        trajectory.npz              with its verdict; both are told in episode_files.py
        prediction.patch            what the agent changed
        <instance id>/report.json, test_output.txt
    reward_time.png                 the figure

Knows nothing of how the records come about.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from .attempt_json import dumps, verdict_to_json
from .episode_disk import Cleaner, EpisodeDisk
from .episode_files import Recording, write_graded, write_ungraded
from .episode_files import read_episode as read_episode  # with the other readers
from .grading import Verdict
from .rollout import Rollout

# How a line begins: its name, and phase and job where it is an attempt's.
_START = rb'\{"time": [\d.]+, "event": "(%s)"(?:, "phase": "([^"]*)", "job": "([^"]*)")?'
READ = 2**20  # bytes of a log that are read at once
LONGEST_LINE = 2**24  # bytes: what is longer is no event of ours, and is passed over
IN_MEMORY = 8192  # tokens: an attempt of more is kept on disk alone, once it is there
OPENING = 3.0  # seconds: who looks whether a folder is written to holds its lock for a moment


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a crash, sees the old or the new one and nothing between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class FolderInUse(RuntimeError):
    """Two processes would write to one run folder."""


class RunFolder:
    """Names of what lies in a run folder, and the writing of it. Safe for many threads."""

    def __init__(self, path: str | os.PathLike[str], episodes_gb: float | None = None) -> None:
        """episodes_gb: how much disk the recorded attempts may take, in 10^9 bytes; from open() to close()
        the oldest are deleted beyond it, with an `episodes_deleted` event. None: all of them are kept."""
        self.path = Path(path).absolute()  # wherever the process goes
        self._torn = False  # whether the last line is not whole
        self.events = self.path / "events.jsonl"
        self._lock = threading.Lock()
        self._file: Any = None
        episodes = self.path / "episodes"
        self._disk = EpisodeDisk(episodes, episodes_gb * 1e9, self.log) if episodes_gb is not None else None
        self._background = self._disk or Cleaner(episodes)

    def used(self) -> bool:
        """Whether it holds anything; what a process leaves that is killed while it begins is nothing."""
        if not self.path.exists():
            return False
        empty = {self.events.name} if self.events.exists() and not self.events.stat().st_size else set()
        return any(not each.name.startswith(".") and each.name not in empty for each in self.path.iterdir())

    def open(self) -> None:
        """Make the folder and open the log for appending; a last line that was cut is ended first.

        Raises FolderInUse where another process writes to the folder right now.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.events.open("a+b", buffering=0)
        try:
            _lock(file)
        except BlockingIOError:
            file.close()
            raise FolderInUse(
                f"another run is writing to {self.path}: stop it first, or name another folder"
            ) from None
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        self._file = file
        for part in self.path.glob(".*.json.*"):  # what a process wrote when it was killed
            part.unlink(missing_ok=True)
        self._background.start()

    def written(self) -> bool:
        """Whether a process writes to the folder now; True also where the file system has no locks."""
        try:
            with self.events.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def log(self, event: str, **fields: Any) -> None:
        """Append one event; `time` is in seconds since 1970. After close() it does nothing. Raises OSError."""
        line = dumps({"time": round(time.time(), 3), "event": event, **fields}) + "\n"
        with self._lock:
            if self._file is not None and not self._file.closed:
                self._append(line.encode("utf-8", "backslashreplace"))  # which JSON reads as it was
        if event == "episode" and self._disk is not None:  # graded, or lost: nobody writes to it any more
            names = ("phase", "job", "group", "attempt")
            self._disk.finish(self.episode(*(fields[name] for name in names)))

    def _append(self, line: bytes) -> None:
        """Write a whole line; where the disk had no room for one, the next begins anew."""
        left, self._torn = (b"\n" if self._torn else b"") + line, True
        while left:
            left = left[self._file.write(left) :]
        self._torn = False

    def close(self) -> None:
        self._background.close()
        with self._lock:
            if self._file is not None:
                self._file.close()

    def sync(self) -> None:
        """Have the log on the disk, so that no loss of power takes lines that a checkpoint rests on."""
        with self._lock:
            if self._file is not None and not self._file.closed:
                os.fsync(self._file.fileno())

    def checkpoint(self, job: int) -> Path:
        return self.path / f"train-job{job}-checkpoint.json"

    def episode(self, phase: str, job: str, group: int, attempt: int) -> Path:
        return self.path / "episodes" / phase / job / f"g{group:06d}-a{attempt}"

    def save_rollout(self, folder: Path, rollout: Rollout) -> None:
        """Write an attempt as it stands before grading. Raises OSError."""
        with _told(folder):
            self._save_rollout(folder, rollout)

    def _save_rollout(self, folder: Path, rollout: Rollout) -> None:
        if self._disk is not None:
            self._disk.begin(folder)
        folder.mkdir(parents=True, exist_ok=True)
        size = write_ungraded(folder, rollout)
        (folder / "prediction.patch").write_bytes(rollout.patch)
        if self._disk is not None:
            self._disk.wrote(folder, size, len(rollout.patch))

    def save_episode(self, folder: Path, rollout: Rollout, verdict: Verdict) -> None:
        """Write an attempt with its verdict, and what the tests said. Raises RecordingLost, OSError.

        What was deleted of its folder meanwhile, or stands in a file's place, is made up for.
        """
        rollout = rollout.whole()
        with _told(folder):
            try:
                self._save_episode(folder, rollout, verdict)
            except (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError):
                shutil.rmtree(folder, ignore_errors=True)
                self._save_rollout(folder, rollout)
                self._save_episode(folder, rollout, verdict)

    def _save_episode(self, folder: Path, rollout: Rollout, verdict: Verdict) -> None:
        report = (dumps(verdict_to_json(verdict)) + "\n").encode("utf-8", "backslashreplace")
        output = verdict.log.encode("utf-8", "backslashreplace")
        size, freed = write_graded(folder, rollout, verdict)
        tests = folder / rollout.task_id.lower()
        tests.mkdir(exist_ok=True)
        (tests / "report.json").write_bytes(report)
        (tests / "test_output.txt").write_bytes(output)
        if self._disk is not None:
            self._disk.wrote(folder, size, len(report), len(output), freed=freed)

    def shelve(self, folder: Path, rollout: Rollout, key: Mapping[str, Any]) -> Rollout:
        """Return an attempt that was saved: a long one without what takes memory, and read back where it is needed.

        It is not deleted for space as long as anybody holds what this returns. key: the fields of its events.
        """
        if len(rollout.tokens) <= IN_MEMORY:
            return rollout
        recording = Recording(folder, key)
        if self._disk is not None:
            self._disk.hold(folder)
            weakref.finalize(recording, self._disk.release, folder).atexit = False
        return replace(rollout.bare(), patch=rollout.patch, read=recording)


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Tell of a disk that takes no attempt what was to be written, and what to do: the run ends with it."""
    try:
        yield
    except OSError as error:
        why = f"{error.strerror or error}: the attempt in {folder} cannot be recorded, so the run ends"
        raise OSError(error.errno, f"{why}; see to its disk and folder, then resume the run") from error


def _lock(file: Any) -> None:
    """Take the log's lock, for as long as it is open. Raises BlockingIOError where another process keeps it."""
    deadline = time.monotonic() + OPENING
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        except OSError:  # a file system without locks, such as some network ones
            return None


class EventReader:
    """Reads a run's events as they grow: each `read()` returns those that came since the last one.

    A last line that is still being written, or was cut by a crash, is left for later; a line that is no JSON
    object is passed over and counted in `bad_lines`.
    """

    def __init__(self, path: str | os.PathLike[str], skip: Iterable[str] = ()) -> None:
        """skip: names of events to count and not to read, which is much quicker; one that is the last of many is
        returned all the same, so that the time of the last event is known."""
        self._path = _log_in(path)
        self._skip = re.compile(_START % _any_of(skip)) if skip else None
        self._skipped: dict[tuple[bytes | None, ...], int] = {}
        self._at = 0
        self.bad_lines = 0

    def read(self) -> list[dict[str, Any]]:
        """Return all that is new. Of a long log this is much at once: `stream` is for those."""
        return list(self.stream())

    def stream(self) -> Iterator[dict[str, Any]]:
        """Yield what is new, in little memory however long the log is. What was not taken comes again."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            skip, counts = self._skip.match if self._skip else lambda line: None, self._skipped
            for block in _blocks(file):
                at, end = self._at, self._at + len(block)
                for line in block.splitlines(keepends=True):
                    at += len(line)
                    if (found := skip(line)) and at < end:
                        key = found.groups()
                        counts[key] = counts.get(key, 0) + 1
                        continue
                    self._at = at
                    event = _parse(line)
                    if event is not None:
                        yield event
                    elif line.strip():
                        self.bad_lines += 1

    def skipped(self) -> dict[tuple[str, str, str], int]:
        """Return how many events were passed over so far, by name, phase and job; empty where none is named."""
        return {
            (str(name, "utf-8"), str(phase or b"", "utf-8"), str(job or b"", "utf-8")): n
            for (name, phase, job), n in self._skipped.items()
            if name
        }


def scan(path: str | os.PathLike[str], names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield a log's events of these names in their order, in little memory and without reading the others as JSON.

    path: a run's folder or its log; where there is none, nothing is yielded. Lines that were cut or are no events
    are passed over.
    """
    names = frozenset(names)
    path = _log_in(path)
    if not names or not path.exists():
        return
    wanted = re.compile(rb'"event": ?"(?:' + _any_of(names) + rb')"')
    with path.open("rb") as file:
        for block in _blocks(file):
            at = 0
            while found := wanted.search(block, at):
                start = block.rfind(b"\n", at, found.start()) + 1 or at
                at = block.find(b"\n", found.end()) + 1 or len(block)
                event = _parse(block[start:at])
                if event is not None and event.get("event") in names:
                    yield event


def mark_unfinished(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the attempts that began and neither ended nor were marked, oldest first.

    Each is the fields of its `attempt_unfinished` event: phase, job, group, attempt, instance_id, policy_version.
    Takes memory for the attempts that are open side by side, not for the log's length.
    """
    fields = ("phase", "job", "group", "attempt", "instance_id", "policy_version")
    begun: dict[tuple[Any, ...], dict[str, Any]] = {}
    for event in scan(path, ("rollout_start", "episode", "attempt_unfinished")):
        key = tuple(event.get(name) for name in fields[:4])
        if event["event"] == "rollout_start":
            begun[key] = {name: event.get(name) for name in fields}
        else:
            begun.pop(key, None)
    return list(begun.values())


def _any_of(names: Iterable[str]) -> bytes:
    return b"|".join(re.escape(name.encode()) for name in names)


def _log_in(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path / "events.jsonl" if path.is_dir() or not path.suffix else path


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line.decode("utf-8", "surrogatepass"))  # it would look for the encoding first
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield a file's whole lines, many at once; a last line without an end is left, unless it is far too long."""
    rest = b""
    while data := file.read(READ):
        end = data.rfind(b"\n") + 1
        if end:
            yield rest + data[:end]
            rest = data[end:]
        else:
            rest += data
            if len(rest) > LONGEST_LINE:
                yield rest
                rest = b""
