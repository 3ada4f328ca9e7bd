"""What a run's summary is made of: steps, evaluations, and how clients and their batches stand.

Made from events whose values are checked, as a log may hold foreign or damaged lines. Knows nothing of what is done
with them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .task_text import printable

FATES = ("kept", "uniform", "stale", "failed")
MOST = 2**53  # beyond it JSON's readers differ, and arithmetic with floats may overflow


def number(value: Any) -> float:
    """Return a value that is a number of at most MOST, below 0 too. Raises TypeError of another, such as NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -MOST <= value <= MOST:
        raise TypeError(f"{value!r:.100} is no number")
    return value


def count(value: Any) -> int:
    """Return a value that counts something. Raises TypeError of another."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        raise TypeError(f"{value!r:.100} counts nothing")
    return value


def share(value: Any) -> float:
    """Return a number between 0 and 1, as rewards are. Raises TypeError of another."""
    if not 0 <= number(value) <= 1:
        raise TypeError(f"{value!r} is not between 0 and 1")
    return value


def text(value: Any) -> str:
    """Return a value that is text, without what would steer a terminal. Raises TypeError of another."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.100} is no text")
    return value if value.isprintable() else printable(value)


def words(value: Any) -> str:
    """Return any value as text for people."""
    return text(str(value))


def _habits(value: Any, attempts: int) -> dict[str, tuple[int, int]]:
    """Return habit -> (how many had it, in how many of the attempts it came up). Raises TypeError and ValueError."""
    habits = {text(name): (count(had), count(of)) for name, (had, of) in dict(value).items()}
    if odd := [name for name, (had, of) in habits.items() if not had <= of <= attempts or of == 0]:
        raise TypeError(f"{habits[odd[0]]!r} is no share of {attempts} attempts")
    return habits


@dataclass(frozen=True)
class StepResult:
    """One batch: one publication of weights. Times in seconds."""

    job: str
    step: int
    policy_version: int
    reward_mean: float  # over all graded attempts that came in while the batch filled
    reward_mean_kept: float  # over the groups that were trained on
    attempts: int
    lost: int  # attempts that infrastructure faults took
    groups: Mapping[str, int]  # fate -> count
    batch_seconds: float  # all of it: fill + train + publish
    fill_seconds: float  # until the last group was in
    train_seconds: float  # from then on: a part of the training may lie in the filling
    publish_seconds: float
    work_seconds: Mapping[str, float]  # sampling, tools, grading: summed over attempts that ran side by side
    checkpoint: str
    time: float  # seconds since 1970, when it was done
    tokens: int = (
        0  # sampled by the attempts that were graded while the batch filled; older logs don't tell it
    )
    # habit -> how many of the step's attempts had it, and in how many it came up; older logs don't tell it
    habits: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def fill_parts(self) -> dict[str, float]:
        """The filling time shared out by the work that was done in it: sampling, tools, grading."""
        total = sum(self.work_seconds.values()) or 1.0
        return {kind: self.fill_seconds * seconds / total for kind, seconds in self.work_seconds.items()}

    @classmethod
    def of(cls, event: Mapping[str, Any], tokens: int = 0) -> StepResult:
        """Raises KeyError, TypeError and ValueError of an event that is none of ours."""
        return cls(
            job=text(event["job"]),
            step=count(event["step"]),
            policy_version=count(event["policy_version"]),
            reward_mean=share(event["reward_mean"]),
            reward_mean_kept=share(event["reward_mean_kept"]),
            attempts=(attempts := count(event["attempts"])),
            lost=count(event["lost"]),
            groups={fate: count(value) for fate, value in dict(event["groups"]).items()},
            batch_seconds=number(event["batch_seconds"]),
            fill_seconds=number(event["fill_seconds"]),
            train_seconds=number(event["train_seconds"]),
            publish_seconds=number(event["publish_seconds"]),
            work_seconds={kind: number(value) for kind, value in dict(event["work_seconds"]).items()},
            checkpoint=text(event["checkpoint"]),
            time=number(event["time"]),
            tokens=tokens,
            habits=_habits(event.get("habits", {}), attempts),
        )


@dataclass
class Filling:
    """The batch that a job is filling."""

    groups: Counter[str] = field(default_factory=Counter)
    attempts: int = 0  # graded, in groups that are complete or not
    resolved: int = 0
    tokens: int = 0  # sampled by those
    outcomes: Counter[str] = field(default_factory=Counter)  # of the verdicts
    training: bool = False  # it is full, and is trained on


@dataclass(frozen=True)
class EvaluationResult:
    """One evaluation; `rate` is resolved / attempts."""

    label: str
    job: str
    split: str
    attempts: int
    resolved: int
    lost: int

    @property
    def rate(self) -> float:
        return self.resolved / self.attempts if self.attempts else float("nan")

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> EvaluationResult:
        """Raises KeyError and TypeError of an event that is none of ours."""
        label, job, split = (text(event[name]) for name in ("label", "job", "split"))
        attempts, resolved, lost = (count(event[name]) for name in ("attempts", "resolved", "lost"))
        return cls(label, job, split, attempts, resolved, lost)


@dataclass(frozen=True)
class Waiting:
    """What a run waits for at the training server, longer than usual."""

    what: str
    reason: str
    since: float  # seconds since 1970
    job: str = ""  # the client that waits, where it is one


@dataclass(frozen=True)
class JobState:
    """How a client stands."""

    name: str = "running"  # running | done | failed | out of time
    reason: str = ""  # why it failed


def job_order(name: str) -> list[tuple[int, str]]:
    """Return a key by which train-job10 comes after train-job2."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
