"""A run in plain lines: what it does, what it waits for, how its clients stand, what was lost.

Reads a RunSummary only, and shows nothing itself. Steps are counted from 1, as people count them.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from .habits import IN_SHORT, Habit
from .records import FATES, Filling, JobState, StepResult
from .summary import RunSummary
from .trust import NOT_VALID

ENDED = ("done", "stopped", "failed")  # of a run
OVER = ("failed", "done", "out of time", "stopped", "gone")  # of a client, whose state begins so


def duration(seconds: float) -> str:
    """Return a duration in at most two units: 8 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def resume_command(folder: Path) -> str:
    return f"swegym-tutorial train --resume --output {shlex.quote(str(folder))}"


def step_line(step: StepResult) -> str:
    """Return one step as a plain line."""
    groups = " ".join(f"{fate} {step.groups.get(fate, 0)}" for fate in FATES)
    return (
        f"{step.job} step {step.step + 1}: mean reward {step.reward_mean:.3f}, {groups}, "
        f"{step.batch_seconds:.1f} s (fill {step.fill_seconds:.1f}, train {step.train_seconds:.1f}, "
        f"publish {step.publish_seconds:.1f}), checkpoint {step.checkpoint}"
    )


def evaluation_lines(summary: RunSummary) -> list[str]:
    """Return the rates of each held-out split, before and after side by side where both are there."""
    # Of an evaluation made twice the later one counts.
    before = {e.split: e for e in summary.evaluations if e.label == "before"}
    after = {(e.split, e.job): e for e in summary.evaluations if e.label == "after"}.values()
    lines = []
    for split, base in before.items():
        told = f"{split}: before {base.rate:.3f} ({base.resolved} of {base.attempts} resolved)"
        pairs = [
            f"{told}, after {e.rate:.3f} ({e.resolved} of {e.attempts}) [{e.job}]"
            for e in after
            if e.split == split
        ]
        lines += pairs or [told]
    return lines


def habit_rates(summary: RunSummary) -> dict[Habit, list[tuple[int, float]]]:
    """Return habit -> (step counted from 1, share of the attempts in which it came up that had it), clients together."""
    counts: dict[tuple[str, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for steps in summary.steps.values():
        for step in steps:
            for name, (had, of) in step.habits.items():
                before = counts[name, step.step + 1]
                counts[name, step.step + 1] = (before[0] + had, before[1] + of)
    rates: dict[Habit, list[tuple[int, float]]] = {
        habit: [(step, had / of) for (name, step), (had, of) in sorted(counts.items()) if name == habit]
        for habit in Habit
    }
    return {habit: curve for habit, curve in rates.items() if curve}


def habit_lines(summary: RunSummary) -> list[str]:
    """Tell the rate of each habit in the first step and in the last one; nothing where the log tells of none."""
    told = []
    for habit, curve in habit_rates(summary).items():
        (_, first), (_, last) = curve[0], curve[-1]
        told.append(f"{IN_SHORT[habit]} {first:.2f}" + (f" to {last:.2f}" if len(curve) > 1 else ""))
    return [f"habits: {', '.join(told)}"] if told else []


def reward_line(summary: RunSummary) -> list[str]:
    """Return mean rewards at the start and over the last five steps of each job."""
    lines = []
    if summary.out_of_time:
        done = max(map(len, summary.steps.values()), default=0)
        lines.append(
            f"time was over after {done} of {summary.planned_steps} steps: raise --hours and --resume"
        )
    for job, steps in summary.steps.items():
        last = [s.reward_mean for s in steps[-5:]]
        lines.append(
            f"{job}: mean reward {steps[0].reward_mean:.3f} in step 1, "
            f"{sum(last) / len(last):.3f} over the last {len(last)} of {len(steps)} steps; "
            f"{sum(s.batch_seconds for s in steps):.0f} s of training"
        )
    return lines


def progress_line(summary: RunSummary, now: float | None = None) -> str:
    """Say in a line what the run is doing now, or waits for. now: seconds since 1970, by default the present."""
    return "; ".join(filter(None, [waiting_line(summary, now), work_line(summary)]))


def waiting_line(summary: RunSummary, now: float | None = None) -> str:
    """Say what is waited for, since when and why; nothing where nothing takes longer than usual."""
    if (waiting := summary.waiting) is None:
        return ""
    age = duration(max(0.0, present(summary, now) - waiting.since))
    verb = "had waited" if summary.gone else "waiting"
    return f"{verb} {age} for the server ({waiting.what}): {shortened(' '.join(waiting.reason.split()), 300)}"


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


def present(summary: RunSummary, now: float | None = None) -> float:
    """Return the time in which a run stands: now, or that of its last event where its process is gone.

    Where the log's clock is ahead of the reader's, it is that of the last event too.
    """
    last = summary.last_event or 0.0
    return last if summary.gone and last else max(last, time.time() if now is None else now)


def work_line(summary: RunSummary) -> str:
    """Say what the run is doing, whether or not it has to wait."""
    return ("paused; " if summary.status == "paused" else "") + _work(summary)


def _work(summary: RunSummary) -> str:
    if summary.evaluating is not None and summary.phase.startswith("evaluating"):
        done, resolved, planned = summary.evaluating
        return f"{summary.phase}: {done} of {planned} attempts, {resolved} resolved"
    if summary.phase == "training" and summary.status in ("running", "paused"):
        if summary.clients > 1:
            return clients_line(summary)
        parts = [_batch_line(summary, job, filling) for job, filling in summary.filling.items()]
        return "; ".join(parts) or "training: waiting for the first attempts"
    return ": ".join(filter(None, [summary.phase or "starting", summary.note]))


def _batch_line(summary: RunSummary, job: str, filling: Filling) -> str:
    done = len(summary.steps.get(job, []))
    told = f"{job} batch {done + 1} of {summary.planned_steps}: "
    if filling.training:
        return told + f"training on {filling.groups['kept']} groups; {_graded(filling)}"
    return told + ", ".join(filter(None, [groups_line(summary, job, filling), _graded(filling)]))


def groups_line(summary: RunSummary, job: str, filling: Filling) -> str:
    """Say how far a batch is filled: 5 of 8 groups kept, 1 uniform."""
    wanted = wanted_groups(summary, job)
    if not wanted and not filling.groups:
        return ""
    others = [f"{filling.groups[fate]} {fate}" for fate in FATES[1:] if filling.groups[fate]]
    of = f" of {wanted}" if wanted else ""
    return ", ".join([f"{filling.groups['kept']}{of} groups kept", *others])


def wanted_groups(summary: RunSummary, job: str) -> int:
    """Return how many groups fill a batch; of logs that don't tell it, as many as the last one kept, or 0."""
    steps = summary.steps.get(job, [])
    return summary.batch_groups or (steps[-1].groups.get("kept", 0) if steps else 0)


def attempts_graded(count: int) -> str:
    return f"{count} attempt{'' if count == 1 else 's'} graded"


def _graded(filling: Filling) -> str:
    """Say how attempts came out, and where none was resolved, what became of most."""
    told = f"{attempts_graded(filling.attempts)}, {filling.resolved} resolved"
    if filling.attempts and not filling.resolved:
        outcome, count = filling.outcomes.most_common(1)[0]
        told += f" ({count} {outcome})"
    return told


def clients_line(summary: RunSummary) -> str:
    """Say how the clients stand, and how many attempts of their open batches are graded."""
    states = Counter(state.name for state in summary.jobs.values())
    graded = sum(filling.attempts for filling in summary.filling.values())
    told = [f"{states.pop('running', 0)} of {len(summary.jobs)} clients in training"]
    told += [f"{count} {name}" for name, count in states.items()]
    return ", ".join([*told, f"{attempts_graded(graded)} for the next batches"])


def client_state(summary: RunSummary, job: str, now: float | None = None) -> str:
    """Say in a few words what a client is doing, or how it ended."""
    state, steps = summary.jobs.get(job, JobState()), summary.steps.get(job, [])
    if state.name == "failed":
        return f"failed: {_without_kind(state.reason)}"
    if state.name != "running":
        return state.name
    if summary.status == "done" or (steps and steps[-1].step + 1 >= summary.planned_steps):
        return "done"  # of logs without a `job_done`
    if summary.gone or summary.status in ENDED:
        return "gone" if summary.gone else "stopped"
    if summary.waiting is not None and summary.waiting.job == job:
        return f"waiting {duration(max(0.0, present(summary, now) - summary.waiting.since))}"
    filling = summary.filling.get(job, Filling())
    if filling.training:
        return "training"
    if summary.phase != "training":
        return "starting"
    wanted = wanted_groups(summary, job)
    paused = "paused, " if summary.status == "paused" else "filling "
    return paused + f"{filling.groups['kept']}" + (f"/{wanted}" if wanted else "")


def _without_kind(reason: str) -> str:
    """Leave out an exception's name, where there is room for a few words only."""
    kind, colon, text = reason.partition(": ")
    return text if colon and text and " " not in kind else reason


def job_lines(summary: RunSummary) -> list[str]:
    """Tell which clients failed and why."""
    failed = {job: state.reason for job, state in summary.jobs.items() if state.name == "failed"}
    return [f"{job} failed: {reason}" for job, reason in failed.items()]


def left_out_lines(summary: RunSummary) -> list[str]:
    """Tell which tasks the run goes without, in a line a cause; the first reason stands for the others.

    Last, which held-out splits have lost all of theirs. A name or a reason of several lines is told in one.
    """
    causes: dict[bool, list[str]] = {}
    for task, why in summary.left_out.items():
        causes.setdefault(why.startswith(NOT_VALID), []).append(task)
    told = [
        f"{len(tasks)} task{'s' if len(tasks) > 1 else ''} left out ({', '.join(tasks)}): "
        f"{summary.left_out[tasks[0]]}"
        for tasks in causes.values()
    ]
    told += [f"the split {split} is not measured: no task of it is left" for split in summary.unmeasured]
    return [" ".join(line.split()) for line in told]


def fault_lines(summary: RunSummary) -> list[str]:
    """Tell how many attempts infrastructure faults have taken, and which fault is the commonest."""
    lines = []
    if summary.lost:
        share = summary.lost / (summary.lost + summary.graded)
        lines.append(f"{summary.lost} attempts lost to infrastructure faults ({_percent(share)} of all)")
    if total := sum(summary.faults.values()):
        reason, count = summary.faults.most_common(1)[0]
        lines.append(f"{total} infrastructure faults, the commonest {count} times: {reason}")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.0005 else "under 0.1 %"


def deleted_line(summary: RunSummary) -> str:
    """Tell how many recorded attempts were deleted; nothing where none was."""
    if not summary.deleted:
        return ""
    size = f"{summary.deleted_bytes / 1e9:.1f} GB"
    return f"the {summary.deleted} oldest recorded attempts were deleted ({size}): see episodes_gb"


def so_far_line(
    points: Mapping[str, Sequence[int]], steps: int, clients: int, back: int | None = None
) -> str:
    """Tell how far a run has come that is gone on with; nothing where no step is done.

    points: as in `resume_lines`. steps: planned of each client. back: after which step it is gone on, if not the last.
    """
    there = [points[job] for n in range(clients) if (job := f"train-job{n}") in points]
    done = [each[0] if back is None else back for each in there] + [0] * (clients - len(there))
    if not any(done):
        return ""
    if min(done) >= steps:
        return f"all {steps} steps are done; --steps N extends the run"
    return (
        f"so far {min(done)}{'' if min(done) == max(done) else f' to {max(done)}'} of {steps} steps are done"
    )


def resume_lines(points: Mapping[str, Sequence[int]]) -> list[str]:
    """Tell which checkpoints can be gone back to. points: job -> steps after which one was written, newest first."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for job, steps in points.items():
        alike.setdefault(tuple(steps), []).append(job)
    return [
        f"{', '.join(jobs)}: steps {', '.join(map(str, steps))} can be resumed from (--resume --from-step N"
        + (", 0 is the start)" if 0 in steps else ")")
        for steps, jobs in alike.items()
    ]
