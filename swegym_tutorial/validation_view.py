"""How a validation of tasks looks in a terminal, and where there is none. Knows nothing of how tasks are tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from .validation import Validation


class ValidationView:
    """How a validation goes: a line a task as it is done and, in a terminal, a live line below them."""

    def __init__(self, console: Console, tasks: int, times: int) -> None:
        self._console, self._tasks, self._times = console, tasks, times
        self._states: Counter[str] = Counter()
        self._progress: Progress | None = None
        self._said: set[str] = set()

    def __enter__(self) -> ValidationView:
        if self._console.is_terminal:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

            columns = (
                "{task.description}",
                BarColumn(),
                MofNCompleteColumn(),
                "tries",
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._bar = self._progress.add_task("validating", total=self._tasks * self._times)
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, text: str) -> None:
        """Say a thing once: a folder that cannot be written to is one for all tasks."""
        kind = text.partition(":")[2] or text
        if kind not in self._said:
            self._said.add(kind)
            self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def on_try(self) -> None:
        if self._progress is not None:
            self._progress.advance(self._bar)

    def on_task(self, found: Validation) -> None:
        self._states[found.status] += 1
        done, name = sum(self._states.values()), found.task.instance_id
        seconds = f"base {found.base_seconds:.1f} s, gold {found.gold_seconds:.1f} s" if found.tries else ""
        line = (
            f"{done:4} of {self._tasks}  {name:36} {found.status:9}  {' '.join(found.why.split()) or seconds}"
        )
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)
        if self._progress is not None:
            self._progress.update(self._bar, description=self._counts())

    def _counts(self) -> str:
        return ", ".join(f"{count} {status}" for status, count in self._states.items())

    def table(self, found: Sequence[Validation]) -> None:
        """Print the findings as a table, and what they come to."""
        from rich.table import Table
        from rich.text import Text

        view = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1), collapse_padding=True)
        for name in ("task", "state", "tries", "base, s", "gold, s", "why"):
            view.add_column(name, justify="right" if name[0] in "tbg" and name != "task" else "left")
        for each in found:
            seconds = (f"{each.base_seconds:.2f}", f"{each.gold_seconds:.2f}") if each.tries else ("", "")
            why = Text(" ".join(each.why.split()), overflow="fold")
            view.add_row(each.task.instance_id, each.status, str(each.tries), *seconds, why)
        self._console.print()
        self._console.print(view, highlight=False)
        self._console.print(f"{self._counts()} of {self._tasks} tasks", highlight=False, markup=False)
