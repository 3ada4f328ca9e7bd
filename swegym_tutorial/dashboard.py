"""A run to watch: one figure, one small table, and for a live run in a notebook three buttons.

Reads the run's log as it grows, so that it shows a live run, a finished one, and one that another process
writes. Without ipywidgets there are no buttons, without a notebook there is one line of text a step. Knows
nothing of how a run works: it needs the run's folder, and of a live one pause, resume, stop and join.
"""

from __future__ import annotations

import asyncio
import atexit
import html
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Protocol

from .events import EventReader, RunFolder
from .lines import ENDED, evaluation_lines, habit_lines, resume_command
from .outputs import Output, in_notebook
from .summary import ADD_NOTHING, RunSummary
from .terminal import PlainLines
from .words import alt_text, status_line, summary_table

INTERVAL = 1.0  # seconds between two looks at the log
OPENED = 30.0  # seconds in which a process that has opened an ended run's folder should have begun a new part
CLOSING = 3.0  # seconds after which it is more than one that closes the folder
LISTENING = 0.05  # seconds between two chances for a button's press to be heard


class LiveRun(Protocol):
    """What a dashboard needs of a run in its own process; TrainingRun has it."""

    folder: RunFolder

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def stop(self) -> None: ...
    def join(self, timeout: float | None = None) -> bool: ...
    def wait(self) -> None: ...


class Dashboard:
    """Shows a run at the place where it is made, and keeps that up to date from a thread until the run ends.

        dashboard = Dashboard(run)     # or Dashboard("runs/first")
        dashboard.pause()              # as the button does; and resume() and stop()
        await dashboard                # until the run's end, with buttons that act meanwhile

    A cell that waits without `await`, as in `run.wait()`, holds up the presses of buttons until it is done, except
    in JupyterLab. To interrupt a cell that waits, in either way, is to stop the run.
    At the run's end its last state is painted and the buttons go, so that a saved notebook holds one picture and
    one table. An error in painting ends the painting and not the run: it is told in the table and kept in `error`.
    """

    def __init__(self, run_or_folder: LiveRun | str | os.PathLike[str], *, buttons: bool = True) -> None:
        """Show the state of now. buttons: whether a live run gets Pause, Resume and Stop.

        Raises FileNotFoundError where there is no such folder.
        """
        self.error: Exception | None = None
        self._run: LiveRun | None = None
        if isinstance(run_or_folder, (str, os.PathLike)):
            path = Path(run_or_folder)
            if not path.is_dir():
                raise FileNotFoundError(f"there is no run folder {path}: name one that holds an events.jsonl")
        else:
            self._run, path = run_or_folder, run_or_folder.folder.path
        self._folder = RunFolder(path)
        self._reader = EventReader(self._folder.events, skip=ADD_NOTHING)
        self._summary = RunSummary(self._reader.skipped)
        self._closing = threading.Event()
        self._ended: float | None = None  # since when its end is known, by time.monotonic()
        self._painter: threading.Thread | None = None
        self._view: _View = _NotebookView() if in_notebook() else _TextView()
        if self._look(over=self._run is not None and self._run.join(0)):
            return
        if self._run is not None and buttons:
            self._view.add_buttons({"Pause": self.pause, "Resume": self.resume, "Stop": self.stop})
        self._painter = threading.Thread(target=self._paint, name="dashboard", daemon=True)
        atexit.register(self.close)
        self._painter.start()

    def __str__(self) -> str:
        """The table as it stands, or in a terminal the last line."""
        return self._view.text

    def _ipython_display_(self) -> None:
        """Show nothing where it is a cell's last value: it has shown itself already."""

    # -- What its reader may do: each button has one of these ---------------------------------------

    def pause(self) -> None:
        """Have the run start no more groups. Raises RuntimeError where only a folder is watched."""
        self._live().pause()

    def resume(self) -> None:
        """Have a paused run go on. Raises RuntimeError where only a folder is watched."""
        self._live().resume()

    def stop(self) -> None:
        """Have the run end; its last checkpoint stands. Raises RuntimeError where only a folder is watched."""
        self._live().stop()

    def close(self) -> None:
        """Paint what there is and stop painting; the run goes on. Returns when that is done; may be called twice."""
        self._closing.set()
        atexit.unregister(self.close)
        if self._painter is not None:
            self._painter.join()

    def __await__(self) -> Generator[Any, None, None]:
        """Wait for the end of the run and of the painting; raises what the run raised."""
        return self._over().__await__()

    async def _over(self) -> None:
        if self._run is not None:
            try:
                while not self._run.join(0):
                    await asyncio.sleep(LISTENING)
            except (KeyboardInterrupt, asyncio.CancelledError):
                self._run.stop()
                raise
        while self._painter is not None and self._painter.is_alive():
            await asyncio.sleep(LISTENING)
        if self._run is not None:
            self._run.wait()

    def _live(self) -> LiveRun:
        if self._run is None:
            raise RuntimeError(
                "this dashboard watches a folder: a run is paused and stopped in the process that runs it"
            )
        return self._run

    # -- The painter -------------------------------------------------------------------------------

    def _paint(self) -> None:
        """Paint until the run is over. This is the border where the painting's own errors stop."""
        try:
            while not self._look(over=self._wait()):
                pass
        except Exception as error:
            self.error = error
            self._view.tell(f"stopped painting: {type(error).__name__}: {error}. The run goes on.")
        finally:
            atexit.unregister(self.close)  # which would keep it all in memory

    def _wait(self) -> bool:
        """Wait until the next look is due; returns whether it is the last one."""
        if self._run is not None:
            return self._run.join(INTERVAL) or self._closing.is_set()
        return self._closing.wait(INTERVAL)

    def _look(self, over: bool) -> bool:
        """Take in what is new in the log and show it; returns whether it was the last time."""
        self._summary.update(self._reader.stream())
        if self._run is None:
            over = self._over_elsewhere() or over
        self._view.show(self._summary, over, "" if over or self._run is not None else self._hint())
        if self._summary.gone:
            self._view.tell(f"go on with: {resume_command(self._folder.path)}")
        return over

    def _over_elsewhere(self) -> bool:
        """Whether the run in this folder, of whatever process, has ended or its process is gone."""
        if self._summary.last_event is None:
            return False
        if self._summary.status not in ENDED:
            self._ended = None
        elif self._ended is None:
            self._ended = time.monotonic()
        if self._folder.written():  # of an ended run by one that closes it or goes on; without locks, always
            return self._ended is not None and time.monotonic() - self._ended > OPENED
        self._summary.update(self._reader.stream())  # what it wrote just before its end
        self._summary.gone = self._summary.status not in ENDED
        return True

    def _hint(self) -> str:
        """Say what is waited for where the run doesn't tell it."""
        if self._summary.last_event is None:
            log = self._folder.events
            what = "the log is empty yet" if log.exists() else "there is no log here yet"
            return f"{what}: looking for events in {log}"
        if self._ended is not None and time.monotonic() - self._ended > CLOSING:
            return "a process has the folder open, and may go on with the run"
        return ""


class _View(Protocol):
    """Where a summary is shown. Its methods are called by one thread at a time."""

    text: str  # what it says now

    def show(self, summary: RunSummary, over: bool, hint: str = "") -> None: ...
    def tell(self, text: str) -> None: ...
    def add_buttons(self, actions: Mapping[str, Callable[[], None]]) -> None: ...


class _NotebookView:
    """Three outputs of the cell that it was made in, changed in place: figure, table, and buttons while they serve."""

    def __init__(self) -> None:
        self.text = ""
        self._figure, self._table, self._buttons = Output(), Output(), Output()
        self._drawn: Any = None
        self._rows: list[tuple[str, str]] = []
        self._notes: list[tuple[str, str]] = []

    def show(self, summary: RunSummary, over: bool, hint: str = "") -> None:
        if (shown := figure_state(summary)) != self._drawn:
            self._drawn = shown
            self._draw(summary)
        self._rows = summary_table(summary) + ([("dashboard", hint)] if hint else [])
        self._write_table()
        if over:
            self._buttons.remove()

    def tell(self, text: str) -> None:
        self._notes.append(("dashboard", text))
        self._write_table()

    def add_buttons(self, actions: Mapping[str, Callable[[], None]]) -> None:
        """Without ipywidgets, or with one that doesn't fit the kernel, the table says what serves instead."""
        try:
            self._buttons.put_widget(_button_row(actions))
        except Exception as error:
            calls = ", ".join(f"{name.lower()}()" for name in actions)
            why = f"{type(error).__name__}: {error}"
            self.tell(f"no buttons here ({why}); the dashboard's methods {calls} do the same")

    def _draw(self, summary: RunSummary) -> None:
        from .plots import drawing, picture, reward_time_figure

        with drawing:
            drawn = picture(reward_time_figure(summary), alt_text(summary))
        self._figure.put(*drawn._repr_mimebundle_())

    def _write_table(self) -> None:
        rows = [*self._rows, *self._notes]
        text = table_text(rows)
        self._table.put({"text/html": table_html(rows), "text/plain": text}, {})
        self.text = text


def _button_row(actions: Mapping[str, Callable[[], None]]) -> Any:
    import ipywidgets

    icons = {"Pause": "pause", "Resume": "play", "Stop": "stop"}
    buttons = [ipywidgets.Button(description=name, icon=icons[name]) for name in actions]

    def click(button: Any) -> None:
        actions[button.description]()
        if button.description == "Stop":
            for each in buttons:
                each.disabled = True

    for button in buttons:
        button.on_click(click)
        # ipykernel 7.4 hears a widget in the shell that last spoke of it, which a waiting cell blocks; without this
        # it takes the page's choice, and JupyterLab's is a shell of the widgets' own.
        getattr(button.comm, "__dict__", {}).pop("_reply_subshell_id", None)
    return ipywidgets.HBox(buttons)


def figure_state(summary: RunSummary) -> Any:
    """Return what decides the figure, so that it is drawn anew only where it would differ."""
    steps = {job: [(s.step, s.time) for s in steps[-1:]] for job, steps in summary.steps.items()}
    return (
        steps,
        [len(steps) for steps in summary.steps.values()],
        [(e.label, e.job, e.resolved) for e in summary.evaluations],
        summary.planned_steps,
        [job for job, state in summary.jobs.items() if state.name in ("failed", "out of time")],
        None if steps else (summary.phase, summary.status),
    )


def table_html(rows: list[tuple[str, str]]) -> str:
    """Return rows as an HTML table that has no colours of its own, for light and dark pages."""
    left = 'style="text-align: left"'
    lines = (
        f'<tr><th scope="row" {left}>{html.escape(name)}</th><td {left}>{html.escape(value)}</td></tr>'
        for name, value in rows
    )
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def table_text(rows: list[tuple[str, str]]) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


class _TextView:
    """Lines on stdout: one a step and an evaluation, one for each new phase, and how it ended."""

    def __init__(self) -> None:
        self.text = ""
        self._plain = PlainLines()
        self._told: set[str] = set()  # evaluations
        self._phase = self._hint = ""

    def show(self, summary: RunSummary, over: bool, hint: str = "") -> None:
        for line in self._plain.new(summary):
            self.tell(line)
        for line in evaluation_lines(summary):
            if line not in self._told:
                self._told.add(line)
                self.tell(line)
        if over:
            for line in habit_lines(summary):
                self.tell(line)
            self.tell(status_line(summary))
        elif summary.phase != self._phase:
            self._phase = summary.phase
            self.tell(summary.phase)
        if hint and hint != self._hint:
            self.tell(hint)
        self._hint = hint

    def tell(self, text: str) -> None:
        print(text, flush=True)
        self.text = text

    def add_buttons(self, actions: Mapping[str, Callable[[], None]]) -> None:
        """There is nothing to press in a terminal: the dashboard's methods do the same."""
