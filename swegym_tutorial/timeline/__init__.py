"""What went on at the same time in a run, read from its log alone, as numbers and as a figure.

`log` pairs a log's lines, `spans` puts them on one clock and counts, `rows` and `figure` draw them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .spans import BUSY, Kind, Span, Step, Timeline, read_spans, total, union

if TYPE_CHECKING:
    from ..plots import Picture

__all__ = ["BUSY", "Kind", "Span", "Step", "Timeline", "read_spans", "timeline", "total", "union"]


def timeline(
    folder: str | os.PathLike[str],
    job: str | None = None,
    first: int | None = None,
    last: int | None = None,
) -> Picture:
    """Draw what went on at the same time in a run; arguments and errors as of `read_spans`."""
    from ..plots import drawing, picture
    from .figure import timeline_figure, timeline_words

    read = read_spans(folder, job, first, last)
    with drawing:
        return picture(timeline_figure(read), timeline_words(read))
