"""A run in words and numbers for people: alternative text for its figure, and a small table.

Reads a RunSummary only; steps are counted from 1. Knows nothing of figures or notebooks.
"""

from __future__ import annotations

import re
import statistics
import time

from .lines import (
    ENDED,
    client_state,
    deleted_line,
    duration,
    fault_lines,
    habit_lines,
    job_lines,
    left_out_lines,
    present,
    waiting_line,
    wanted_groups,
    work_line,
)
from .records import FATES, EvaluationResult, JobState, StepResult
from .summary import RunSummary

__all__ = [
    "ENDED",
    "PHASES",
    "alt_text",
    "duration",
    "held_out",
    "held_out_splits",
    "mean_rewards",
    "phase_seconds",
    "status_line",
    "summary_table",
]

PHASES = ("sampling", "tools", "grading", "training", "publishing")  # of a batch, in their order


def held_out(summary: RunSummary, split: str = "") -> tuple[EvaluationResult | None, EvaluationResult | None]:
    """Return the held-out evaluations before and after training, None where there was no such evaluation.

    split: which held-out split; by default the first one. Of several clients the attempts are taken together; of an
    evaluation made twice the later one counts.
    """
    split = split or next(iter(held_out_splits(summary)), "")
    return _together(summary, split, "before"), _together(summary, split, "after")


def held_out_splits(summary: RunSummary) -> list[str]:
    """Return the splits that were measured before or after training, in their order."""
    return list(dict.fromkeys(e.split for e in summary.evaluations if e.label in ("before", "after")))


def _together(summary: RunSummary, split: str, label: str) -> EvaluationResult | None:
    latest = list({e.job: e for e in summary.evaluations if (e.label, e.split) == (label, split)}.values())
    if not sum(e.attempts for e in latest):
        return None
    return EvaluationResult(
        label=label,
        job=", ".join(e.job for e in latest),
        split=latest[0].split,
        attempts=sum(e.attempts for e in latest),
        resolved=sum(e.resolved for e in latest),
        lost=sum(e.lost for e in latest),
    )


def phase_seconds(summary: RunSummary) -> tuple[list[int], dict[str, list[float]]]:
    """Return the steps (counted from 1) and each phase's seconds in them, averaged over the clients that did it.

    The filling of a batch is shared out by the work that was done in it, as its attempts ran side by side.
    """
    done: dict[int, list[StepResult]] = {}
    for results in summary.steps.values():
        for result in results:
            done.setdefault(result.step + 1, []).append(result)
    steps = sorted(done)
    parts: dict[str, list[float]] = {
        phase: [statistics.fmean(_parts(result)[phase] for result in done[step]) for step in steps]
        for phase in PHASES
    }
    return steps, parts


def _parts(result: StepResult) -> dict[str, float]:
    nothing = dict.fromkeys(PHASES, 0.0)
    return nothing | result.fill_parts | {
        "training": result.train_seconds,
        "publishing": result.publish_seconds,
    }  # fmt: skip


def mean_rewards(summary: RunSummary) -> list[tuple[int, float]]:
    """Return the mean of the clients' rewards in each step (counted from 1) that all of them have done.

    A client that failed, or that was out of time, counts until its last step, and the others go on without it.
    """
    done = {job: {s.step + 1: s.reward_mean for s in steps} for job, steps in summary.steps.items()}
    means: list[tuple[int, float]] = []
    for step in sorted({step for values in done.values() for step in values}):
        if any(step not in done.get(job, {}) for job in {*summary.jobs, *done} if _goes_on(summary, job)):
            break
        means.append((step, statistics.fmean(values[step] for values in done.values() if step in values)))
    return means


def ended_early(summary: RunSummary) -> bool:
    """Whether a client has ended before others."""
    return any(not _goes_on(summary, job) for job in summary.jobs)


def _goes_on(summary: RunSummary, job: str) -> bool:
    return summary.jobs.get(job, JobState()).name not in ("failed", "out of time")


def alt_text(summary: RunSummary) -> str:
    """Say in a few sentences what the figure shows."""
    said = ["Two charts over the steps, a batch each."]
    if reward := _reward_change(summary):
        said.append(f"Left: the mean reward of all graded attempts, {reward}.")
    else:
        said.append("No batch is done yet.")
    if rates := _held_out_change(summary):
        said.append(f"Held-out tasks resolved: {rates}.")
    steps, parts = phase_seconds(summary)
    if steps:
        means = ", ".join(f"{phase} {statistics.fmean(values):.1f}" for phase, values in parts.items())
        said.append(f"Right: the seconds of a batch, stacked by phase, on average {means}.")
    return " ".join(said)


def summary_table(summary: RunSummary, now: float | None = None) -> list[tuple[str, str]]:
    """Return the state of a run as rows of a name and a value, for people.

    now: seconds since 1970, for the age of the last event; by default the present.
    """
    steps = [s for steps in summary.steps.values() for s in steps]
    rows = [("status", status_line(summary))]
    if waiting := waiting_line(summary, now):
        rows.append(("waiting", waiting.removeprefix("waiting ")))
    if summary.clients > 1 and summary.phase == "training":
        rows.append(("clients", _clients(summary, now)))
        rows += _batches(summary)
    if steps:
        done = sorted(len(steps) for steps in summary.steps.values())
        count = f"{done[0]}" if done[0] == done[-1] else f"{done[0]} to {done[-1]}"
        clients = f", {len(done)} clients" if len(done) > 1 else ""
        rows.append(("steps done", f"{count} of {summary.planned_steps}{clients}"))
        rows.append(("mean reward", _reward_change(summary)))
    for split in held_out_splits(summary):
        if rates := _held_out_change(summary, split):
            rows.append((f"{split} resolved", rates))
    rows += [("habits", line.removeprefix("habits: ")) for line in habit_lines(summary)]
    if steps:
        seconds = [s.batch_seconds for s in steps]
        last = max((each[-1] for each in summary.steps.values()), key=lambda s: s.time)
        median = f"{statistics.median(seconds):.1f} s median"
        rows.append(("batch time", f"{median}, {last.batch_seconds:.1f} s the last one"))
        groups = {fate: sum(s.groups.get(fate, 0) for s in steps) for fate in FATES}
        rows.append(("groups", ", ".join(f"{count} {fate}" for fate, count in groups.items())))
    rows += _traffic(summary, now)
    if left_out := left_out_lines(summary):
        rows.append(("tasks", "; ".join(left_out)))
    if faults := fault_lines(summary):
        rows.append(("faults", "; ".join(faults)))
    if summary.recovered:
        rows.append(("recovered", f"{summary.recovered} times from a checkpoint, on a new adapter"))
    if summary.unfinished:
        rows.append(("unfinished", f"{summary.unfinished} attempts of earlier parts of this run"))
    if deleted := deleted_line(summary):
        rows.append(("disk", deleted))
    if summary.last_event is not None:
        rows.append(_last_event(summary, summary.last_event, time.time() if now is None else now))
    return rows


def status_line(summary: RunSummary) -> str:
    """Say what the run is doing, or how it ended."""
    if summary.status not in ENDED:
        return f"its process is gone; it was: {work_line(summary)}" if summary.gone else work_line(summary)
    took = ""
    if summary.started is not None and summary.last_event is not None:
        took = f" after {duration(summary.seconds)}"
    return summary.status + took + (f": {summary.reason}" if summary.reason else "")


def _clients(summary: RunSummary, now: float | None) -> str:
    """Say in short how each client stands, those of the same state together, and why some failed."""
    states: dict[str, list[str]] = {}
    for job in summary.jobs:
        state = client_state(summary, job, now)
        if not state.startswith("failed"):
            states.setdefault(re.split(r",? \d", state)[0], []).append(job.removeprefix("train-"))
    told = [f"{', '.join(jobs)} {name}" for name, jobs in states.items()]
    return "; ".join([*told, *job_lines(summary)])


def _batches(summary: RunSummary) -> list[tuple[str, str]]:
    """Say how far each client's batch is filled."""
    told = [
        f"{job.removeprefix('train-')} " + ("training" if filling.training else f"{filling.groups['kept']}")
        for job, filling in summary.filling.items()
        if summary.jobs.get(job, JobState()).name == "running"
    ]
    wanted = max((wanted_groups(summary, job) for job in summary.filling), default=0)
    of = f" of {wanted}" if wanted else ""
    return [("next batches", f"groups kept{of}: {', '.join(told)}")] if told else []


def _traffic(summary: RunSummary, now: float | None) -> list[tuple[str, str]]:
    """Say how many tokens are sampled a second, of an ended run over its batches; and how many sandboxes are open."""
    rows: list[tuple[str, str]] = []
    if summary.status in ENDED or summary.gone:
        seconds = max((sum(s.batch_seconds for s in steps) for steps in summary.steps.values()), default=0.0)
        if summary.tokens and seconds:
            told = f"{summary.tokens:,} in training, {summary.tokens / seconds:,.0f} a second"
            rows.append(("tokens sampled", told))
        return rows
    if rate := summary.rate.a_second(present(summary, now) + summary.set_back):
        rows.append(("tokens sampled", f"{rate:,.0f} a second, of graded attempts"))
    rows.append(("sandboxes", f"{summary.sandboxes.total()} at work"))
    return rows


def _reward_change(summary: RunSummary) -> str:
    """Say how the clients' mean reward went, over the first and the last steps that all of them have done."""
    means = mean_rewards(summary)
    if not means:
        return "no step is done by all clients yet" if summary.steps else ""
    if len(means) == 1:
        return f"{means[0][1]:.2f} in the first step"
    k = min(5, len(means) // 2)
    first = statistics.fmean(value for _, value in means[:k])
    last = statistics.fmean(value for _, value in means[-k:])
    name = f"{k} steps" if k > 1 else "step"
    told = f"{first:.2f} in the first {name}, {last:.2f} in the last {name}"
    if summary.clients > 1 and ended_early(summary):
        told += f", {means[-1][1]:.2f} in step {means[-1][0]} of the clients that got so far"
    return told


def _held_out_change(summary: RunSummary, split: str = "") -> str:
    both = held_out(summary, split)
    told = [f"{e.rate:.0%} of {e.attempts} attempts {e.label} training" for e in both if e]
    return ", ".join(told)


def _last_event(summary: RunSummary, at: float, now: float) -> tuple[str, str]:
    if summary.status in ENDED:
        return "ended", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    return "last event", f"{duration(max(0.0, now - at))} ago"
