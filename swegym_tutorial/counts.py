"""What goes on in a run right now, counted from its log: sandboxes that are open, and tokens a second."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping

# An attempt has a sandbox until it may be graded, and its grading another one until the verdict.
OPENING, CLOSING = ("rollout_start", "grading_start"), ("rollout_ready", "episode")
RATE_OVER = 300.0  # seconds


class OpenSandboxes:
    """Counts the attempts and gradings under way, from events that were read and from those that a reader skipped."""

    def __init__(self, skipped: Callable[[], Mapping[tuple[str, str], int]] = dict) -> None:
        """skipped: how many events were skipped so far, by name and job."""
        self._skipped = skipped
        self._read: Counter[tuple[str, str]] = Counter()
        self._gone: Counter[str] = Counter()  # job -> how many were open when it ended

    def see(self, name: str, job: str) -> None:
        """Take an event that was read."""
        self._read[name, job] += 1

    def forget(self, job: str | None = None) -> None:
        """A job has ended, or with None the process: what it had open is gone, and no event says so."""
        self._gone.update({job: self.of(job)} if job is not None else self._open())

    def of(self, job: str) -> int:
        return self._open().get(job, 0)

    def total(self) -> int:
        return sum(max(0, count) for count in self._open().values())

    def _open(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for table in (self._read, self._skipped()):
            for (name, job), count in table.items():
                counts[job] += count * ((name in OPENING) - (name in CLOSING))
        counts.subtract(self._gone)
        return dict(counts)


class TokenRate:
    """Sums up what came in over the last five minutes. Times in seconds since 1970."""

    def __init__(self) -> None:
        self._since = 0.0
        self._sum = 0
        self._recent: deque[tuple[float, int]] = deque()

    def begin(self, time: float) -> None:
        """Count from now on."""
        self._since, self._sum = time, 0
        self._recent.clear()

    def add(self, time: float, tokens: int) -> None:
        self._sum += tokens
        self._recent.append((time, tokens))
        self._forget(time)

    def a_second(self, now: float) -> float:
        self._forget(now)
        return self._sum / max(1.0, min(RATE_OVER, now - self._since))

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RATE_OVER:
            self._sum -= self._recent.popleft()[1]
