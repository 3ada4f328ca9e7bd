"""One attempt of a run, to be read: its issue, turns, patch, tests and tokens.

In the order of the data: `episodes` (which there are), `page` (all that is told of one), `parts` (taken apart for
people), `html_page` with its `style` and `text` (how it looks), `chooser` and `viewer` (in a notebook).
"""

from .viewer import EpisodeViewer

__all__ = ["EpisodeViewer"]
