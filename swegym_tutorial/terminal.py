"""A run in a terminal: a live table, plain lines where there is no terminal, and `show`.

Reads events only, so that it shows a live run, a finished one, and one made elsewhere.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .events import EventReader
from .lines import (
    ENDED,
    OVER,
    client_state,
    deleted_line,
    duration,
    evaluation_lines,
    fault_lines,
    habit_lines,
    job_lines,
    left_out_lines,
    progress_line,
    reward_line,
    shortened,
    step_line,
    waiting_line,
)
from .summary import ADD_NOTHING, FATES, RunSummary, job_order
from .words import mean_rewards

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

    from .run import TrainingRun

__all__ = [
    "PlainLines",
    "evaluation_lines",
    "fault_lines",
    "habit_lines",
    "resume_points",
    "reward_line",
    "summarise",
    "table",
    "watch",
]

ROWS = 15  # steps that the live table shows
WIDTH = 80  # characters that the tables have at most
TOLD_EVERY = 30.0  # seconds between two plain lines on the progress
WAITING_TOLD_EVERY = 180.0  # and on the same wait


def table(summary: RunSummary, rows: int | None = None) -> Group:
    """Return a rich table of at most 80 columns, and what the run came to below it.

    Of one client each of the last `rows` steps is a row (None: all of them); of several each client is one, as
    hundreds of steps side by side would tell nobody how they stand.
    """
    from rich.console import Group
    from rich.text import Text

    steps = any(summary.steps.values())
    many = summary.clients > 1
    view = _client_table(summary) if many else _step_table(summary, rows)
    lines = [
        *left_out_lines(summary),
        *job_lines(summary),
        *([] if many and rows else checkpoint_lines(summary)),
        *evaluation_lines(summary),
        *habit_lines(summary),
        *fault_lines(summary),
        *filter(None, [deleted_line(summary)]),
    ]
    return Group(*([view] if steps or many else []), *(Text(line, overflow="fold") for line in lines))


def _step_table(summary: RunSummary, rows: int | None) -> Table:
    """Return the last `rows` steps, or all, one a row."""
    from rich.table import Table

    view = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1), collapse_padding=True)
    for name in ("job", "step", "mean reward", *FATES, "seconds", "fill", "train", "publish"):
        view.add_column(name, justify="left" if name in ("job", "mean reward") else "right", no_wrap=True)
    steps = sorted((s for steps in summary.steps.values() for s in steps), key=lambda s: s.time)
    for s in steps[-rows:] if rows else steps:
        view.add_row(
            s.job.removeprefix("train-"),
            str(s.step + 1),
            _bar(s.reward_mean),
            *(str(s.groups.get(fate, 0)) for fate in FATES),
            *(f"{t:.1f}" for t in (s.batch_seconds, s.fill_seconds, s.train_seconds, s.publish_seconds)),
        )
    return view


def _client_table(summary: RunSummary) -> Table:
    """Return one row a client and one for all, whose mean reward is that of the last step that all have done.

    Groups are counted over all steps and the batch being filled.
    """
    from rich.table import Table
    from rich.text import Text

    jobs = sorted({*summary.jobs, *summary.steps}, key=job_order)
    states = {job: client_state(summary, job) for job in jobs}
    groups = {job: _groups(summary, job) for job in jobs}
    rows = [["job", "step", "mean reward", *FATES, "seconds"]]
    for job in jobs:
        steps = summary.steps.get(job, [])
        rows.append(
            [
                job.removeprefix("train-"),
                f"{len(steps)}/{summary.planned_steps}",
                _bar(steps[-1].reward_mean if steps else None),
                *(str(groups[job][fate]) for fate in FATES),
                _short(steps[-1].batch_seconds if steps else None),
            ]
        )
    last = [steps[-1] for steps in summary.steps.values()]
    means = mean_rewards(summary)
    rows.append(
        [
            "all",
            f"{sum(map(len, summary.steps.values()))}/{summary.planned_steps * len(jobs)}",
            _bar(means[-1][1] if means else None),
            *(str(sum(counts[fate] for counts in groups.values())) for fate in FATES),
            _short(_mean([s.batch_seconds for s in last])),
        ]
    )
    active = sum(not state.startswith(OVER) for state in states.values())
    ends = ["state", *states.values(), f"{active} of {len(jobs)} active"]
    room = WIDTH - sum(max(map(len, column)) + 1 for column in zip(*rows, strict=True))
    view = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1), collapse_padding=True)
    for name in (*rows[0], "state"):
        left = name in ("job", "mean reward", "state")
        view.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row, state in zip(rows[1:], ends[1:], strict=True):
        style = "bold" if row[0] == "all" else ""
        view.add_row(*row, Text(shortened(state, max(9, room))), style=style)
    return view


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _groups(summary: RunSummary, job: str) -> Counter[str]:
    """Count a client's groups by their fates, those of the batch being filled among them."""
    counts: Counter[str] = Counter()
    for step in summary.steps.get(job, []):
        counts.update(step.groups)
    if job in summary.filling:
        counts.update(summary.filling[job].groups)
    return counts


def _bar(mean: float | None) -> str:
    if mean is None:
        return "-"
    filled = round(6 * mean)
    return f"{mean:.3f} {'█' * filled}{'░' * (6 - filled)}"


def _short(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.1f}" if seconds < 1000 else f"{seconds:.0f}"


def checkpoint_lines(summary: RunSummary) -> list[str]:
    """Tell each client's last checkpoint."""
    return [
        f"{job}, checkpoint of step {steps[-1].step + 1}: {steps[-1].checkpoint}"
        for job, steps in summary.steps.items()
    ]


class PlainLines:
    """What a run tells where there is no live table: each step, what is waited for, and how its clients end."""

    def __init__(self) -> None:
        self._steps: set[tuple[str, int, float]] = set()
        self._told: set[str] = set()  # clients' ends, as they were told last
        self._noted = 0
        self._waiting: float | None = None  # when a wait was last told of
        self._began = 0.0  # since when that wait is
        self._status = ""

    def pass_over(self, earlier: RunSummary) -> None:
        """Take as told what earlier parts of a run have come to."""
        self._steps = {(s.job, s.step, s.time) for steps in earlier.steps.values() for s in steps}
        self._noted, self._told, self._status = earlier.noted, set(job_lines(earlier)), earlier.status

    def new(self, summary: RunSummary, now: float | None = None) -> Iterator[str]:
        """Yield the lines that are new since the last call. now: seconds since 1970, by default the present."""
        now = time.time() if now is None else now
        for step in sorted((s for steps in summary.steps.values() for s in steps), key=lambda s: s.time):
            if (key := (step.job, step.step, step.time)) not in self._steps:
                self._steps.add(key)
                yield step_line(step)
        yield from summary.notes[-new:] if (new := summary.noted - self._noted) else ()
        self._noted = summary.noted
        lines = job_lines(summary)
        yield from (line for line in lines if line not in self._told)
        self._told = set(lines)
        yield from self._on_waiting(summary, now)
        if summary.status != self._status and "paused" in (summary.status, self._status):
            yield (
                "paused: no group is started"
                if summary.status == "paused"
                else f"no longer paused: {summary.status}"
            )
        self._status = summary.status

    def _on_waiting(self, summary: RunSummary, now: float) -> Iterator[str]:
        if summary.waiting is not None:
            if self._waiting is None:
                self._began = summary.waiting.since
            if self._waiting is None or now - self._waiting >= WAITING_TOLD_EVERY:
                self._waiting = now
                yield waiting_line(summary, now)
        elif self._waiting is not None:
            self._waiting = None
            yield f"waited {duration(max(0.0, now - self._began))} for the server, and goes on"


def watch(run: TrainingRun, console: Console, earlier: RunSummary | None = None) -> RunSummary:
    """Show a run until it ends: a live table in a terminal, plain lines elsewhere. Returns its summary.

    earlier: what the log told before this part of the run began; plain lines tell only what is new since.
    """
    reader = EventReader(run.folder.path, skip=ADD_NOTHING)
    summary = RunSummary(reader.skipped)
    if not console.is_terminal:
        return _watch_plain(run, console, reader, summary, earlier or RunSummary())
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    def view(rows: int | None) -> Group:
        doing = rows is not None and summary.status not in ENDED
        return Group(table(summary, rows), *([Text(progress_line(summary), style="dim")] if doing else []))

    with Live(console=console, auto_refresh=False) as live:
        while not run.join(0.25):
            summary.update(reader.stream())
            live.update(view(ROWS), refresh=True)
        summary.update(reader.stream())
        live.update(view(None), refresh=True)
    return summary


def _watch_plain(
    run: TrainingRun, console: Console, reader: EventReader, summary: RunSummary, earlier: RunSummary
) -> RunSummary:
    plain, phase, told = PlainLines(), earlier.phase, time.monotonic()
    plain.pass_over(earlier)
    while True:
        over = run.join(0.5)
        summary.update(reader.stream())
        lines = list(plain.new(summary))
        quiet = time.monotonic() - told > TOLD_EVERY and summary.waiting is None
        if summary.phase != phase or (quiet and not lines):
            phase = summary.phase
            lines.append(progress_line(summary))
        for line in lines:
            console.print(line, soft_wrap=True, highlight=False, markup=False)
            told = time.monotonic()
        if over:
            return summary


def summarise(folder: Path) -> RunSummary:
    """Read a whole run folder."""
    reader = EventReader(folder, skip=ADD_NOTHING)
    summary = RunSummary(reader.skipped)
    summary.update(reader.stream())
    return summary


def resume_points(folder: Path) -> dict[str, list[int]]:
    """Return each job's steps, counted from 1, after which a checkpoint is kept, the newest first; 0 is the start.

    A file that cannot be read is passed over: whoever goes on from it is told.
    """
    points: dict[str, list[int]] = {}
    for path in sorted(folder.glob("train-job*-checkpoint.json"), key=lambda path: job_order(path.name)):
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            steps = [int(each["step"]) + 1 for each in (saved, *saved.get("earlier", []))]
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            continue
        points[path.name.removesuffix("-checkpoint.json")] = steps
    return points
