"""How a run looks in a terminal: a live table, plain lines where there is no terminal, and `show`.

Reads events only, so that it shows a live run, a finished one, and one made elsewhere.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from .events import EventReader
from .summary import FATES, Filling, RunSummary, StepResult
from .trust import NOT_VALID

if TYPE_CHECKING:
    from rich.console import Console, Group

    from .run import TrainingRun

ROWS = 15  # steps that the live table shows


def step_line(step: StepResult) -> str:
    """Return one step as a plain line."""
    groups = " ".join(f"{fate} {step.groups.get(fate, 0)}" for fate in FATES)
    return (
        f"{step.job} step {step.step + 1}: mean reward {step.reward_mean:.3f}, {groups}, "
        f"{step.batch_seconds:.1f} s (fill {step.fill_seconds:.1f}, train {step.train_seconds:.1f}, "
        f"publish {step.publish_seconds:.1f}), checkpoint {step.checkpoint}"
    )


def evaluation_lines(summary: RunSummary) -> list[str]:
    """Return the held-out rates, before and after side by side where both are there."""
    before = next((e for e in summary.evaluations if e.label == "before"), None)
    after = [e for e in summary.evaluations if e.label == "after"]
    if before is None:
        return []
    told = f"{before.split}: before {before.rate:.3f} ({before.resolved} of {before.attempts} resolved)"
    if not after:
        return [told]
    return [f"{told}, after {e.rate:.3f} ({e.resolved} of {e.attempts}) [{e.job}]" for e in after]


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


def progress_line(summary: RunSummary) -> str:
    """Say in a line what the run is doing now."""
    if summary.evaluating is not None and summary.phase.startswith("evaluating"):
        done, resolved, planned = summary.evaluating
        return f"{summary.phase}: {done} of {planned} attempts, {resolved} resolved"
    if summary.phase == "training" and summary.status in ("running", "paused"):
        parts = []
        for job, filling in summary.filling.items():
            done = len(summary.steps.get(job, []))
            groups = ", ".join(f"{filling.groups[fate]} {fate}" for fate in FATES if filling.groups[fate])
            parts.append(
                f"{job} batch {done + 1} of {summary.planned_steps}: {_graded(filling)}"
                + (f", groups {groups}" if groups else "")
            )
        paused = "paused; " if summary.status == "paused" else ""
        return paused + ("; ".join(parts) or "training: waiting for the first attempts")
    return ": ".join(filter(None, [summary.phase or "starting", summary.note]))


def _graded(filling: Filling) -> str:
    """Say how attempts came out, and where none was resolved, what became of most."""
    told = f"{filling.attempts} attempts graded, {filling.resolved} resolved"
    if filling.attempts and not filling.resolved:
        outcome, count = filling.outcomes.most_common(1)[0]
        told += f" ({count} {outcome})"
    return told


def table(summary: RunSummary, rows: int | None = None) -> Group:
    """Return the steps as a rich table of at most 80 columns, the last `rows` of all jobs, and what they came to."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    view = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1), collapse_padding=True)
    for name in ("job", "step", "mean reward", *FATES, "seconds", "fill", "train", "publish"):
        view.add_column(name, justify="left" if name in ("job", "mean reward") else "right", no_wrap=True)
    steps = sorted((s for steps in summary.steps.values() for s in steps), key=lambda s: s.time)
    for s in steps[-rows:] if rows else steps:
        filled = round(6 * s.reward_mean)
        view.add_row(
            s.job.removeprefix("train-"),
            str(s.step + 1),
            f"{s.reward_mean:.3f} {'█' * filled}{'░' * (6 - filled)}",
            *(str(s.groups.get(fate, 0)) for fate in FATES),
            *(f"{t:.1f}" for t in (s.batch_seconds, s.fill_seconds, s.train_seconds, s.publish_seconds)),
        )
    lines = [
        *left_out_lines(summary),
        *(
            f"{job}, checkpoint of step {steps[-1].step + 1}: {steps[-1].checkpoint}"
            for job, steps in summary.steps.items()
        ),
        *evaluation_lines(summary),
        *fault_lines(summary),
    ]
    return Group(*([view] if steps else []), *(Text(line, overflow="fold") for line in lines))


def left_out_lines(summary: RunSummary) -> list[str]:
    """Tell which tasks the run goes without, in a line a cause; the first reason stands for the others."""
    causes: dict[bool, list[str]] = {}
    for task, why in summary.left_out.items():
        causes.setdefault(why.startswith(NOT_VALID), []).append(task)
    return [
        f"{len(tasks)} task{'s' if len(tasks) > 1 else ''} left out ({', '.join(tasks)}): "
        f"{summary.left_out[tasks[0]]}"
        for tasks in causes.values()
    ]


def fault_lines(summary: RunSummary) -> list[str]:
    total = sum(summary.faults.values())
    if not total:
        return []
    reason, count = summary.faults.most_common(1)[0]
    return [f"{total} infrastructure faults, the commonest {count} times: {reason}"]


def watch(run: TrainingRun, console: Console) -> RunSummary:
    """Show a run until it ends: a live table in a terminal, plain lines elsewhere. Returns its summary."""
    reader, summary = EventReader(run.folder.path), RunSummary()
    if not console.is_terminal:
        printed = notes = 0
        phase = ""
        told = time.monotonic()
        while True:
            over = run.join(0.5)
            summary.update(reader.stream())
            steps = sorted((s for steps in summary.steps.values() for s in steps), key=lambda s: s.time)
            for step in steps[printed:]:
                console.print(step_line(step), soft_wrap=True, highlight=False, markup=False)
                told = time.monotonic()
            printed = len(steps)
            for note in summary.notes[notes:]:
                console.print(note, soft_wrap=True, highlight=False, markup=False)
            notes = len(summary.notes)
            if summary.phase != phase or time.monotonic() - told > 30:
                phase, told = summary.phase, time.monotonic()
                console.print(progress_line(summary), soft_wrap=True, highlight=False, markup=False)
            if over:
                return summary
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    def view(rows: int | None, last_line: str) -> Group:
        return Group(table(summary, rows), *([Text(last_line, style="dim")] if last_line else []))

    with Live(console=console, auto_refresh=False) as live:
        while not run.join(0.25):
            summary.update(reader.stream())
            live.update(view(ROWS, progress_line(summary)), refresh=True)
        summary.update(reader.stream())
        live.update(view(None, ""), refresh=True)
    return summary


def summarise(folder: Path) -> RunSummary:
    """Read a whole run folder."""
    summary = RunSummary()
    summary.update(EventReader(folder).stream())
    return summary
