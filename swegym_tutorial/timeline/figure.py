"""The figure of a timeline, and what it shows in words.

Rows share one axis of time: attempts, gradings, reference log-probabilities, and the trainer with its idle gaps. Up to
40 lanes each span is a bar; beyond them a row is an area, as high as spans go on at once. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..lines import duration
from ..plots import DPI, GREY, INK, RULE
from .rows import COLORS, DARK, VERSIONS, as_bars, draw_row, row_height, span_colors
from .spans import BUSY, Kind, Span, Timeline, union

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Transform

WIDTH, LEFT, RIGHT = 7.0, 1.13, 0.14  # inches, as all that follows
TOP, VERSIONS_ABOVE, BOTTOM, BETWEEN = 0.55, 0.23, 0.42, 0.07
TRAINER, TRAINERS = 0.27, 0.165  # the row's height for one job, and for each of several
IDLE = "#F1F1F1"
ROWS = {Kind.ROLLOUT: "Attempts", Kind.GRADING: "Grading", Kind.REFERENCE: "Reference"}


def timeline_figure(timeline: Timeline) -> Figure:
    """Draw a timeline. Of one job colours tell the policy's version, of several the job."""
    from matplotlib.figure import Figure

    rows = [kind for kind in ROWS if timeline.of(kind) or kind is not Kind.REFERENCE]
    heights = [row_height(timeline, kind) for kind in rows] + [_trainer_height(timeline)]
    top = TOP + (VERSIONS_ABOVE if _single(timeline) else 0)
    height = top + sum(heights) + BETWEEN * len(rows) + BOTTOM
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    figure.set_layout_engine("none")
    at = height - top
    panels = []
    for each in heights:
        box = (LEFT / WIDTH, (at - each) / height, 1 - (LEFT + RIGHT) / WIDTH, each / height)
        panels.append(figure.add_axes(box))
        at -= each + BETWEEN
    for axes in panels:
        _style(axes, timeline)
    for axes, kind in zip(panels, rows, strict=False):
        mean, _ = timeline.at_once(kind)
        _name_row(axes, ROWS[kind], f"{mean:.1f} at once" if mean < 10 else f"{mean:.0f} at once")
        draw_row(axes, timeline, kind)
    _draw_trainer(panels[-1], timeline)
    _draw_marks(panels, timeline)
    _draw_axis(panels[-1], timeline.seconds)
    head: dict[str, Any] = {"transform": figure.transFigure, "x": 0.08 / WIDTH, "va": "top"}
    panels[0].text(
        y=1 - 0.07 / height, s=title(timeline), fontsize=10.5, fontweight="bold", color=INK, **head
    )
    panels[0].text(y=1 - 0.29 / height, s=_key(timeline), fontsize=9, color=GREY, **head)
    return figure


def title(timeline: Timeline) -> str:
    """Say whose steps are shown and what share of the time the trainer is idle."""
    if not timeline.jobs:
        return "No client has begun yet"
    if not timeline.steps and not timeline.of(*BUSY):
        return f"{_whose(timeline)}: no batch is trained on yet"
    the = "its" if len(timeline.jobs) < timeline.clients else "the"
    return f"{_whose(timeline)}: {the} trainer is idle {timeline.idle_share:.0%} of the time"


def _whose(timeline: Timeline) -> str:
    who = timeline.jobs[0] if len(timeline.jobs) == 1 else f"{len(timeline.jobs)} clients"
    if not timeline.steps:
        return who
    so_far = " so far" if timeline.live else ""
    numbers = {job: [step.number for step in timeline.steps if step.job == job] for job in timeline.jobs}
    ranges = {job: (min(each), max(each)) for job, each in numbers.items() if each}
    low, high = max(ranges.values(), key=lambda one: one[1])
    if len(numbers) == 2 and len({ranges.get(job) for job in numbers}) == 2:
        told = (f"{job.removeprefix('train-')} {_from_to(ranges.get(job))}" for job in numbers)
        return f"{', '.join(told)}{so_far}"
    if len({ranges.get(job) for job in numbers}) > 1:
        return f"{who}, the fastest {_from_to((low, high))}{so_far}"
    steps = f"step {low}" if low == high else f"steps {low} to {high}"
    of = f" of {timeline.steps_done}" if high - low + 1 < timeline.steps_done else ""
    return f"{who}, {steps}{of}{so_far}"


def _from_to(steps: tuple[int, int] | None) -> str:
    if steps is None:
        return "no step"
    low, high = steps
    return f"step {low}" if low == high else f"steps {low}-{high}"


def _key(timeline: Timeline) -> str:
    if _single(timeline):
        colour = "policy version"
    else:
        colour = f"client, {''.join(timeline.jobs[:1]).removeprefix('train-') or 'the first'} on top"
    commands = "pale: sandbox; " if as_bars(timeline, Kind.ROLLOUT) else ""
    return f"colour: {colour}; {commands}grey: dropped groups; number: step; black: publishing"


def _single(timeline: Timeline) -> bool:
    return len(timeline.jobs) == 1


# -- The trainer --------------------------------------------------------------------------------------


def _trainer_height(timeline: Timeline) -> float:
    return TRAINER if _single(timeline) else max(TRAINER, TRAINERS * len(timeline.jobs))


def _draw_trainer(axes: Axes, timeline: Timeline) -> None:
    single, color, jobs = _single(timeline), span_colors(timeline), list(timeline.jobs)
    axes.set_ylim(max(len(jobs), 1), 0)
    _name_row(axes, "Trainer", f"idle {timeline.idle_share:.0%}")
    for start, end in timeline.idle():
        gap = axes.axvspan(start, end, facecolor=IDLE, edgecolor="#C9C9C9", hatch="////", linewidth=0)
        if hasattr(gap, "set_hatch_linewidth"):  # of matplotlib before 3.10 the reader's style decides it
            gap.set_hatch_linewidth(0.8)
    for span in timeline.of(*BUSY):
        fill = INK if span.kind is Kind.PUBLISHING else color(span)
        axes.barh(
            jobs.index(span.job) + 0.5, span.seconds, left=span.start, height=0.92 if single else 0.86,
            color=fill, linewidth=0,
        )  # fmt: skip
    _number_steps(axes, timeline)
    if single:
        _tell_gaps(axes, timeline)


def _room(timeline: Timeline, seconds: float) -> float:
    """Return how wide so many seconds are, in points."""
    return 72 * (WIDTH - LEFT - RIGHT) * seconds / timeline.seconds if timeline.seconds else 0.0


def _number_steps(axes: Axes, timeline: Timeline) -> None:
    """Write a step's number where it was trained on longest without a break, if there is room."""
    training: dict[tuple[str, str], list[Span]] = {}
    for span in timeline.of(Kind.TRAINING):
        training.setdefault((span.job, span.name), []).append(span)
    for (job, _), spans in training.items():
        text, color = str(spans[0].step), span_colors(timeline)(spans[0])
        start, end = max(union((s.start, s.end) for s in spans), key=lambda one: one[1] - one[0])
        if _room(timeline, end - start) > 6 * len(text) + 3:
            axes.text(
                (start + end) / 2, timeline.jobs.index(job) + 0.52, text, fontsize=9, fontweight="bold",
                color="white" if color in DARK else INK, ha="center", va="center",
            )  # fmt: skip


def _tell_gaps(axes: Axes, timeline: Timeline) -> None:
    for start, end in timeline.idle():
        text = f"idle {_short(end - start)}"
        if _room(timeline, end - start) > 5.2 * len(text) + 8:
            axes.text(
                (start + end) / 2, 0.52, text, fontsize=9, color=INK, ha="center", va="center",
                bbox={"facecolor": IDLE, "edgecolor": "none", "pad": 1.2},
            )  # fmt: skip


def _short(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 20 else duration(seconds)


# -- What all rows share ------------------------------------------------------------------------------


def _style(axes: Axes, timeline: Timeline) -> None:
    axes.set_facecolor("white")
    axes.set_xlim(0, timeline.seconds or 1.0)
    axes.grid(False)
    axes.set_yticks([])
    axes.minorticks_off()
    axes.tick_params(axis="x", bottom=False, labelbottom=False, top=False, labeltop=False, pad=3.5)
    axes.tick_params(axis="y", left=True, labelleft=True, right=False, labelright=False)
    for spine in axes.spines.values():
        spine.set(visible=True, color=RULE, linewidth=0.6)


def _name_row(axes: Axes, name: str, told: str) -> None:
    """Write left of a row what it is, and below that what it comes to."""
    from matplotlib.transforms import blended_transform_factory, offset_copy

    figure = axes.get_figure(root=True)
    assert figure is not None
    middle = blended_transform_factory(figure.transFigure, axes.transAxes)
    for text, points, color, weight in ((name, 6.5, INK, "bold"), (told, -6.0, GREY, "normal")):
        place = offset_copy(middle, figure, y=points, units="points")
        axes.text(
            0.08 / WIDTH, 0.5, text, fontsize=9, va="center", color=color, fontweight=weight, transform=place
        )


def _draw_marks(panels: Sequence[Axes], timeline: Timeline) -> None:
    """Draw lines where a policy was published, its version above, and where time was cut out."""
    if _single(timeline):
        for step in timeline.steps:
            for axes in panels:
                axes.axvline(step.end, color=INK, linewidth=0.7, linestyle=(0, (3, 2)))
        _name_versions(panels[0], timeline)
    backs = dict(timeline.backs)
    for at, seconds in timeline.cuts:
        said = (
            f"goes back to {_step_name(backs[at])}" if at in backs else f"{duration(seconds)} without a run"
        )
        for axes in panels:
            axes.axvline(at, color="white", linewidth=4)
            axes.axvline(at, color="#D55E00", linewidth=1.2, linestyle=":")
        panels[0].text(
            at, 0.02, f" {said}", fontsize=9, color="#A84A00",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 1},
            transform=panels[0].get_xaxis_transform(), va="bottom",
        )  # fmt: skip


def _step_name(number: int) -> str:
    return f"step {number}" if number else "the start"


def _name_versions(axes: Axes, timeline: Timeline) -> None:
    """Write above the rows which policy was the newest, from one publication to the next."""
    ends = [0.0, *(step.end for step in timeline.steps), timeline.seconds]
    newest = max((span.version for span in timeline.of(Kind.ROLLOUT)), default=0)
    last = timeline.steps[-1].version if timeline.steps else newest
    versions = [*(step.version - 1 for step in timeline.steps), last]
    place = axes.get_xaxis_transform()
    style: dict[str, Any] = {"fontsize": 9, "color": INK, "va": "bottom", "annotation_clip": False}
    if timeline.of(Kind.ROLLOUT):
        axes.annotate(
            "Policy", (0.08 / WIDTH, 1.0), xycoords=("figure fraction", "axes fraction"), xytext=(0, 6),
            textcoords="offset points", fontweight="bold", **style,
        )  # fmt: skip
    for (start, end), version in zip(pairwise(ends), versions, strict=True):
        if _room(timeline, end - start) > 6 * len(str(version)) + 4:
            axes.annotate(
                str(version), ((start + end) / 2, 1.0), xycoords=place, xytext=(0, 6),
                textcoords="offset points", ha="center", **style,
            )  # fmt: skip
        axes.plot(
            [start, end], [1, 1], color=COLORS[version % VERSIONS], linewidth=3, clip_on=False,
            transform=_above(axes, 4.0), solid_capstyle="butt",
        )  # fmt: skip


def _above(axes: Axes, points: float) -> Transform:
    """Return the place so many points above a row: x in its data, y 1."""
    from matplotlib.transforms import offset_copy

    top = axes.get_xaxis_transform()
    return offset_copy(top, axes.get_figure(root=True), y=points, units="points")


def _draw_axis(axes: Axes, seconds: float) -> None:
    """Write the time below, in round numbers of the unit that suits it."""
    from matplotlib.ticker import MaxNLocator

    unit, name = (
        (1.0, "seconds") if seconds < 600 else (60.0, "minutes") if seconds < 6 * 3600 else (3600.0, "hours")
    )
    values = MaxNLocator(nbins=9, steps=[1, 2, 5, 10]).tick_values(0, seconds / unit)
    shown = [value for value in values if 0 <= value * unit <= seconds]
    axes.set_xticks([value * unit for value in shown], [f"{value:g}" for value in shown])
    axes.tick_params(
        axis="x", bottom=True, labelbottom=True, labelsize=9, color=RULE, labelcolor=INK, length=3
    )
    axes.set_xlabel(name, fontsize=9, color=INK, labelpad=1, fontweight="normal")


def timeline_words(timeline: Timeline) -> str:
    """Say in a few sentences what the figure shows."""
    told = [f"Timeline of {duration(timeline.seconds)}. {title(timeline)}."]
    for _, step in timeline.backs:
        told.append(f"The run goes back to {_step_name(step)}; what it had done after that is left out.")
    for kind, name in ROWS.items():
        mean, most = timeline.at_once(kind)
        if most:
            told.append(f"{name}: {mean:.1f} at once on average, {most} at most.")
    if timeline.of(Kind.ROLLOUT) and timeline.of(*BUSY):
        both = timeline.overlap(Kind.ROLLOUT, Kind.TRAINING)
        told.append(
            f"Attempts went on during {_share(both, timeline.busy(Kind.TRAINING))} of the training time."
        )
    return " ".join(told)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "none"
