"""The rates of the habits over the steps of a run, as numbers and as a figure.

Reads a RunSummary only. Knows nothing of commands.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from .habits import MEANINGS, Habit
from .plots import DPI, GREY, INK, drawing, style_axes
from .summary import RunSummary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = dict(zip(Habit, ("#0072B2", "#666666", "#D55E00", "#009E73", "#CC79A7"), strict=True))


def habit_rates(summary: RunSummary) -> dict[Habit, list[tuple[int, float]]]:
    """Return habit -> (step counted from 1, share of the attempts in which it came up that had it), clients together."""
    counts: dict[tuple[str, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for steps in summary.steps.values():
        for step in steps:
            for name, (had, of) in step.habits.items():
                before = counts[name, step.step + 1]
                counts[name, step.step + 1] = (before[0] + had, before[1] + of)
    return {
        habit: curve
        for habit in Habit
        if (
            curve := [(step, had / of) for (name, step), (had, of) in sorted(counts.items()) if name == habit]
        )
    }


def habit_text(summary: RunSummary) -> str:
    """Say how often each habit was there in the first and in the last step; "" where no log tells."""
    told = [
        f"{MEANINGS[habit]} {curve[0][1]:.0%}, then {curve[-1][1]:.0%}"
        for habit, curve in habit_rates(summary).items()
    ]
    return "; ".join(told)


def habit_figure(summary: RunSummary) -> Figure:
    """Draw the share of attempts with each habit over the steps, of those in which it came up."""
    from matplotlib.figure import Figure

    with drawing:
        figure = Figure(figsize=(7.0, 3.2), dpi=DPI, facecolor="white")
        axes = figure.add_axes((0.08, 0.155, 0.5, 0.7))
        style_axes(axes)
        axes.set_ylim(-0.03, 1.03)
        for row, (habit, curve) in enumerate(habit_rates(summary).items()):
            axes.plot(*zip(*curve, strict=True), color=COLORS[habit], linewidth=1.8)
            told = f"{MEANINGS[habit]}: {curve[0][1]:.2f} to {curve[-1][1]:.2f}"
            axes.text(1.04, 0.95 - 0.1 * row, told, transform=axes.transAxes, color=COLORS[habit], fontsize=9)
        axes.text(0, 1.06, "Habits", transform=axes.transAxes, fontsize=10.5, fontweight="bold", color=INK)
        key = "share of the attempts in which each came up"
        axes.text(0.16, 1.06, key, transform=axes.transAxes, fontsize=9, color=GREY)
    return figure
