"""The rates of the habits over the steps of a run, in words and as a figure.

Reads a RunSummary only. Knows nothing of commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .habits import MEANINGS, Habit
from .lines import habit_rates
from .plots import DPI, GREY, HEIGHT, INK, WIDTH, drawing, head, number_steps, say_empty, style_axes
from .summary import RunSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = dict(zip(Habit, ("#0072B2", "#666666", "#D55E00", "#009E73", "#CC79A7"), strict=True))


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
        figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white")
        axes = figure.add_axes((0.056, 0.155, 0.53, 0.655))
        style_axes(axes)
        axes.set_ylim(-0.02, 1.02)
        axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
        head(axes, "Habits", "share of the attempts in which each came up")
        curves = habit_rates(summary)
        if not curves:
            say_empty(axes, "no batch tells of habits yet")
        last = max([summary.planned_steps, *(step for curve in curves.values() for step, _ in curve), 1])
        axes.set_xlim(0.5 - 0.02 * last, 0.5 + 1.01 * last)
        number_steps(axes, last, 1)
        for row, (habit, curve) in enumerate(curves.items()):
            axes.plot(*zip(*curve, strict=True), color=COLORS[habit], linewidth=1.8, marker=".", markersize=3)
            _name(axes, 1.0 - 0.21 * row, habit, curve)
    return figure


def _name(axes: Axes, height: float, habit: Habit, curve: list[tuple[int, float]]) -> None:
    """Write beside the panel, at this share of its height, whose line this is and how it went."""
    place = axes.transAxes
    axes.plot(1.055, height, "s", color=COLORS[habit], markersize=5.5, transform=place, clip_on=False)
    axes.text(1.08, height, MEANINGS[habit], transform=place, fontsize=9, color=INK, va="center")
    (_, first), (_, latest) = curve[0], curve[-1]
    told = f"{first:.2f} at first" + (f", {latest:.2f} in the last batch" if len(curve) > 1 else "")
    axes.text(1.08, height - 0.085, told, transform=place, fontsize=9, color=GREY, va="center")
