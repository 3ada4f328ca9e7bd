"""Calls to the training server: how their answers are waited for, and what kind of trouble an error is.

The `tinker` SDK tries lost connections and busy servers again by itself, some of them for ever; what it gives up, and
what a server refuses, is told apart here. Knows nothing of adapters or of training.
"""

from __future__ import annotations

import concurrent.futures
import random
import re
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from .halt import Stopped

CALL_TIMEOUT = 7200.0  # seconds for one call to the server; a cold start takes long
LONGEST_PAUSE = 60.0  # seconds between two tries


class Trouble(StrEnum):
    """What an error says of the next try."""

    LOST = "lost"  # no answer, or the server is down or busy: another try may work
    FAILED = "failed"  # the server failed at this request: another try may work, or not
    GONE = "gone"  # the server does not know what the request names: a fresh session may help
    REFUSED = "refused"  # the request itself is wrong


class PolicyError(RuntimeError):
    """The training server failed or refused; an infrastructure fault. The text says what it was asked for."""

    def __init__(self, text: str, trouble: Trouble = Trouble.FAILED) -> None:
        super().__init__(text)
        self.trouble = trouble


def wait(future: Any, halt: threading.Event, what: str, timeout: float = CALL_TIMEOUT) -> Any:
    """Wait for a future of the SDK's, and leave at once when `halt` is set; what is left undone is cancelled.

    Raises PolicyError with the server's words, or that it didn't answer in time; Stopped after `halt`.
    """
    inner = _inner(future)
    deadline = time.monotonic() + timeout
    while not inner.done():
        if halt.is_set():
            inner.cancel()
            raise Stopped(what)
        if time.monotonic() > deadline:
            inner.cancel()
            raise PolicyError(f"{what}: the server did not answer within {timeout:.0f} s", Trouble.LOST)
        concurrent.futures.wait([inner], timeout=0.2)
    return translated(inner.result, what)


def is_done(future: Any) -> bool:
    """Whether the answer is there, or an error."""
    return bool(_inner(future).done())


def when_done(future: Any, call: Callable[[], None]) -> None:
    """Have a call made when the answer is there, from a thread of the SDK's; none is made for an error."""

    def done(inner: concurrent.futures.Future[Any]) -> None:
        if not inner.cancelled() and inner.exception() is None:
            call()

    _inner(future).add_done_callback(done)


def cancel(future: Any) -> None:
    """Have the SDK ask no more for an answer that nobody waits for."""
    _inner(future).cancel()


def _inner(future: Any) -> concurrent.futures.Future[Any]:
    return future.future() if hasattr(future, "future") else future  # the SDK's own, or a plain one


def in_thread(call: Any, halt: threading.Event, what: str, timeout: float) -> Any:
    """Run a call that blocks in a thread of its own, so that stopping isn't held up by it; see wait()."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def work() -> None:
        future.set_running_or_notify_cancel()
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="policy-call", daemon=True).start()
    return wait(future, halt, what, timeout)


def translated(call: Callable[[], Any], what: str) -> Any:
    """Return what the call returns; what it raises becomes a PolicyError that says what was asked."""
    try:
        return call()
    except (PolicyError, Stopped):
        raise
    except (Exception, concurrent.futures.CancelledError) as error:
        raise PolicyError(f"{what}: {type(error).__name__}: {error}", kind_of(error)) from error


def kind_of(error: BaseException) -> Trouble:
    """Tell what an error of the SDK's, or of the connection, says of the next try."""
    import tinker
    from tinker.types import RequestErrorCategory

    if isinstance(error, tinker.APIStatusError):
        if error.status_code in (402, 408, 409, 410, 429) or error.status_code >= 500:
            return Trouble.LOST
        return Trouble.GONE if error.status_code == 404 else Trouble.REFUSED
    if isinstance(error, tinker.RequestFailedError) and error.category is not RequestErrorCategory.User:
        return Trouble.FAILED
    if isinstance(error, (tinker.APIConnectionError, OSError, TimeoutError)):
        return Trouble.LOST
    if type(error).__name__ in ("RetryableException", "CancelledError"):  # the SDK's own, and asyncio's
        return Trouble.LOST
    # What is found out only while the work is done comes as a text alone; a wrong guess costs a few tries.
    return Trouble.GONE if _GONE.search(str(error)) else Trouble.REFUSED


_GONE = re.compile(r"unknown|not found|does not exist|\bgone\b|expired|\bended\b|status 404", re.IGNORECASE)


def pause(tries: int) -> float:
    """Return how many seconds to wait after so many tries: doubled each time up to a minute, give or take a half."""
    return min(LONGEST_PAUSE, 2.0 ** min(tries, 10) / 2) * random.uniform(0.5, 1.0)
