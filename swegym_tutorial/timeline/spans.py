"""What went on at the same time in a run: attempts, gradings, reference log-probabilities, training.

Read from events.jsonl alone, live or afterwards; of a long log only the window that is asked for is kept. Hours in
which no process ran, between the parts of a resumed run, are cut out, and so is what was done in steps that the run
went back from. Knows nothing of figures.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from .clock import LogClock
from .history import Back, Done, read_history, window
from .log import Raw, read_log


class Kind(StrEnum):
    """What a span is."""

    ROLLOUT = (
        "rollout"  # an attempt, from its start until it may be graded: what is no sampling is its sandbox's
    )
    SAMPLING = "sampling"  # a part of it: the policy writes a turn
    TOOLS = "tools"  # a part of it: a command runs in the sandbox
    GRADING = "grading"  # of an attempt, in a fresh sandbox
    REFERENCE = "reference"  # log-probabilities under the base model, of one group
    TRAINING = "training"  # forward_backward and optim_step: of one minibatch, or in older logs of a batch
    PUBLISHING = "publishing"  # saving the new weights, and handing them to the sampler


BUSY = (Kind.TRAINING, Kind.PUBLISHING)  # what keeps the trainer


@dataclass(frozen=True, slots=True)
class Span:
    """Something that went on. Times in seconds since the timeline's start, without what was cut out."""

    kind: Kind
    start: float
    end: float
    job: str
    name: str  # g000003-a2, g000003 or step 4
    group: int | None  # its number, of what belongs to one
    step: int | None  # counted from 1: of training and publishing
    version: int  # of the policy that an attempt samples from, or that training makes
    fate: str = ""  # kept, uniform, stale or failed: what became of the attempt's group; empty: not decided
    ended: bool = True  # whether it came to its end, inside or outside of the window

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Step:
    """One batch of one job: from the end of the one before to its publication. Times as a span's."""

    job: str
    number: int  # counted from 1
    version: int  # of the policy that it published
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans and steps in one window of a run. The methods take kinds, and treat all jobs together."""

    jobs: tuple[str, ...]
    began: float  # seconds since 1970
    seconds: float  # how long the window is, without what was cut out
    spans: tuple[Span, ...]  # by start
    steps: tuple[Step, ...]  # that were published in it, by end
    cuts: tuple[tuple[float, float], ...]  # where time was cut out, and how many seconds
    live: bool  # whether it reaches to the present of a run that goes on
    steps_done: int  # of the whole run: the most that a job has done
    clients: int  # of the whole run
    backs: tuple[
        tuple[float, int], ...
    ] = ()  # those of the cuts at which it goes back, and to which step; 0: the start

    def of(self, *kinds: str) -> list[Span]:
        return [span for span in self.spans if span.kind in kinds]

    def busy(self, *kinds: str) -> float:
        """Return for how many seconds at least one such span went on."""
        return total(union((s.start, s.end) for s in self.of(*kinds)))

    def overlap(self, one: str, other: str) -> float:
        """Return for how many seconds spans of both kinds went on."""
        return self.busy(one) + self.busy(other) - self.busy(one, other)

    def at_once(self, kind: str) -> tuple[float, int]:
        """Return how many such spans went on at once: on average over the window, and at most."""
        spans = self.of(kind)
        changes = sorted([(s.start, 1) for s in spans] + [(s.end, -1) for s in spans])
        most = open_now = 0
        for _, change in changes:
            open_now += change
            most = max(most, open_now)
        return (sum(s.seconds for s in spans) / self.seconds if self.seconds else 0.0), most

    def idle(self) -> list[tuple[float, float]]:
        """Return from when to when no job was training or publishing."""
        busy = union((s.start, s.end) for s in self.of(*BUSY))
        edges = [0.0, *(time for one in busy for time in one), self.seconds]
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return [(start, end) for start, end in gaps if end > start]

    @property
    def idle_share(self) -> float:
        """The share of the window in which no job was training or publishing, from 0 to 1."""
        return total(self.idle()) / self.seconds if self.seconds else 0.0


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join intervals that overlap or touch; returns them by start."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def total(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def read_spans(
    folder: str | os.PathLike[str],
    job: str | None = None,
    first: int | None = None,
    last: int | None = None,
    now: float | None = None,
) -> Timeline:
    """Read what went on in a run, from the start of step `first` to the end of step `last`, counted from 1.

    folder: a run's, live or not. job: train-job0, say; None: all of them. first, last: None is the whole run, of
    one with more than 10 steps the last 10 and the batch being filled. now: until when what goes on in a live run
    is shown, in seconds since 1970; None: the present. Raises FileNotFoundError where there is
    no run, and ValueError where it has no such job or step.
    """
    log = Path(folder) / "events.jsonl"
    if not log.is_file():
        raise FileNotFoundError(f"{folder} is no run folder: it has no events.jsonl")
    lines = LogClock(log)
    history = read_history(lines)
    jobs = history.jobs
    clients = len(jobs)
    if job is not None:
        if job not in jobs:
            raise ValueError(f"{folder} has no job {job!r}; it has {', '.join(jobs) or 'none yet'}")
        jobs = (job,)
    done = [step for each in jobs for step in history.done.get(each, [])]
    backs = [back for back in history.backs if back.job in jobs]
    since, until = window(done, backs, first, last)
    before = {each: [step for step in done if step.job == each and step.end <= since] for each in jobs}
    # No attempt is trained on that is older than two batches; one that goes on for longer is not looked for.
    margin = 2 * max((step.end - step.start for steps in before.values() for step in steps), default=0.0)
    had_done = {each: steps[-1].number if steps else 0 for each, steps in before.items()}
    raw = read_log(log, had_done, since, until, margin, now, lines)
    return _assemble(raw, jobs, done, backs, clients)


def _assemble(
    raw: Raw, jobs: tuple[str, ...], done: Sequence[Done], backs: Sequence[Back], clients: int
) -> Timeline:
    """Put what was read on one clock, on which the parts of the run follow each other without a gap."""
    dropped = {job: union((back.start, back.end) for back in backs if back.job == job) for job in jobs}
    for_all = _common(list(dropped.values()))
    clock = _Clock(_without(raw.parts, for_all))
    spans = []
    for each in raw.spans:
        if any(a <= each.start and a < each.end <= b for a, b in dropped[each.job]):
            continue
        start, end = clock.at(each.start), clock.at(each.end)
        if end > start or each.start == each.end:
            fate = raw.fates.get((each.part, each.job, each.group), "")
            spans.append(
                Span(
                    Kind(each.kind),
                    start,
                    end,
                    each.job,
                    each.name,
                    each.group,
                    each.step,
                    each.version,
                    fate,
                    each.ended,
                )
            )
    steps = [
        Step(step.job, step.number, step.version, clock.at(step.start), clock.at(step.end))
        for step in done
        if clock.began < step.end <= clock.ended
    ]
    return Timeline(
        jobs=jobs,
        began=clock.began,
        seconds=clock.seconds,
        spans=tuple(sorted(spans, key=lambda span: (span.start, span.end))),
        steps=tuple(sorted(steps, key=lambda step: step.end)),
        cuts=clock.cuts(),
        live=raw.live,
        steps_done=max((step.number for step in done), default=0),
        clients=clients,
        backs=tuple(_told(clock, for_all, backs)),
    )


def _common(tables: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return the intervals that all of these tables have."""
    common = list(tables[0]) if tables else []
    for table in tables[1:]:
        pairs = ((max(a, c), min(b, d)) for a, b in common for c, d in table)
        common = [(start, end) for start, end in pairs if end > start]
    return common


def _without(
    parts: Iterable[tuple[float, float]], dropped: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return what is left of some intervals without others; both are in order."""
    left = list(parts)
    for a, b in dropped:
        cut = (edge for start, end in left for edge in ((start, min(end, a)), (max(start, b), end)))
        left = [(start, end) for start, end in cut if end > start]
    return left


def _told(
    clock: _Clock, dropped: Sequence[tuple[float, float]], backs: Sequence[Back]
) -> Iterable[tuple[float, int]]:
    """Yield at which cuts the run goes back, and to which step."""
    cuts = {at for at, _ in clock.cuts()}
    for _, end in dropped:
        if (at := clock.at(end)) in cuts:
            yield at, [back.step for back in backs if back.start < end <= back.end][-1]


class _Clock:
    """Counts the seconds of a run's parts, and none between them."""

    def __init__(self, parts: Sequence[tuple[float, float]]) -> None:
        self._parts = list(parts) or [(0.0, 0.0)]
        self.began, self.ended = self._parts[0][0], self._parts[-1][1]
        self.seconds = total(self._parts)

    def at(self, time: float) -> float:
        """Return what it shows at a time in seconds since 1970; between two parts it stands still."""
        return sum(max(0.0, min(time, end) - start) for start, end in self._parts)

    def cuts(self) -> tuple[tuple[float, float], ...]:
        return tuple((self.at(one[1]), other[0] - one[1]) for one, other in pairwise(self._parts))
