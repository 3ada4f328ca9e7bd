"""What a run's events add up to: the steps of each job, the batch being filled, evaluations, the phase.

Fed with events as they come, so that the terminal's table, the figures and the dashboard show the same numbers
from the same file, live or afterwards. Knows nothing of how they are shown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .counts import OpenSandboxes, TokenRate

# Most of a log's lines, of which a summary takes nothing but their time and their number: a reader may skip them.
ADD_NOTHING = ("rollout_start", "sample", "tool", "rollout_ready", "grading_start")
NOTES = 200  # words for people that are kept
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
    fill_seconds: float  # until the last group was in
    train_seconds: float  # from then on: a part of the training may lie in the filling
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


def _at_its_place(table: dict[str, Any], job: str, value: Any) -> Any:
    """Return a job's value in a table, set where it has none, and keep the jobs in their order."""
    if job not in table:
        table[job] = value
        entries = sorted(table.items(), key=lambda entry: job_order(entry[0]))
        table.clear()
        table.update(entries)
    return table[job]


class RunSummary:
    """The state of a run after the events it was fed. Not thread-safe: one reader, one summary."""

    def __init__(self, skipped: Callable[[], Mapping[tuple[str, str], int]] = dict) -> None:
        """skipped: how many events a reader has passed over unread, by name and job."""
        self.phase = ""
        self.status = "starting"  # starting | running | paused | done | stopped | failed
        self.reason = ""  # why it failed
        self.planned_steps = 0
        self.clients = 0
        self.batch_groups = 0  # that fill a batch; 0: not known
        self.started: float | None = None
        self.odd_events = 0
        self.out_of_time = False
        self.last_event: float | None = None
        self.steps: dict[str, list[StepResult]] = {}
        self.filling: dict[str, Filling] = {}
        self.evaluations: list[EvaluationResult] = []
        self.evaluating: tuple[int, int, int] | None = None  # attempts graded, resolved, planned
        self.gone = False  # whether its process is gone; set by who has looked (RunFolder.written)
        self.jobs: dict[str, JobState] = {}
        self.waiting: Waiting | None = None
        self.recovered = 0  # times that a job went on from its checkpoint, as the server had lost its state
        self.faults: Counter[str] = Counter()  # reason -> count
        self.graded = self.lost = (
            0  # attempts of training and evaluations; lost: infrastructure faults took them
        )
        self.unfinished = 0  # attempts that earlier parts of the run began and didn't end
        self.deleted = self.deleted_bytes = 0  # recorded attempts, beyond the limit of the disk they may take
        self.note = ""  # the last word on long work in this phase, such as an image that is pulled
        self.notes: list[str] = []  # the last such words, and what else people are told once
        self.noted = 0  # how many there were
        self.left_out: dict[str, str] = {}  # task -> why: it cannot be opened, or is known not to be valid
        self.tokens = 0  # sampled by graded attempts of training; older logs don't tell it
        self.rate = TokenRate()  # of those and of evaluations
        self.sandboxes = OpenSandboxes(skipped)

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
        self.gone, self.waiting = False, None
        self.planned_steps, self.clients = event["steps"], event["clients"]
        self.batch_groups = event.get("groups_per_batch") or 0
        self.jobs = {f"train-job{n}": JobState() for n in range(self.clients)}
        self.started = self.started or event["time"]
        self.filling.clear()
        self.sandboxes.forget()
        self.left_out.clear()
        self.evaluating = None

    def _on_phase(self, event: Mapping[str, Any]) -> None:
        self.phase, self.note = event["name"], ""
        self.rate.begin(self.last_event or 0.0)

    def _on_note(self, event: Mapping[str, Any]) -> None:
        self.note = str(event["text"])
        self._tell(self.note)

    def _tell(self, text: str) -> None:
        """Keep a word for people; `noted` counts them all, of which the last ones are kept."""
        self.notes.append(text)
        self.noted += 1
        del self.notes[:-NOTES]

    def _on_tasks_left_out(self, event: Mapping[str, Any]) -> None:
        self.left_out |= {str(task): str(why) for task, why in event["tasks"].items()}

    def _opened_or_closed(self, event: Mapping[str, Any]) -> None:
        self.sandboxes.see(event["event"], event["job"])

    _on_rollout_start = _on_rollout_ready = _on_grading_start = _opened_or_closed

    def _on_episode(self, event: Mapping[str, Any]) -> None:
        self.sandboxes.see("episode", event["job"])
        reward = event.get("reward")
        if reward is None:
            self.lost += 1
            return
        self.graded += 1
        tokens = event.get("sampled_tokens", 0)
        self.rate.add(self.last_event or 0.0, tokens)
        if str(event["phase"]).startswith("evaluation"):
            done, resolved, planned = self.evaluating or (0, 0, 0)
            self.evaluating = (done + 1, resolved + _is_resolved(event), planned)
        else:
            self.tokens += tokens
            filling = self._filling(event["job"])
            filling.attempts += 1
            filling.resolved += _is_resolved(event)
            filling.outcomes[str(event.get("outcome"))] += 1

    def _on_attempt_fault(self, event: Mapping[str, Any]) -> None:
        self.faults[str(event["reason"])] += 1

    def _on_group(self, event: Mapping[str, Any]) -> None:
        self._filling(event["job"]).groups[event["fate"]] += 1

    _on_group_failed = _on_group

    def _filling(self, job: str) -> Filling:
        return self.filling.get(job) or _at_its_place(self.filling, job, Filling())

    def _on_training_start(self, event: Mapping[str, Any]) -> None:
        self._filling(event["job"]).training = True

    def _on_step_done(self, event: Mapping[str, Any]) -> None:
        step = StepResult.of(event)
        self._drop_steps(
            step.job, step.step - 1
        )  # a step may be done again whose checkpoint was not yet written
        _at_its_place(self.steps, step.job, []).append(step)
        self._filling(step.job)
        self.filling[step.job] = Filling()
        self.evaluations = [e for e in self.evaluations if (e.label, e.job) != ("after", step.job)]

    def _drop_steps(self, job: str, after: int) -> None:
        """Forget a job's steps after this one: they are no part of the run's history."""
        kept = [step for step in self.steps.get(job, []) if step.step <= after]
        if kept:
            self.steps[job] = kept
        else:
            self.steps.pop(job, None)

    def _on_resumed(self, event: Mapping[str, Any]) -> None:
        self._drop_steps(event["job"], event["step"])
        self.filling.pop(event["job"], None)

    def _on_rolled_back(self, event: Mapping[str, Any]) -> None:
        job, step = event["job"], event["step"]
        self._drop_steps(job, step)
        self.filling.pop(job, None)
        self.evaluations = [e for e in self.evaluations if (e.label, e.job) != ("after", job)]
        self._tell(f"{job} goes back to {_checkpoint_of(step)}")

    def _on_recovered(self, event: Mapping[str, Any]) -> None:
        self.recovered += 1
        self._tell(
            f"{event['job']} goes on from {_checkpoint_of(event['step'])} on a new adapter, "
            f"after {event['seconds']:.0f} s: {event['reason']}"
        )

    def _on_attempt_unfinished(self, event: Mapping[str, Any]) -> None:
        self.unfinished += 1

    def _on_settings_changed(self, event: Mapping[str, Any]) -> None:
        changes = (f"{name} was {old}, is {new}" for name, (old, new) in event["changed"].items())
        self._tell(f"settings changed: {'; '.join(changes)}")

    def _on_reaped(self, event: Mapping[str, Any]) -> None:
        count = event["count"]
        what = f"{count} sandbox{'' if count == 1 else 'es'} of the kind {event['kind']}"
        self._tell(f"ended {what} that earlier parts of this run had left")

    def _on_episodes_deleted(self, event: Mapping[str, Any]) -> None:
        self.deleted += event["count"]
        self.deleted_bytes += event["bytes"]

    def _on_waiting(self, event: Mapping[str, Any]) -> None:
        since = event["time"] - event["seconds"]
        job = str(event.get("job") or "")
        self.waiting = Waiting(str(event["what"]), str(event["reason"]), since, job)

    def _on_waiting_over(self, event: Mapping[str, Any]) -> None:
        self.waiting = None

    def _on_job_done(self, event: Mapping[str, Any]) -> None:
        if self.jobs.get(event["job"]) != JobState("out of time"):  # which ends a client well, too
            self._set_job(event["job"], JobState("done"))

    def _on_job_failed(self, event: Mapping[str, Any]) -> None:
        self._set_job(event["job"], JobState("failed", str(event["reason"])))

    def _set_job(self, job: str, state: JobState) -> None:
        self.sandboxes.forget(job)
        _at_its_place(self.jobs, job, state)
        self.jobs[job] = state

    def _on_evaluation_start(self, event: Mapping[str, Any]) -> None:
        self.evaluating = (0, 0, event["attempts"])
        self.sandboxes.forget(event["job"])

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
        self._set_job(event["job"], JobState("out of time"))

    def _on_run_done(self, event: Mapping[str, Any]) -> None:
        self.status, self.waiting = "done", None

    def _on_run_stopped(self, event: Mapping[str, Any]) -> None:
        self.status, self.waiting = "stopped", None

    def _on_run_failed(self, event: Mapping[str, Any]) -> None:
        self.status, self.waiting, self.reason = "failed", None, event["reason"]


def _is_resolved(episode: Mapping[str, Any]) -> bool:
    """Whether an attempt was resolved, whatever a run's own reward made of it."""
    return episode.get("outcome", "resolved" if episode["reward"] == 1 else None) == "resolved"


def _checkpoint_of(step: int) -> str:
    """Name a checkpoint for people, who count steps from 1."""
    return "the start" if step < 0 else f"the checkpoint of step {step + 1}"
