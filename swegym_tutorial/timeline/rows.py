"""One row of a timeline's figure: bars in lanes, or an area where there would be too many.

Of one job a colour tells the policy's version, of several the job; grey is what belongs to groups that were dropped.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..plots import GREY, RULE
from .spans import Kind, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LANES = {Kind.ROLLOUT: 40, Kind.GRADING: 16, Kind.REFERENCE: 16}  # beyond which bars would be too thin
BARS = 20_000  # beyond which drawing them takes seconds
BINS = 560  # of an area, from left to right
LANE, THIN_LANE, AREA = 0.075, 0.045, 1.2  # inches
DROPPED = "#B4B4B4"
# Okabe and Ito's colours, light and dark in turn, so that neighbours differ for eyes that see no colour.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#777777", "#F0E442")
DARK = ("#0072B2", "#009E73", "#D55E00", "#777777")  # those that white text can be read on
VERSIONS = 4  # colours that the policy's versions take in turn


def lanes(spans: Sequence[Span]) -> list[int]:
    """Return a lane for each of these spans, which are in the order of their starts; none overlap in a lane."""
    free: list[int] = []
    taken: list[tuple[float, int]] = []  # until when, lane
    found = []
    for span in spans:
        while taken and taken[0][0] <= span.start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        lane = heapq.heappop(free) if free else len(taken)
        heapq.heappush(taken, (span.end, lane))
        found.append(lane)
    return found


def _job_lanes(timeline: Timeline, kind: Kind) -> tuple[list[Span], list[int], int]:
    """Return the spans of a kind, a lane for each, and how many lanes there are; each job has its own ones."""
    spans: list[Span] = []
    found: list[int] = []
    count = 0
    for job in timeline.jobs:
        mine = [span for span in timeline.of(kind) if span.job == job]
        places = lanes(mine)
        spans += mine
        found += [count + place for place in places]
        count += max(places, default=-1) + 1
    return spans, found, count


def as_bars(timeline: Timeline, kind: Kind) -> bool:
    """Whether a row has few enough lanes and spans to show each span."""
    spans, _, count = _job_lanes(timeline, kind)
    return count <= LANES[kind] and len(spans) <= BARS


def row_height(timeline: Timeline, kind: Kind) -> float:
    _, _, count = _job_lanes(timeline, kind)
    if not as_bars(timeline, kind):
        return AREA if kind is Kind.ROLLOUT else AREA / 2
    return max(0.29, count * (LANE if count <= 16 else THIN_LANE))


def draw_row(axes: Axes, timeline: Timeline, kind: Kind) -> None:
    """Draw all spans of a kind."""
    if as_bars(timeline, kind):
        _draw_bars(axes, timeline, kind)
    else:
        _draw_area(axes, timeline, kind)


def _draw_bars(axes: Axes, timeline: Timeline, kind: Kind) -> None:
    """Draw each span as a bar; an attempt's is pale where it isn't sampling."""
    from matplotlib.collections import PolyCollection

    spans, places, count = _job_lanes(timeline, kind)
    color = span_colors(timeline)
    boxes = [(s.start, s.end, lane) for s, lane in zip(spans, places, strict=True)]
    colors: list[Any] = [DROPPED if _dropped(s) else color(s) for s in spans]
    if kind is Kind.ROLLOUT:
        colors = [pale(each) for each in colors]
        lane_of = {(s.job, s.name, s.start): lane for s, lane in zip(spans, places, strict=True)}
        starts = sorted(lane_of)
        for part in timeline.of(Kind.SAMPLING):
            lane = _lane_at(starts, lane_of, part)
            if lane is not None:
                boxes.append((part.start, part.end, lane))
                colors.append(DROPPED if _dropped(part) else color(part))
    corners = [[(a, n + 0.08), (b, n + 0.08), (b, n + 0.92), (a, n + 0.92)] for a, b, n in boxes]
    axes.add_collection(PolyCollection(corners, facecolors=colors, edgecolors="none"))
    axes.set_ylim(max(count, 1), 0)


def _lane_at(
    starts: list[tuple[str, str, float]], lane_of: dict[tuple[str, str, float], int], part: Span
) -> int | None:
    """Return the lane of the attempt that a span is a part of."""
    place = bisect.bisect_right(starts, (part.job, part.name, part.start)) - 1
    if place < 0 or starts[place][:2] != (part.job, part.name):
        return None
    return lane_of[starts[place]]


def _dropped(span: Span) -> bool:
    return span.fate not in ("", "kept")


def pale(color: str) -> tuple[float, float, float]:
    """Return a colour mixed with white, two parts in three."""
    from matplotlib.colors import to_rgb

    red, green, blue = (1 - 0.36 * (1 - value) for value in to_rgb(color))
    return red, green, blue


def span_colors(timeline: Timeline) -> Callable[[Span], str]:
    if len(timeline.jobs) == 1:
        return lambda span: COLORS[span.version % VERSIONS]
    places = {job: n for n, job in enumerate(timeline.jobs)}
    return lambda span: COLORS[places[span.job] % len(COLORS)]


def _draw_area(axes: Axes, timeline: Timeline, kind: Kind) -> None:
    """Draw how many spans went on at once: of each colour a band, and those of dropped groups on top."""
    _, most = timeline.at_once(kind)
    edges = np.linspace(0.0, timeline.seconds, BINS + 1)
    color = span_colors(timeline)
    bands: dict[str, list[Span]] = {}
    for span in timeline.of(kind):
        bands.setdefault(DROPPED if _dropped(span) else color(span), []).append(span)
    base = np.zeros(BINS)
    for each in sorted(bands, key=lambda c: (c == DROPPED, COLORS.index(c) if c in COLORS else 0)):
        top = base + in_flight(bands[each], edges)
        axes.stairs(top, edges, baseline=base, fill=True, facecolor=each, edgecolor="none")
        base = top
    ceiling = max(1.0, float(base.max()), float(most))
    axes.set_ylim(0, 1.05 * ceiling)
    axes.set_yticks([0, most])
    axes.tick_params(axis="y", labelsize=9, labelcolor=GREY, color=RULE, length=2, pad=2)


def in_flight(spans: Sequence[Span], edges: np.ndarray) -> np.ndarray:
    """Return how many spans went on, averaged over each bin. edges: float, shape (bins + 1,), evenly spaced."""
    width = edges[1] - edges[0]
    # The seconds that spans have taken until each edge: each adds a slope of 1 from its start to its end.
    starts = np.sort([span.start for span in spans])
    ends = np.sort([span.end for span in spans])

    def taken(times: np.ndarray) -> np.ndarray:
        sums = np.concatenate([[0.0], np.cumsum(times)])
        before = np.searchsorted(times, edges, side="right")
        return before * edges - sums[before]

    return np.diff(taken(starts) - taken(ends)) / width
