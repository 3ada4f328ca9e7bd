"""What a run's events add up to: the steps of each job, the batch being filled, evaluations, the phase.

Fed with events as they come, so that the terminal's table, the figures and the dashboard show the same numbers
from the same file, live or afterwards. Knows nothing of how they are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .counts import OpenSandboxes, TokenRate
from .records import (
    FATES,
    EvaluationResult,
    Filling,
    JobState,
    StepResult,
    Waiting,
    count,
    job_order,
    number,
    text,
    words,
)

__all__ = [
    "ADD_NOTHING",
    "FATES",
    "EvaluationResult",
    "Filling",
    "JobState",
    "RunSummary",
    "StepResult",
    "Waiting",
    "job_order",
]

# Most of a log's lines, of which a summary takes nothing but their time and their number: a reader may skip them.
ADD_NOTHING = ("rollout_start", "sample", "tool", "rollout_ready", "grading_start")
NOTES = 200  # words for people that are kept
SET_BACK = 1.0  # seconds: what goes back by less was written by threads side by side


def _at_its_place(table: dict[str, Any], job: str, value: Any) -> Any:
    """Return a job's value in a table, set where it has none, and keep the jobs in their order."""
    if (job := text(job)) not in table:
        table[job] = value
        entries = sorted(table.items(), key=lambda entry: job_order(entry[0]))
        table.clear()
        table.update(entries)
    return table[job]


class RunSummary:
    """The state of a run after the events it was fed. Not thread-safe: one reader, one summary."""

    def __init__(self, skipped: Callable[[], Mapping[tuple[str, str, str], int]] = dict) -> None:
        """skipped: how many events a reader has passed over unread, by name, phase and job."""
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
        self.set_back = 0.0  # seconds by which the clock of the log's times was set back
        self._under_way = False  # whether a part of the run has begun and not ended
        self._paused_early = False  # before this part of the run began
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
        self.unmeasured: list[str] = []  # splits that lost all their tasks by that
        self.rate = TokenRate()  # of graded attempts, on the clock that `set_back` is added to
        self.sandboxes = OpenSandboxes(skipped)

    def update(self, events: Iterable[Mapping[str, Any]]) -> bool:
        """Take in events; returns whether there were any."""
        any_events = False
        for event in events:
            any_events = True
            try:
                if "time" in event:
                    self._see_time(number(event["time"]))
                handler = getattr(self, f"_on_{event.get('event')}", None)
                if handler is not None:
                    handler(event)
            except (AttributeError, KeyError, TypeError, ValueError):
                self.odd_events += 1  # a foreign or older line must not hide the others
        return any_events

    def _see_time(self, time: float) -> None:
        if self.last_event is not None and time < self.last_event - SET_BACK:
            self.set_back += self.last_event - time
        self.last_event = time

    @property
    def seconds(self) -> float:
        """How long the run has gone on, pauses between its parts included."""
        if self.started is None or self.last_event is None:
            return 0.0
        return max(0.0, self.last_event + self.set_back - self.started)

    @property
    def tokens(self) -> int:
        """What was sampled for the steps of training; older logs don't tell it."""
        return sum(step.tokens for steps in self.steps.values() for step in steps)

    def _on_run_start(self, event: Mapping[str, Any]) -> None:
        planned, clients = count(event["steps"]), count(event["clients"])
        self.batch_groups = count(event.get("groups_per_batch") or 0)
        self.planned_steps, self.clients = planned, clients
        self.status = "paused" if self.status == "paused" and self._paused_early else "running"
        self.reason, self.out_of_time, self._under_way = "", False, True
        self.gone, self.waiting = False, None
        self.jobs = {f"train-job{n}": JobState() for n in range(clients)}
        self.started = self.started or number(event["time"])
        self.filling.clear()
        self.sandboxes.forget()
        self.left_out.clear()
        self.unmeasured.clear()
        self.evaluating = None

    def _on_phase(self, event: Mapping[str, Any]) -> None:
        self.phase, self.note = text(event["name"]), ""
        self.rate.begin(self._now())

    def _on_note(self, event: Mapping[str, Any]) -> None:
        self.note = words(event["text"])
        self._tell(self.note)

    def _tell(self, text: str) -> None:
        """Keep a word for people; `noted` counts them all, of which the last ones are kept."""
        self.notes.append(words(text))
        self.noted += 1
        del self.notes[:-NOTES]

    def _on_tasks_left_out(self, event: Mapping[str, Any]) -> None:
        tasks = {words(task): words(why) for task, why in event["tasks"].items()}
        splits = event.get("splits", [])
        if not isinstance(splits, list):
            raise TypeError(f"{splits!r:.100} is no list of splits")
        unmeasured = dict.fromkeys([*self.unmeasured, *map(text, splits)])
        self.left_out |= tasks
        self.unmeasured = list(unmeasured)

    def _now(self) -> float:
        return (self.last_event or 0.0) + self.set_back

    def _opened_or_closed(self, event: Mapping[str, Any]) -> None:
        self.sandboxes.see(event["event"], text(event["phase"]), text(event["job"]))

    _on_rollout_start = _on_rollout_ready = _on_grading_start = _opened_or_closed

    def _on_episode(self, event: Mapping[str, Any]) -> None:
        tokens = count(event.get("sampled_tokens", 0))
        self._opened_or_closed(event)
        reward = event.get("reward")
        if reward is None:
            self.lost += 1
            return
        self.graded += 1
        self.rate.add(self._now(), tokens)
        if event["phase"].startswith("evaluation"):
            done, resolved, planned = self.evaluating or (0, 0, 0)
            self.evaluating = (done + 1, resolved + _is_resolved(event), planned)
        else:
            filling = self._filling(event["job"])
            filling.attempts += 1
            filling.tokens += tokens
            filling.resolved += _is_resolved(event)
            filling.outcomes[words(event.get("outcome"))] += 1

    def _on_attempt_fault(self, event: Mapping[str, Any]) -> None:
        self.faults[words(event["reason"])] += 1

    def _on_group(self, event: Mapping[str, Any]) -> None:
        self._filling(event["job"]).groups[text(event["fate"])] += 1

    _on_group_failed = _on_group

    def _filling(self, job: str) -> Filling:
        return self.filling.get(job) or _at_its_place(self.filling, job, Filling())

    def _on_training_start(self, event: Mapping[str, Any]) -> None:
        self._filling(event["job"]).training = True

    def _on_step_done(self, event: Mapping[str, Any]) -> None:
        filled = self.filling.get(text(event["job"]), Filling())
        step = StepResult.of(event, filled.tokens)
        self._drop_steps(
            step.job, step.step - 1
        )  # a step may be done again whose checkpoint was not yet written
        _at_its_place(self.steps, step.job, []).append(step)
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
        self._tell(
            f"{event['job']} goes on from {_checkpoint_of(event['step'])} on a new adapter, "
            f"after {number(event['seconds']):.0f} s: {event['reason']}"
        )
        self.recovered += 1

    def _on_attempt_unfinished(self, event: Mapping[str, Any]) -> None:
        self._under_way = False  # a part that begins tells it, of one that was killed
        self.unfinished += 1

    def _on_settings_changed(self, event: Mapping[str, Any]) -> None:
        self._under_way = False  # as in the line above
        changes = (f"{name} was {old}, is {new}" for name, (old, new) in event["changed"].items())
        self._tell(f"settings changed: {'; '.join(changes)}")

    def _on_reaped(self, event: Mapping[str, Any]) -> None:
        count = event["count"]
        what = f"{count} sandbox{'' if count == 1 else 'es'} of the kind {event['kind']}"
        self._tell(f"ended {what} that earlier parts of this run had left")

    def _on_episodes_deleted(self, event: Mapping[str, Any]) -> None:
        deleted, size = count(event["count"]), count(event["bytes"])
        self.deleted, self.deleted_bytes = self.deleted + deleted, self.deleted_bytes + size

    def _on_waiting(self, event: Mapping[str, Any]) -> None:
        since = event["time"] - number(event["seconds"])
        job = words(event.get("job") or "")
        self.waiting = Waiting(words(event["what"]), words(event["reason"]), since, job)

    def _on_waiting_over(self, event: Mapping[str, Any]) -> None:
        self.waiting = None

    def _on_job_done(self, event: Mapping[str, Any]) -> None:
        if self.jobs.get(event["job"]) != JobState("out of time"):  # which ends a client well, too
            self._set_job(event["job"], JobState("done"))

    def _on_job_failed(self, event: Mapping[str, Any]) -> None:
        self._set_job(event["job"], JobState("failed", words(event["reason"])))

    def _set_job(self, job: str, state: JobState) -> None:
        job = text(job)
        _at_its_place(self.jobs, job, state)
        self.jobs[job] = state
        self.sandboxes.forget(job)

    def _on_evaluation_start(self, event: Mapping[str, Any]) -> None:
        self.evaluating = (0, 0, count(event["attempts"]))
        self.sandboxes.forget(text(event["job"]))

    def _on_evaluation(self, event: Mapping[str, Any]) -> None:
        self.evaluating = None
        self.evaluations.append(EvaluationResult.of(event))

    def _on_paused(self, event: Mapping[str, Any]) -> None:
        self.status, self._paused_early = "paused", not self._under_way

    def _on_unpaused(self, event: Mapping[str, Any]) -> None:
        self.status = "running"

    def _on_out_of_time(self, event: Mapping[str, Any]) -> None:
        self._set_job(event["job"], JobState("out of time"))
        self.out_of_time = True

    def _on_run_done(self, event: Mapping[str, Any]) -> None:
        self._end("done")

    def _on_run_stopped(self, event: Mapping[str, Any]) -> None:
        self._end("stopped")

    def _on_run_failed(self, event: Mapping[str, Any]) -> None:
        self._end("failed")
        self.reason = words(event["reason"])

    def _end(self, status: str) -> None:
        self.status, self.waiting, self._under_way = status, None, False


def _is_resolved(episode: Mapping[str, Any]) -> bool:
    """Whether an attempt was resolved, whatever a run's own reward made of it."""
    return episode.get("outcome", "resolved" if episode["reward"] == 1 else None) == "resolved"


def _checkpoint_of(step: int) -> str:
    """Name a checkpoint for people, who count steps from 1."""
    return "the start" if step < 0 else f"the checkpoint of step {step + 1}"
