"""Attach to a long log, and follow it as it grows: what a dashboard does in the background, without a notebook.

    python tests/benchmarks/dashboard.py [--events 1000000] [--clients 8]

Goals: a dashboard attaches to 1,000,000 events in under 3 s, and a refresh after 1,000 new ones takes under 50 ms
without the drawing, so that at one refresh a second it takes at most a twentieth of a core. The log is a synthetic
one in the real log's format (tests/synthetic.py). Seconds of this process's own time, which other processes on the
machine stretch little; the wall clock's stand beside them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from synthetic import Events

from swegym_tutorial.dashboard import figure_state, table_html
from swegym_tutorial.events import EventReader, dumps
from swegym_tutorial.plots import picture, reward_time_figure
from swegym_tutorial.summary import ADD_NOTHING, RunSummary
from swegym_tutorial.timeline import read_spans
from swegym_tutorial.timeline.figure import timeline_figure, timeline_words
from swegym_tutorial.words import alt_text, summary_table

NEW, REFRESHES, STEPS = 1000, 20, 100_000


class Watcher:
    """What a dashboard does with the log, without a notebook to show it in."""

    def __init__(self, folder: Path) -> None:
        self._reader = EventReader(folder, skip=ADD_NOTHING)
        self.summary = RunSummary(self._reader.skipped)
        self.state: Any = None

    def refresh(self) -> None:
        self.summary.update(self._reader.stream())
        self.state = figure_state(self.summary)
        table_html(summary_table(self.summary))

    def draw(self) -> None:
        picture(reward_time_figure(self.summary), alt_text(self.summary))


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Return how many seconds a call took of this process's time, and of the wall clock."""
    began, wall = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - began, time.perf_counter() - wall


def write(file: Any, lines: Iterator[str], count: int) -> None:
    file.writelines(itertools.islice(lines, count))
    file.flush()


def draw_timeline(folder: Path) -> None:
    read = read_spans(folder)
    picture(timeline_figure(read), timeline_words(read))


def row(what: str, goal: str, seconds: tuple[float, float]) -> None:
    own, wall = (f"{s:.2f} s" if s >= 0.5 else f"{1000 * s:.1f} ms" for s in seconds)
    print(f"| {what} | {goal} | {own} | {wall} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=1_000_000, help="lines of the log")
    parser.add_argument("--clients", type=int, default=8)
    args = parser.parse_args()
    events = Events(clients=args.clients, steps=STEPS, planned=STEPS, evaluations=("before",), end="")
    lines = (dumps(event) + "\n" for event in events)
    with tempfile.TemporaryDirectory() as name, (Path(name) / "events.jsonl").open("w") as file:
        folder = Path(name)
        write(file, lines, args.events)
        size = (folder / "events.jsonl").stat().st_size
        print(f"A log of {args.events:,} events, {size / 1e6:.0f} MB, {args.clients} clients.\n")
        print("| what | goal | own time | wall clock |\n|---|---|---|---|", flush=True)
        watcher = Watcher(folder)
        row("attach", "3 s", timed(watcher.refresh))
        taken = []
        for _ in range(REFRESHES):
            write(file, lines, NEW)
            taken.append(timed(watcher.refresh))
        own, wall = zip(*taken, strict=True)
        row(
            f"refresh, {NEW:,} new events (median)",
            "50 ms",
            (statistics.median(own), statistics.median(wall)),
        )
        row(f"the slowest of {REFRESHES}", "", (max(own), max(wall)))
        row("refresh, nothing new", "", timed(watcher.refresh))
        watcher.draw()  # the first time matplotlib is imported
        row("drawing reward and batch time", "", timed(watcher.draw))
        row("the last ten steps as a timeline", "", timed(lambda: draw_timeline(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
