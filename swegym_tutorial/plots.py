"""Figures of a run, from its summary.

Pure functions: the same summary gives the same picture, and no global state of matplotlib is touched, so that a
thread may draw. Colours, sizes, places and ticks are set here; of the reader's own style only the font and fine
points of strokes reach in. Steps are counted from 1 for people. Knows nothing of notebooks or of live runs.
"""

from __future__ import annotations

import base64
import io
import os
import textwrap
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .summary import RunSummary
from .terminal import summarise
from .words import (
    ENDED,
    PHASES,
    alt_text,
    ended_early,
    held_out,
    mean_rewards,
    phase_seconds,
    status_line,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

drawing = threading.Lock()  # held while a figure is made: matplotlib promises nothing to threads side by side
WIDTH, HEIGHT = 7.0, 3.2  # inches
DPI = 150
LINE_HEIGHT = 0.078  # of a line of 9 pt text, as a share of the panels' height
DENSE = 60  # steps from which on single ones are no longer marked

# Okabe and Ito's colours, which people with any colour vision tell apart.
INK, GREY, RULE = "#222222", "#666666", "#BBBBBB"
REWARD, HELD_OUT = "#0072B2", "#D55E00"
HELD_OUT_TEXT = "#A84A00"  # the same, darker: small text needs more contrast
PHASE_COLORS = dict(zip(PHASES, ("#56B4E9", "#E69F00", "#009E73", "#0072B2", "#CC79A7"), strict=True))


def reward_time_figure(summary: RunSummary) -> Figure:
    """Draw mean reward and full batch time over the steps, a batch each, side by side.

    Left: the mean reward of all graded attempts on a fixed scale from 0 to 1; of several clients each is a thin grey
    line and their mean a bold one, which goes on without those that failed; the rates of the first held-out split are
    diamonds before the first and after the last step. Right: the seconds of a batch, stacked by phase; of several
    clients their mean. A run without a step gives an empty pair of panels that say what the run is doing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white")
    figure.set_layout_engine("none")
    # Fixed margins: constrained layout takes three times as long, and the panels would move while one watches.
    left = figure.add_axes((0.056, 0.155, 0.3, 0.655))
    right = figure.add_axes((0.552, 0.155, 0.282, 0.655))
    last = max([summary.planned_steps, *(s.step + 1 for steps in summary.steps.values() for s in steps), 1])
    for axes in (left, right):
        style_axes(axes)
    left.set_xlim(-0.02 * last - 0.6, 1.02 * last + 1.4)  # with room for the rates before and after
    right.set_xlim(0.5 - 0.02 * last, 0.5 + 1.01 * last)
    number_steps(left, last, 0 if held_out(summary)[0] else 1)
    number_steps(right, last, 1)
    _draw_reward(left, summary, last)
    _draw_seconds(right, summary)
    return figure


def style_axes(axes: Axes) -> None:
    """Set every colour and size by hand: the reader's own style must not reach in."""
    axes.set_facecolor("white")
    axes.set_xlabel("step (a batch each)", fontsize=9, color=INK, labelpad=2, fontweight="normal")
    axes.minorticks_off()
    axes.tick_params(
        labelsize=9, color=RULE, labelcolor=INK, length=3, width=0.8, direction="out", pad=3.5,
        bottom=True, labelbottom=True, left=True, labelleft=True,
        top=False, labeltop=False, right=False, labelright=False,
    )  # fmt: skip
    axes.grid(False)
    axes.grid(True, axis="y", color="#E8E8E8", linewidth=0.8, linestyle="-")
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set(color=RULE, linewidth=0.8)


def number_steps(axes: Axes, last: int, first: int) -> None:
    """Number some of the steps between these two, in round numbers."""
    from matplotlib.ticker import MaxNLocator

    values = MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]).tick_values(0, last)
    axes.set_xticks([value for value in values if first <= value <= last])


def head(axes: Axes, title: str, key: str) -> None:
    axes.text(0, 1.135, title, transform=axes.transAxes, fontsize=10.5, fontweight="bold", color=INK)
    axes.text(0, 1.035, key, transform=axes.transAxes, fontsize=9, color=GREY)


def say_empty(axes: Axes, text: str) -> None:
    axes.text(
        0.5,
        0.5,
        textwrap.fill(textwrap.shorten(text, 180), 30),
        transform=axes.transAxes,
        fontsize=9,
        color=GREY,
        ha="center",
        va="center",
        bbox={"facecolor": "white", "edgecolor": "none"},
    )


@dataclass(frozen=True)
class _Label:
    """A direct label: `text` beside the point (x, y) that it names."""

    x: float
    y: float
    text: str
    color: str
    bold: bool = False
    swatch: str | None = None  # the colour of a small square before the text


def _draw_labels(axes: Axes, labels: Sequence[_Label]) -> None:
    """Write labels to the right of their points, moved up or down where they would overlap."""
    from matplotlib.transforms import offset_copy

    low, high = axes.get_ylim()
    sizes = [LINE_HEIGHT * (1 + label.text.count("\n")) for label in labels]
    heights = spread([(label.y - low) / (high - low) for label in labels], sizes)
    beside = offset_copy(axes.transData, axes.get_figure(root=True), x=8, units="points")
    for label, height in zip(labels, heights, strict=True):
        point = (label.x, low + height * (high - low))
        if label.swatch:
            axes.plot(*point, "s", color=label.swatch, markersize=5.5, transform=beside, clip_on=False)
        axes.annotate(
            label.text,
            point,
            xytext=(14 if label.swatch else 6, 0),
            textcoords="offset points",
            fontsize=9,
            color=label.color,
            fontweight="bold" if label.bold else "normal",
            va="center",
            annotation_clip=False,
        )


def spread(heights: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Move the middles of things of these sizes apart until none overlap, in their order, and below 1.

    They are moved up first, and down again where the uppermost would pass 1.
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    moved = list(heights)
    for below, i in pairwise(order):
        moved[i] = max(moved[i], moved[below] + (sizes[below] + sizes[i]) / 2)
    ceiling = 1.0
    for i in reversed(order):
        moved[i] = min(moved[i], ceiling - sizes[i] / 2)
        ceiling = moved[i] - sizes[i] / 2
    return moved


def _draw_reward(axes: Axes, summary: RunSummary, last: int) -> None:
    axes.set_ylim(-0.02, 1.02)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    curves = {job: [(s.step + 1, s.reward_mean) for s in steps] for job, steps in summary.steps.items()}
    if len(curves) > 1 or summary.clients > 1:
        for one in curves.values():
            axes.plot(*zip(*one, strict=True), color="#A8A8A8", linewidth=0.8, marker=".", markersize=2)
        curve, name = mean_rewards(summary), "mean"
        clients = max(summary.clients, len(curves))
        key = f"thin: each of {clients} clients, bold: their mean"
        if ended_early(summary):
            key = f"thin: {clients} clients, bold: mean of those that got so far"
    else:
        curve, name = next(iter(curves.values()), []), "training"
        key = "of all graded attempts in a batch"
    head(axes, "Mean reward", key)
    if not curves:
        say_empty(axes, "no batch is done yet")
    end = max((step for one in curves.values() for step, _ in one), default=last) + 1
    labels = _draw_held_out(axes, summary, end)
    if curve:
        width, marker = (1.6, "") if len(curve) > DENSE else (2.2, "o")
        axes.plot(*zip(*curve, strict=True), color=REWARD, linewidth=width, marker=marker, markersize=3.2)
        step, value = curve[-1]
        beside = end if step == end - 1 and held_out(summary)[1] else step  # past the diamond
        labels.append(_Label(beside, value, f"{name} {value:.2f}", REWARD, bold=True))
    _draw_labels(axes, labels)


def _draw_held_out(axes: Axes, summary: RunSummary, end: int) -> list[_Label]:
    """Draw the rates as diamonds, hollow before the first step and full at step `end`; returns their labels."""
    before, after = held_out(summary)
    labels = []
    if before is not None:
        rate = before.rate
        axes.axhline(rate, color=HELD_OUT, linewidth=0.9, linestyle=(0, (2, 3)))
        axes.plot(0, rate, "D", color=HELD_OUT, markersize=5, markerfacecolor="white", markeredgewidth=1.4)
        edge = axes.get_xlim()[1]
        labels.append(_Label(0.98 * edge, rate, f"{before.split}\nbefore {rate:.2f}", HELD_OUT_TEXT))
    if after is not None:
        axes.plot(end, after.rate, "D", color=HELD_OUT, markersize=5.5)
        labels.append(_Label(end, after.rate, f"{after.split}\nafter {after.rate:.2f}", HELD_OUT_TEXT))
    return labels


def _draw_seconds(axes: Axes, summary: RunSummary) -> None:
    steps, parts = phase_seconds(summary)
    jobs = max(summary.clients, len(summary.steps))
    longest = max((sum(seconds) for seconds in zip(*parts.values(), strict=True)), default=0.0)
    unit, name = (60.0, "Minutes") if longest >= 300 else (1.0, "Seconds")
    key = f"by phase, mean of {jobs} clients" if jobs > 1 else "by phase; numbers: the last batch"
    head(axes, f"{name} a batch", key)
    if not steps:
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        say_empty(axes, status_line(summary) if summary.status in ENDED else summary.phase or "starting")
        return
    base = [0.0] * len(steps)
    labels = []
    edges = [steps[0] - 0.5, *(step + 0.5 for step in steps)]
    seam = 0.9 if len(steps) <= DENSE else 0.4  # white, between the bands, for eyes that see no colour
    for phase, seconds in parts.items():
        top = [b + s / unit for b, s in zip(base, seconds, strict=True)]
        axes.stairs(top, edges, baseline=base, fill=True, facecolor=PHASE_COLORS[phase], edgecolor="none")
        axes.stairs(top, edges, baseline=None, fill=False, color="white", linewidth=seam)
        middle = (base[-1] + top[-1]) / 2
        labels.append(
            _Label(edges[-1], middle, f"{phase} {seconds[-1] / unit:.1f}", INK, swatch=PHASE_COLORS[phase])
        )
        base = top
    axes.set_ylim(0, 1.08 * longest / unit or 1.0)
    _draw_labels(axes, labels)


def png_bytes(figure: Figure, description: str = "") -> bytes:
    """Return a figure as PNG; `description` is written into the file for those who don't see it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    metadata = {"Description": description} if description else {}
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None, **metadata})
    return buffer.getvalue()


@dataclass(frozen=True)
class Picture:
    """A figure as it is shown by a notebook where it is a cell's last value, with the words for those who don't see it."""

    png: bytes = field(repr=False)
    words: str
    width: int  # pixels on the page, at 96 an inch; the PNG has more
    height: int

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the PNG, and return where it is. Raises ValueError where the name tells of another format."""
        path = png_path(path)
        path.write_bytes(self.png)
        return path

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> tuple[dict[str, str], dict[str, Any]]:
        data = {"image/png": base64.b64encode(self.png).decode(), "text/plain": self.words}
        return data, {"image/png": {"alt": self.words, "width": self.width, "height": self.height}}


def picture(figure: Figure, words: str) -> Picture:
    """Draw a figure once. words: what it shows, written into the PNG too."""
    width, height = (round(96 * float(inches)) for inches in figure.get_size_inches())
    return Picture(png_bytes(figure, words), words, width, height)


def png_path(path: str | os.PathLike[str]) -> Path:
    """Return a path to write a PNG to. Raises ValueError where its ending tells of another format."""
    path = Path(path)
    if path.suffix.lower() not in ("", ".png"):
        raise ValueError(f"{path}: a figure is written as PNG: name a file that ends in .png")
    return path


def save_reward_time(folder: str | os.PathLike[str], path: str | os.PathLike[str] | None = None) -> Path:
    """Draw a run folder's figure into reward_time.png in it, or into `path`; returns where it is."""
    summary = summarise(Path(folder))
    path = Path(folder) / "reward_time.png" if path is None else png_path(path)
    with drawing:
        png = png_bytes(reward_time_figure(summary), alt_text(summary))
    path.write_bytes(png)
    return path
