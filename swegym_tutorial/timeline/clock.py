"""A log's lines in seconds that only go forward, also where a machine's clock was set back while a run went on.

From where it was set back by more than a second, as many seconds are added as make the lines go on without a gap.
Knows of events nothing but their time and name.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..events import scan

BACK = 1.0  # seconds: what goes back by less was written by threads side by side
READ = 2**20  # bytes of a log that are read at once
NEAR = 2**18  # bytes of a log that are read in vain at most
_TIME = re.compile(rb'\{"time": (\d+(?:\.\d*)?), "event"')  # how a line of ours begins


class LogClock:
    """Reads a log's events, with times on one clock."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._set_back = list(_set_back(log))

    @property
    def offset(self) -> float:
        """Seconds that are added to the last events' times, and so to the present."""
        return self._set_back[-1][1] if self._set_back else 0.0

    def scan(self, names: Collection[str]) -> Iterator[dict[str, Any]]:
        """Yield the events of these names."""
        if not self._set_back:
            yield from scan(self._log, names)
        else:
            yield from (event for event in self.since(-math.inf) if event.get("event") in names)

    def since(self, time: float) -> Iterator[dict[str, Any]]:
        """Yield all events, about from a time on."""
        with self._log.open("rb") as file:
            at = self._place(file, time)
            file.seek(at)
            for line in file:
                if (event := _parse(line)) is not None:
                    if self._set_back and isinstance(event.get("time"), (int, float)):
                        event["time"] += self._added(at)
                    yield event
                at += len(line)

    def _added(self, place: int) -> float:
        """Return what is added to the time of a line that begins there."""
        return next((added for start, added in reversed(self._set_back) if start <= place), 0.0)

    def _place(self, file: BinaryIO, since: float) -> int:
        """Return where a line begins before which all are older, and not much later ones than that: by halving."""
        low, high = 0, file.seek(0, os.SEEK_END) if since > -math.inf else 0
        while high - low > NEAR:
            middle = (low + high) // 2
            file.seek(middle)
            file.readline()
            start, time = file.tell(), self._next_time(file)
            if time is not None and time < since:
                low = start
            else:
                high = middle
        return low

    def _next_time(self, file: BinaryIO) -> float | None:
        at = file.tell()
        while line := file.readline():
            time = (_parse(line) or {}).get("time")
            if isinstance(time, (int, float)):
                return time + self._added(at)
            at += len(line)
        return None


def _set_back(log: Path) -> Iterator[tuple[int, float]]:
    """Yield where a clock was set back: the byte at which a line begins, and what is added from there on."""
    at, added, last = 0, 0.0, -math.inf
    with log.open("rb") as file:
        while block := file.read(READ) + file.readline():
            times = np.fromiter(map(float, _TIME.findall(block)), float) + added
            newest = np.maximum.accumulate(np.concatenate([[last], times]))
            if not (times < newest[1:] - BACK).any():
                last = float(newest[-1])
            else:
                for found in _TIME.finditer(block):
                    time = float(found[1])
                    if time + added < last - BACK:
                        added = last - time
                        yield at + found.start(), added
                    last = max(last, time + added)
            at += len(block)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return a line's event; None of one that was cut, or is none."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
