"""The run folder: what a run writes, and how it is read, live or afterwards.

    config.json                     the settings
    events.jsonl                    one JSON object a line, appended and flushed line by line
    train-job<n>-checkpoint.json    what a resume needs, written atomically after each batch
    episodes/<phase>/<job>/g000000-a0/
        ungraded.json.gz            the attempt before grading
        trajectory.json.gz          with its verdict
        prediction.patch            what the agent changed
        <instance id>/report.json, test_output.txt
    reward_time.png                 the figure

Knows nothing of how the records come about.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .grading import Verdict
from .rollout import Rollout


def _finite(value: Any) -> Any:
    """Replace what JSON cannot say (NaN, infinities) by null, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def dumps(value: Any) -> str:
    """Return one line of valid JSON."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader, or a crash, sees the old or the new one and nothing between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class FolderInUse(RuntimeError):
    """Two processes would write to one run folder."""


class RunFolder:
    """Names of what lies in a run folder, and the writing of it. Safe for many threads."""

    def __init__(self, path: str | os.PathLike[str], episodes_gb: float | None = None) -> None:
        self.path = Path(path)
        self.events = self.path / "events.jsonl"
        self._lock = threading.Lock()
        self._file: Any = None

    def used(self) -> bool:
        return self.path.exists() and any(self.path.iterdir())

    def open(self) -> None:
        """Make the folder and open the log for appending; a last line that was cut is ended first.

        Raises FolderInUse where another process writes to the folder right now.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.events.open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise FolderInUse(
                f"another run is writing to {self.path}: stop it first, or name another folder"
            ) from None
        except OSError:  # a file system without locks, such as some network ones
            pass
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        self._file = file

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
                self._file.write(line.encode())

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()

    def checkpoint(self, job: int) -> Path:
        return self.path / f"train-job{job}-checkpoint.json"

    def episode(self, phase: str, job: str, group: int, attempt: int) -> Path:
        return self.path / "episodes" / phase / job / f"g{group:06d}-a{attempt}"

    def save_rollout(self, folder: Path, rollout: Rollout) -> None:
        """Write an attempt as it stands before grading."""
        folder.mkdir(parents=True, exist_ok=True)
        _write_gzip(folder / "ungraded.json.gz", rollout_to_json(rollout))
        (folder / "prediction.patch").write_bytes(rollout.patch)

    def save_episode(self, folder: Path, rollout: Rollout, verdict: Verdict) -> None:
        """Write an attempt with its verdict, and what the tests said."""
        report = verdict_to_json(verdict)
        _write_gzip(folder / "trajectory.json.gz", {**rollout_to_json(rollout), "verdict": report})
        tests = folder / rollout.task_id.lower()
        tests.mkdir(exist_ok=True)
        (tests / "report.json").write_text(dumps(report) + "\n", encoding="utf-8")
        (tests / "test_output.txt").write_text(verdict.log, encoding="utf-8")


def _write_gzip(path: Path, value: Any) -> None:
    data = gzip.compress(dumps(value).encode(), compresslevel=1, mtime=0)
    temporary = path.with_name(f".{path.name}")
    temporary.write_bytes(data)
    temporary.replace(path)  # so that a reader of a live run never sees half of it


def rollout_to_json(rollout: Rollout) -> dict[str, Any]:
    turns = [
        {
            "text": turn.text,
            "sampled_tokens": turn.sampled_tokens,
            "calls": [
                {
                    "command": command,
                    "exit_code": result.exit_code,
                    "output": result.output,
                    "timed_out": result.timed_out,
                    "truncated_bytes": result.truncated_bytes,
                    "seconds": round(result.seconds, 4),
                }
                for command, result in zip(turn.commands, turn.results, strict=True)
            ],
            "errors": list(turn.errors),
        }
        for turn in rollout.turns
    ]
    return {
        "instance_id": rollout.task_id,
        "ending": rollout.ending,
        "seconds": round(rollout.seconds, 4),
        "turns": turns,
        "tokens": rollout.tokens.tolist(),
        "mask": rollout.mask.astype(int).tolist(),
        "logprobs": [round(x, 6) for x in rollout.logprobs.tolist()],
    }


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "outcome": verdict.outcome,
        "reward": verdict.reward,
        "tests": dict(verdict.tests),
        "detail": verdict.detail,
        "seconds": round(verdict.seconds, 4),
        "shared": verdict.shared,
        "plain": verdict.plain,  # by the printed output and SWE-Gym's rules alone
    }


def read_episode(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return an attempt as it was saved: its trajectory with the verdict, or without one where it was not graded.

    Raises FileNotFoundError where the folder holds neither.
    """
    folder = Path(folder)
    path = folder / "trajectory.json.gz"
    if not path.exists():
        path = folder / "ungraded.json.gz"
    return json.loads(gzip.decompress(path.read_bytes()))


class EventReader:
    """Reads a run's events as they grow: each `read()` returns those that came since the last one.

    A last line that is still being written, or was cut by a crash, is left for later; a line that is no JSON
    object is passed over and counted in `bad_lines`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        self._path = path / "events.jsonl" if path.is_dir() or not path.suffix else path
        self._at = 0
        self.bad_lines = 0

    def read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return list(self._parse(whole))

    def _parse(self, data: bytes) -> Iterator[dict[str, Any]]:
        for line in data.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if isinstance(event, dict):
                yield event
            elif line.strip():
                self.bad_lines += 1


def scan(path: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of these names, in bounded memory; lines that are no events are passed over."""
    if not path.exists():
        return
    marks = [f'"event": "{name}"'.encode() for name in names]
    with path.open("rb") as file:
        for line in file:
            if any(mark in line for mark in marks):
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if isinstance(event, dict) and event.get("event") in names:
                        yield event


def mark_unfinished(path: Path) -> list[dict[str, Any]]:
    open_attempts: dict[Any, dict[str, Any]] = {}
    for event in scan(path, ("rollout_start", "episode", "attempt_unfinished")):
        key = tuple(event.get(k) for k in ("phase", "job", "group", "attempt"))
        if event["event"] == "rollout_start":
            open_attempts[key] = {k: v for k, v in event.items() if k not in ("time", "event")}
        else:
            open_attempts.pop(key, None)
    return list(open_attempts.values())
