"""One episode of a run, to be read: its issue, turns, patch, tests and tokens."""


class EpisodeViewer:
    """Being written."""
