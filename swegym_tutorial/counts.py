"""What goes on in a run right now, counted from its log: sandboxes that are open, and tokens a second."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping

# An attempt has a sandbox until it may be graded, and its grading another one until the verdict.
OPENING, CLOSING = ("rollout_start", "grading_start"), ("rollout_ready", "episode")
RATE_OVER = 300.0  # seconds


class OpenSandboxes:
    """Counts the attempts and gradings under way, from events that were read and from those that a reader skipped."""

    def __init__(self, skipped: Callable[[], Mapping[tuple[str, str, str], int]] = dict) -> None:
        """skipped: how many events were skipped so far, by name, phase and job."""
        self._skipped = skipped
        self._read: Counter[tuple[str, str, str]] = Counter()
        # How many were open in a phase of a job when that ended; verdicts may still come, of training in an evaluation.
        self._gone: Counter[tuple[str, str]] = Counter()

    def see(self, name: str, phase: str, job: str) -> None:
        """Take an event that was read."""
        self._read[name, phase, job] += 1

    def forget(self, job: str | None = None) -> None:
        """A job has ended, or with None the process: what it had open is gone, and no event says so."""
        self._gone.update({key: count for key, count in self._open().items() if job in (None, key[1])})

    def of(self, job: str) -> int:
        return sum(max(0, count) for (_, each), count in self._open().items() if each == job)

    def total(self) -> int:
        return sum(max(0, count) for count in self._open().values())

    def _open(self) -> dict[tuple[str, str], int]:
        counts: Counter[tuple[str, str]] = Counter()
        for table in (self._read, self._skipped()):
            for (name, phase, job), count in table.items():
                counts[phase, job] += count * ((name in OPENING) - (name in CLOSING))
        counts.subtract(self._gone)
        return dict(counts)


class TokenRate:
    """Sums up what came in over the last five minutes. Times in seconds since 1970."""

    def __init__(self) -> None:
        self._since = self._last = 0.0
        self._sum = 0
        self._recent: deque[tuple[float, int]] = deque()

    def begin(self, time: float) -> None:
        """Count from now on."""
        self._since, self._sum = time, 0
        self._recent.clear()

    def add(self, time: float, tokens: int) -> None:
        self._sum, self._last = self._sum + tokens, time
        self._recent.append((time, tokens))
        self._forget(time)

    def a_second(self, now: float) -> float:
        """Return the mean until now, or until what came last where the reader's clock is behind that."""
        now = max(now, self._last)
        self._forget(now)
        return self._sum / max(1.0, min(RATE_OVER, now - self._since))

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RATE_OVER:
            self._sum -= self._recent.popleft()[1]
