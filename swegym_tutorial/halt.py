"""Telling work to end: an event that sets the events below it.

A run has one, each of its clients one below it, so that a stop of the run reaches every call that waits, and the end
of one client its own calls only. Knows nothing of what is waited for.
"""

from __future__ import annotations

import threading
import weakref


class Stopped(Exception):
    """The work was told to end while it waited."""


class OutOfTime(Exception):
    """The run's hours are over."""


class HoursOver(RuntimeError):
    """The run's hours were over before a job had anything to show."""


class Halt(threading.Event):
    """An event that also sets all its children. Safe for many threads."""

    def __init__(self) -> None:
        super().__init__()
        self._children: weakref.WeakSet[Halt] = weakref.WeakSet()
        self._guard = threading.Lock()

    def child(self) -> Halt:
        """Return a new one, which is set when this one is, and can be set alone."""
        made = Halt()
        with self._guard:
            self._children.add(made)
        if self.is_set():
            made.set()
        return made

    def set(self) -> None:
        super().set()
        with self._guard:
            children = list(self._children)
        for child in children:
            child.set()
