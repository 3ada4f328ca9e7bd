"""Which steps a run has done as it stands, where it went back to an earlier one, and when chosen steps were made.

Reads the few lines of a log that tell it. Times in seconds since 1970. Knows nothing of spans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..records import job_order
from .clock import LogClock

LAST = 10  # steps that are shown of a longer run


@dataclass(frozen=True)
class Done:
    """A step as it stands in the log."""

    job: str
    number: int  # counted from 1
    version: int  # of the policy that it published
    start: float
    end: float


@dataclass(frozen=True)
class Back:
    """A job goes back to an earlier step: what it did from that one's end until then is no part of the run."""

    job: str
    step: int  # counted from 1; 0: the start
    start: float
    end: float


@dataclass
class History:
    """What the jobs of a run have done: of a step made twice the later one counts."""

    done: dict[str, list[Done]] = field(default_factory=dict)
    backs: list[Back] = field(default_factory=list)  # in the order of the log
    jobs: tuple[str, ...] = ()

    def take(self, event: Mapping[str, Any]) -> None:
        """Take a step_done, rolled_back or resumed. Raises KeyError, TypeError and ValueError of odd ones."""
        job, step, time = event["job"], int(event["step"]) + 1, float(event["time"])
        if not isinstance(job, str) or not math.isfinite(time):
            raise TypeError(f"no job and time: {job!r}, {time!r}")
        if event["event"] == "step_done":
            made = Done(job, step, int(event["policy_version"]), time - float(event["batch_seconds"]), time)
            self._drop(job, step - 1)
            self.done[job].append(made)
        elif self._drop(job, step) or event["event"] == "rolled_back":
            kept = self.done[job]
            self.backs.append(Back(job, step, kept[-1].end if kept else -math.inf, time))

    def _drop(self, job: str, after: int) -> bool:
        """Forget a job's steps after this one; returns whether there were any."""
        steps = self.done.setdefault(job, [])
        count = len(steps)
        while steps and steps[-1].number > after:
            steps.pop()
        return len(steps) < count


def read_history(lines: LogClock) -> History:
    history = History()
    names: set[str] = set()
    for event in lines.scan(("run_start", "step_done", "rolled_back", "resumed")):
        try:
            if event["event"] == "run_start":
                names |= {f"train-job{n}" for n in range(event["clients"])}
            else:
                history.take(event)
                names.add(event["job"])
        except (KeyError, TypeError, ValueError):
            continue  # a foreign or older line must not hide the others
    history.jobs = tuple(sorted(names, key=job_order))
    return history


def window(
    done: Sequence[Done], backs: Sequence[Back], first: int | None, last: int | None
) -> tuple[float, float]:
    """Return from when to when, in seconds since 1970, these steps were made."""
    most = max((step.number for step in done), default=0)
    if first is not None and not 1 <= first <= most + 1:
        raise ValueError(f"first={first}: steps are counted from 1, and this run has done {most}")
    if last is not None and not (first or 1) <= last:
        raise ValueError(f"last={last}: it must not be before the first step, {first or 1}")
    if first is None:
        first = 1 if (last or most) <= LAST else (last or most) - LAST + 1
    ends = [step.end for step in done if last is not None and step.number <= last]
    until = max(ends) if ends and last is not None and last <= most else math.inf
    if first == 1:
        return -math.inf, until
    before = [
        max([step.end, *(back.end for back in backs if (back.job, back.step) == (step.job, step.number))])
        for step in done
        if step.number == first - 1
    ]
    starts = [step.start for step in done if step.number >= first]
    return min(before or starts), until
