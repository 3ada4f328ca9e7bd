"""What a run folder tells: its steps in effect, which groups each was made of, and what its parts left unfinished.

Pure functions over a folder. The log is read once, from its start to its end, as a sequence of parts: one a process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swegym_tutorial.config import TrainingConfig

Event = dict[str, Any]
SEEN = ("group", "group_failed")  # the events that tell a group's fate
LOST = "infrastructure"  # the outcome of an attempt that was given up
ENDS = ("run_done", "run_stopped", "run_failed")


@dataclass
class Step:
    """One step in effect, with the groups that its batch saw."""

    done: Event  # its step_done
    groups: list[Event]

    @property
    def number(self) -> int:
        return int(self.done["step"])


@dataclass
class History:
    """One job's. `steps` are those in effect, `dropped` the groups of batches that never became a step."""

    job: str
    steps: list[Step] = field(default_factory=list)
    dropped: list[tuple[str, list[Event]]] = field(default_factory=list)  # (what ended the batch, its groups)
    restarted: list[int] = field(default_factory=list)  # groups that resumes started anew
    pending: list[Event] = field(default_factory=list)  # the groups of the batch that is being filled

    @property
    def last(self) -> int:
        """The last step in effect; -1 where there is none."""
        return self.steps[-1].number if self.steps else -1

    def drop(self, why: str, groups: list[Event]) -> None:
        if groups:
            self.dropped.append((why, groups))


def read_log(folder: Path) -> tuple[list[Event], list[str]]:
    """Return the events, and the lines that are none."""
    events: list[Event] = []
    bad: list[str] = []
    for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line, parse_constant=_refuse)
        except ValueError:
            event = None
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            events.append(event)
        else:
            bad.append(line)
    return events, bad


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def read_config(folder: Path) -> TrainingConfig:
    return TrainingConfig(**json.loads((folder / "config.json").read_text(encoding="utf-8")))


def read_checkpoint(folder: Path, job: str) -> dict[str, Any]:
    return json.loads((folder / f"{job}-checkpoint.json").read_text(encoding="utf-8"))


def listed(saved: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the checkpoints of a file, the newest first."""
    return [saved, *saved.get("earlier", [])]


def jobs(events: list[Event]) -> list[str]:
    """Return the names of the jobs that started an attempt or made a step."""
    return sorted({e["job"] for e in events if str(e.get("job", "")).startswith("train-job")})


def history(events: list[Event], job: str) -> History:
    """Follow one job through the log.

    A killed part leaves its batch to the resume: where the checkpoint was written and its line was not, the line
    comes after the next `run_start`, and the batch's groups are the step's; else the batch is dropped.
    """
    told = History(job)
    left: list[Event] = []  # the batch of the part before, until it is clear whether it became a step
    for event in events:
        name = event["event"]
        if name == "run_start":
            left, told.pending = told.pending or left, []
        elif name in ENDS or (name == "job_failed" and event.get("job") == job):
            told.drop(name, told.pending)
            told.pending = []
        if event.get("job") != job:
            continue
        if name in SEEN:
            told.drop("killed", left)
            left = []
            told.pending.append(event)
        elif name == "step_done":
            told.steps.append(Step(event, told.pending or left))
            told.pending, left = [], []
        elif name == "rolled_back":
            told.steps = [step for step in told.steps if step.number <= event["step"]]
        elif name == "resumed":
            told.restarted += event.get("restarted", [])
            if event["step"] <= told.last:
                told.drop("killed", left)
                left = []
    told.drop("killed", left)
    return told


def parts(events: list[Event]) -> list[list[Event]]:
    """Return the events of each process that wrote to the log."""
    told: list[list[Event]] = []
    for event in events:
        if event["event"] == "run_start" or not told:
            told.append([])
        told[-1].append(event)
    return told


def attempt_of(event: Event) -> tuple[str, str, int, int]:
    """Return which attempt an event is about: phase, job, group and attempt."""
    return event["phase"], event["job"], event["group"], event["attempt"]


def training_attempts(events: list[Event], name: str) -> Iterator[Event]:
    """Yield the events of a name that are about attempts of training."""
    yield from (e for e in events if e["event"] == name and str(e.get("phase", "")).startswith("run-"))
