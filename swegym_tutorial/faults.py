"""Whether infrastructure faults have become the rule: how many of a client's last attempts they took, and for how long.

Single faults cost an attempt; a trouble that passes is waited out, with longer pauses the more attempts it takes;
one that lasts ends the client, with the commonest reasons. Knows nothing of what an attempt is.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque

from .config import TrainingConfig

LONGEST_PAUSE = 60.0  # seconds between two tries
FEWEST = 8  # attempts that say something


class TooManyFaults(RuntimeError):
    """Most of a client's last attempts were lost to infrastructure faults; the text names the commonest."""


class Faults:
    """The last attempts of one client. Safe for many threads."""

    def __init__(self, job: str, config: TrainingConfig) -> None:
        self._job, self._config = job, config
        self._last: deque[str | None] = deque(maxlen=config.fault_window)  # why it was lost, or None
        self._lock = threading.Lock()
        self._since: float | None = None  # when the share passed the limit
        self._streak = 0  # attempts lost since the last one that was not

    def ended(self) -> None:
        """An attempt came to its end."""
        self._note(None)

    def lost(self, reason: str) -> None:
        """An attempt was lost. Raises TooManyFaults where that has been the rule for too long."""
        self._note(reason)
        with self._lock:
            minutes = 0.0 if self._since is None else (time.monotonic() - self._since) / 60
            if self._since is not None and minutes >= self._config.fault_minutes:
                raise TooManyFaults(self._told(minutes))

    def pause(self, tries: int) -> float:
        """Return how many seconds to wait before the next try: longer while attempts are lost in a row."""
        with self._lock:
            doublings = min(tries + self._streak // 4, 10)
        return min(LONGEST_PAUSE, 2.0**doublings) * random.uniform(0.5, 1.0)

    def _note(self, reason: str | None) -> None:
        with self._lock:
            self._last.append(reason)
            self._streak = 0 if reason is None else self._streak + 1
            lost = sum(why is not None for why in self._last)
            few = len(self._last) < min(self._config.fault_window, FEWEST)
            if few or lost <= self._config.max_fault_share * len(self._last):
                self._since = None
            elif self._since is None:
                self._since = time.monotonic()

    def _told(self, minutes: float) -> str:
        reasons = Counter(why for why in self._last if why is not None)
        commonest = "; ".join(f"{count} x {why}" for why, count in reasons.most_common(3))
        return (
            f"{self._job}: {reasons.total()} of the last {len(self._last)} attempts were lost to infrastructure "
            f"faults, and for {minutes:.0f} min more than {self._config.max_fault_share:.0%} were. Commonest: "
            f"{commonest}. Mend the cause and go on with --resume; max_fault_share and fault_minutes are the limits"
        )
