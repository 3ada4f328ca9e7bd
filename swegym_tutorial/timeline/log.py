"""A log's lines as spans in the seconds since 1970: what begins and ends is paired, and the rest is passed over.

Knows the names of events and nothing of what is done with the spans.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..events import RunFolder
from .clock import LogClock

Key = tuple[str, int, int]  # job, group, attempt
ENDS = ("run_done", "run_stopped", "run_failed")


@dataclass(frozen=True, slots=True)
class RawSpan:
    """What `timeline.Span` says, in seconds since 1970; part: which part of a resumed run it lies in."""

    part: int
    kind: str
    start: float
    end: float
    job: str
    name: str
    group: int | None
    step: int | None
    version: int
    ended: bool = True


@dataclass
class Raw:
    """What was read of a window of a log."""

    spans: list[RawSpan] = field(default_factory=list)
    fates: dict[tuple[int, str, int | None], str] = field(default_factory=dict)  # by part, job and group
    parts: list[tuple[float, float]] = field(default_factory=list)  # from when to when training went on
    live: bool = False


@dataclass
class _Open:
    """An attempt that is not over. Times in seconds since 1970."""

    start: float
    version: int
    turn: tuple[float, float] | None = None  # the sampling of the turn that was logged last
    turns: list[tuple[str, float, float]] = field(default_factory=list)
    grading: float | None = None  # since when it is graded


def read_log(
    log: Path,
    jobs: Mapping[str, int],
    since: float,
    until: float,
    margin: float = 0.0,
    now: float | None = None,
    clock: LogClock | None = None,
) -> Raw:
    """Read the spans of these jobs between two times; what lies in them partly is cut off at their edges.

    jobs: how many steps each had done before. margin: seconds before `since` in which there is looked for what goes on
    then. now: where what still goes on in a live run is cut off; by default the present. clock: one that has seen the log.
    """
    reading = _Reading(jobs, since, until)
    ended, clock = False, clock or LogClock(log)
    for event in clock.since(since - margin):
        if (name := event.get("event")) in ENDS or name == "run_start":
            ended = name != "run_start"
        reading.take(event)
    live = not ended and until == math.inf and RunFolder(log.parent).written()
    present = clock.offset + (time.time() if now is None else now)
    reading.end_part(max(present, reading.last) if live else reading.last)
    reading.raw.live = live
    return reading.raw


class _Reading:
    """Takes events in their order. Attempts of evaluations are none of training's."""

    def __init__(self, jobs: Mapping[str, int], since: float, until: float) -> None:
        self.raw = Raw()
        self.last = -math.inf  # when training last did something
        self._jobs, self._since, self._until = jobs, since, until
        self._part = 0
        self._began: float | None = None  # this part
        self._open: dict[Key, _Open] = {}
        self._training: dict[str, float] = {}  # job -> since when its batch is full, while that is trained on
        self._steps = dict(jobs)  # job -> how many it has done
        self._trained: dict[str, list[tuple[float, float]]] = {}  # minibatches of the step that goes on

    def take(self, event: Mapping[str, Any]) -> None:
        name = event.get("event")
        if name == "run_start":
            self.end_part(self.last)
            return
        handler = getattr(self, f"_on_{name}", None)
        job = event.get("job")
        if handler is None or not isinstance(job, str) or job not in self._jobs:
            return
        if str(event.get("phase", "")).startswith("evaluation"):
            return
        try:
            at = float(event["time"])
            if not math.isfinite(at):
                return
            handler(at, event)
        except (KeyError, TypeError, ValueError):
            return  # a foreign or older line must not hide the others
        if self._began is None:
            self._began = at
        self.last = at

    def end_part(self, at: float) -> None:
        """Cut off what is not over: the process has ended, or the log is read up to here."""
        if self._began is None:
            return
        for key, attempt in self._open.items():
            self._add_attempt(key, attempt, at, ended=False)
        for job, minibatches in self._trained.items():
            for start, end in minibatches:
                self._add_training("training", start, end, job, self._steps.get(job, 0) + 1)
        for job, start in self._training.items():
            start = max([start, *(end for _, end in self._trained.get(job, []))])
            self._add_training("training", start, at, job, self._steps.get(job, 0) + 1, ended=False)
        begin, end = max(self._began, self._since), min(at, self._until)
        if end > begin:
            self.raw.parts.append((begin, end))
        for table in (self._open, self._training, self._trained):
            table.clear()
        self._began = None
        self._part += 1

    def _add(
        self, kind: str, start: float, end: float, job: str, name: str, group: int | None = None,
        step: int | None = None, version: int = 0, ended: bool = True,
    ) -> None:  # fmt: skip
        start, end = max(start, self._since), min(end, self._until)
        if start <= end:
            self.raw.spans.append(
                RawSpan(self._part, kind, start, end, job, name, group, step, version, ended)
            )

    # -- Attempts ----------------------------------------------------------------------------------

    def _on_rollout_start(self, at: float, event: Mapping[str, Any]) -> None:
        if at <= self._until:
            self._open[_key(event)] = _Open(at, int(event["policy_version"]))

    def _on_sample(self, at: float, event: Mapping[str, Any]) -> None:
        if attempt := self._open.get(_key(event)):
            self._end_turn(attempt)
            attempt.turn = (at - event["seconds"], at)

    def _on_tool(self, at: float, event: Mapping[str, Any]) -> None:
        """A turn's lines are written when its commands are over: their seconds lie after the sampling."""
        attempt = self._open.get(_key(event))
        if attempt is not None and attempt.turn is not None:
            seconds = event["seconds"]
            start, end = (moment - seconds for moment in attempt.turn)
            attempt.turn = (start, end)
            moved = [
                (kind, a - seconds, b - seconds) if a >= end else (kind, a, b) for kind, a, b in attempt.turns
            ]
            attempt.turns = [*moved, ("tools", at - seconds, at)]

    def _end_turn(self, attempt: _Open) -> None:
        if attempt.turn is not None:
            attempt.turns.append(("sampling", *attempt.turn))
            attempt.turn = None

    def _on_rollout_ready(self, at: float, event: Mapping[str, Any]) -> None:
        if attempt := self._open.pop(_key(event), None):
            self._add_attempt(_key(event), attempt, at)

    def _add_attempt(self, key: Key, attempt: _Open, end: float, ended: bool = True) -> None:
        job, group, number = key
        name = f"{_group_name(group)}-a{number}"
        if attempt.grading is not None:
            self._add("grading", attempt.grading, end, job, name, group, None, attempt.version, ended)
            return
        self._end_turn(attempt)
        self._add("rollout", attempt.start, end, job, name, group, None, attempt.version, ended)
        for kind, a, b in attempt.turns:
            self._add(kind, max(a, attempt.start), b, job, name, group, None, attempt.version)

    def _on_grading_start(self, at: float, event: Mapping[str, Any]) -> None:
        if at <= self._until:
            self._open[_key(event)] = _Open(at, int(event["policy_version"]), grading=at)

    def _on_episode(self, at: float, event: Mapping[str, Any]) -> None:
        """The verdict; or where there is none, the end of an attempt that infrastructure faults took."""
        if attempt := self._open.pop(_key(event), None):
            self._add_attempt(_key(event), attempt, at)

    def _on_group(self, at: float, event: Mapping[str, Any]) -> None:
        self.raw.fates[self._part, event["job"], event["group"]] = str(event["fate"])

    _on_group_failed = _on_group

    # -- The trainer -------------------------------------------------------------------------------

    def _on_reference(self, at: float, event: Mapping[str, Any]) -> None:
        group = int(event["group"])
        version = int(event["policy_version"])
        self._add(
            "reference", at - event["seconds"], at, event["job"], _group_name(group), group, None, version
        )

    def _on_training_start(self, at: float, event: Mapping[str, Any]) -> None:
        self._training[event["job"]] = at

    def _on_minibatch(self, at: float, event: Mapping[str, Any]) -> None:
        """Its training began when it was submitted, or when the one before was done."""
        done = self._trained.setdefault(event["job"], [])
        start = at - event["seconds"]
        done.append((max([start, *(end for _, end in done[-1:])]), at))

    def _on_step_done(self, at: float, event: Mapping[str, Any]) -> None:
        job, step = event["job"], int(event["step"]) + 1
        self._training.pop(job, None)
        published = at - event["publish_seconds"]
        start = published - event.get("trainer_seconds", event["train_seconds"])
        minibatches = self._trained.pop(job, [])
        for begin, end in minibatches or [(start, published)]:
            self._add_training("training", begin, end, job, step)
        self._add_training("publishing", published, at, job, step)
        self._steps[job] = step

    def _add_training(
        self, kind: str, start: float, end: float, job: str, step: int, ended: bool = True
    ) -> None:
        """Step n, counted from 1, makes policy n."""
        self._add(kind, start, end, job, f"step {step}", None, step, step, ended)

    def _on_resumed(self, at: float, event: Mapping[str, Any]) -> None:
        """From here on this part of the run trains, after the step of a checkpoint."""
        self._steps[event["job"]] = int(event["step"]) + 1


def _key(event: Mapping[str, Any]) -> Key:
    return event["job"], int(event["group"]), int(event["attempt"])


def _group_name(group: int) -> str:
    return f"g{group:06d}"
