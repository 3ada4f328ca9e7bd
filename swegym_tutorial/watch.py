"""What is being waited for at the training server, why, and for how long: told in the log while it lasts.

The SDK waits for a server that pauses or is gone without a word. Here every call that waits is known; where one
takes longer than usual the server is asked how it is, and what it says is logged as `waiting`, until it is over.
Knows nothing of what the calls do.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

SLOW = 15.0  # seconds after which the server is asked how it is
PENDING = 900.0  # seconds after which a call is told of though the server is well
ASK_EVERY = 10.0  # seconds between two questions
LOOK_EVERY = 1.0  # and between two looks at what waits
TELL_EVERY = 30.0  # seconds between two lines on one trouble, growing with its age
FRESH = 90.0  # seconds for which a warning of the SDK's explains the waiting


@dataclass
class WaitingCall:
    """One call to the server, with all its tries."""

    what: str
    since: float  # by time.monotonic()
    reason: str = ""  # what the last try failed of

    def hear(self, reason: str) -> None:
        self.reason = _short(reason)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Take it for no waiting while its caller waits for something else; then its age and reason count anew."""
        self.since = math.inf
        try:
            yield
        finally:
            self.since, self.reason = time.monotonic(), ""


def _short(reason: str) -> str:
    return " ".join(reason.split())[:500]


class Watch:
    """Logs what takes long at the server. Safe for many threads; close() ends its own."""

    def __init__(
        self,
        log: Callable[..., None],
        ask: Callable[[], str | None],
        *,
        slow: float = SLOW,
        ask_every: float = ASK_EVERY,
        look_every: float = LOOK_EVERY,
    ) -> None:
        """log: of a run folder. ask: says what ails the server, or None where it answers; may take seconds."""
        self._log, self._ask = log, ask
        self._slow, self._ask_every, self._look_every = slow, ask_every, look_every
        self._calls: dict[int, WaitingCall] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._heard: tuple[float, str] | None = None  # the last warning
        self._over = threading.Event()
        self.thread: threading.Thread | None = None
        self._warnings = _Warnings(self.hear)
        self._told: tuple[float, str] | None = None  # when something was last told, and what
        self._began = 0.0

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[WaitingCall]:
        """Mark a call, with all its tries; what each try failed of is for its `hear`."""
        with self._lock:
            if self.thread is None and not self._over.is_set():
                self.thread = threading.Thread(target=self._look, name="server-watch", daemon=True)
                self.thread.start()
                logging.getLogger("tinker").addHandler(self._warnings)
            number = next(self._numbers)
            call = self._calls[number] = WaitingCall(what, time.monotonic())
        try:
            yield call
        finally:
            with self._lock:
                del self._calls[number]

    def hear(self, reason: str) -> None:
        """Take note of a warning that may concern any call."""
        with self._lock:
            self._heard = (time.monotonic(), _short(reason))

    def close(self) -> None:
        """End the thread; returns at once."""
        self._over.set()
        logging.getLogger("tinker").removeHandler(self._warnings)

    def join(self, timeout: float) -> None:
        if self.thread is not None:
            self.thread.join(timeout)

    def _look(self) -> None:
        asked, ails = -math.inf, None
        while not self._over.wait(self._look_every):
            with self._lock:
                oldest = min(self._calls.values(), key=lambda call: call.since, default=None)
            age = time.monotonic() - oldest.since if oldest else 0.0
            if oldest is None or age < self._slow:
                self._tell_over()
                continue
            if time.monotonic() - asked >= self._ask_every:
                ails = self._ask()
                asked = time.monotonic()
            reason = ails or oldest.reason or self._warning()
            if reason is None and age >= PENDING:
                reason = "the server answers, and the call is still pending"
            if reason is None:
                self._tell_over()
            else:
                self._tell(oldest.what, age, reason)

    def _warning(self) -> str | None:
        with self._lock:
            heard = self._heard
        return heard[1] if heard and time.monotonic() - heard[0] < FRESH else None

    def _tell(self, what: str, age: float, reason: str) -> None:
        now = time.monotonic()
        if self._told is None:
            self._began = now - age
        elif reason == self._told[1] and now - self._told[0] < max(TELL_EVERY, age / 10):
            return
        self._told = (now, reason)
        self._say("waiting", what=what, seconds=round(age, 1), reason=reason)

    def _tell_over(self) -> None:
        if self._told is not None:
            self._told = None
            self._say("waiting_over", seconds=round(time.monotonic() - self._began, 1))

    def _say(self, event: str, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk: whoever works finds out
            self._log(event, **fields)


def ailment(url: str, key: str) -> str | None:
    """Ask a Tinker-compatible server how it is: what ails it, or None where it answers. Blocks for some seconds."""
    import httpx

    address = f"{url.rstrip('/')}/api/v1/get_server_capabilities"
    try:
        answer = httpx.get(address, headers={"X-API-Key": key}, timeout=10.0, follow_redirects=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"no answer from {url}: {str(error) or type(error).__name__}"
    if answer.status_code >= 500 or answer.status_code in (402, 408, 429):
        return f"{url} answers {answer.status_code}: {' '.join(answer.text.split())[:200]}"
    return None


class _Warnings(logging.Handler):
    """Hears what the SDK warns of, such as a queue that the server has paused."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._hear = hear

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        # The first is said at each look at an answer that is not there yet; the second is nobody's concern.
        if "try_again" not in text and "telemetry" not in text:
            self._hear(text)
