"""What a run's events add up to: the steps of each job, the batch being filled, evaluations, the phase.

Fed with events as they come, so that the terminal's table, the figures and the dashboard show the same numbers
from the same file, live or afterwards. Knows nothing of how they are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

FATES = ("kept", "uniform", "stale", "failed")


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
    fill_seconds: float
    train_seconds: float
    publish_seconds: float
    work_seconds: Mapping[str, float]  # sampling, tools, grading: summed over attempts that ran side by side
    checkpoint: str
    time: float  # seconds since 1970, when it was done

    @property
    def fill_parts(self) -> dict[str, float]:
        """The filling time shared out by the work that was done in it: sampling, tools, grading."""
        total = sum(self.work_seconds.values()) or 1.0
        return {kind: self.fill_seconds * seconds / total for kind, seconds in self.work_seconds.items()}

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> StepResult:
        return cls(**{name: event[name] for name in cls.__dataclass_fields__})


@dataclass
class Filling:
    """The batch that a job is filling."""

    groups: Counter[str] = field(default_factory=Counter)
    attempts: int = 0  # graded, in groups that are complete or not
    resolved: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)  # of the verdicts


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


class RunSummary:
    """The state of a run after the events it was fed. Not thread-safe: one reader, one summary."""

    def __init__(self) -> None:
        self.phase = ""
        self.status = "starting"  # starting | running | paused | done | stopped | failed
        self.reason = ""  # why it failed
        self.planned_steps = 0
        self.clients = 0
        self.started: float | None = None
        self.odd_events = 0
        self.out_of_time = False
        self.last_event: float | None = None
        self.steps: dict[str, list[StepResult]] = {}
        self.filling: dict[str, Filling] = {}
        self.evaluations: list[EvaluationResult] = []
        self.evaluating: tuple[int, int, int] | None = None  # attempts graded, resolved, planned
        self.faults: Counter[str] = Counter()  # reason -> count
        self.note = ""  # the last word on long work in this phase, such as an image that is pulled
        self.notes: list[str] = []  # all such words
        self.left_out: dict[str, str] = {}  # task -> why: it cannot be opened, or is known not to be valid
        self.sampled_tokens = 0
        self.open_attempts = 0

    def update(self, events: Iterable[Mapping[str, Any]]) -> bool:
        """Take in events; returns whether there were any."""
        any_events = False
        for event in events:
            any_events = True
            self.last_event = event.get("time", self.last_event)
            handler = getattr(self, f"_on_{event.get('event')}", None)
            if handler is not None:
                try:
                    handler(event)
                except (KeyError, TypeError, ValueError):
                    self.odd_events += 1  # a foreign or older line must not hide the others
        return any_events

    def _on_run_start(self, event: Mapping[str, Any]) -> None:
        self.status, self.reason, self.out_of_time = "running", "", False
        self.planned_steps, self.clients = event["steps"], event["clients"]
        self.started = self.started or event["time"]
        self.filling.clear()
        self.left_out.clear()
        self.open_attempts = 0

    def _on_phase(self, event: Mapping[str, Any]) -> None:
        self.phase, self.note = event["name"], ""

    def _on_note(self, event: Mapping[str, Any]) -> None:
        self.note = str(event["text"])
        self.notes.append(self.note)

    def _on_tasks_left_out(self, event: Mapping[str, Any]) -> None:
        self.left_out |= {str(task): str(why) for task, why in event["tasks"].items()}

    def _on_rollout_start(self, event: Mapping[str, Any]) -> None:
        self.open_attempts += 1

    def _on_sample(self, event: Mapping[str, Any]) -> None:
        self.sampled_tokens += event["tokens"]

    def _on_episode(self, event: Mapping[str, Any]) -> None:
        self.open_attempts = max(0, self.open_attempts - 1)
        reward = event.get("reward")
        if reward is None:
            return
        if str(event["phase"]).startswith("evaluation"):
            done, resolved, planned = self.evaluating or (0, 0, 0)
            self.evaluating = (done + 1, resolved + int(reward), planned)
        else:
            filling = self.filling.setdefault(event["job"], Filling())
            filling.attempts += 1
            filling.resolved += int(reward)
            filling.outcomes[str(event.get("outcome"))] += 1

    def _on_attempt_fault(self, event: Mapping[str, Any]) -> None:
        self.faults[str(event["reason"])] += 1

    def _on_group(self, event: Mapping[str, Any]) -> None:
        self.filling.setdefault(event["job"], Filling()).groups[event["fate"]] += 1

    _on_group_failed = _on_group

    def _on_step_done(self, event: Mapping[str, Any]) -> None:
        step = StepResult.of(event)
        steps = self.steps.setdefault(step.job, [])
        # A resumed run may do a step again whose checkpoint was not yet written.
        steps[:] = [*(s for s in steps if s.step < step.step), step]
        self.filling[step.job] = Filling()

    def _on_evaluation_start(self, event: Mapping[str, Any]) -> None:
        self.evaluating = (0, 0, event["attempts"])

    def _on_evaluation(self, event: Mapping[str, Any]) -> None:
        self.evaluating = None
        names = EvaluationResult.__dataclass_fields__
        self.evaluations.append(EvaluationResult(**{name: event[name] for name in names}))

    def _on_paused(self, event: Mapping[str, Any]) -> None:
        self.status = "paused"

    def _on_unpaused(self, event: Mapping[str, Any]) -> None:
        self.status = "running"

    def _on_out_of_time(self, event: Mapping[str, Any]) -> None:
        self.out_of_time = True

    def _on_run_done(self, event: Mapping[str, Any]) -> None:
        self.status = "done"

    def _on_run_stopped(self, event: Mapping[str, Any]) -> None:
        self.status = "stopped"

    def _on_run_failed(self, event: Mapping[str, Any]) -> None:
        self.status, self.reason = "failed", event["reason"]
