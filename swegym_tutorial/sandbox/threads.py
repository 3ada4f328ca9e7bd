"""Work for several threads: done side by side, once for all who ask, or left to itself. Knows nothing of sandboxes."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Item = TypeVar("Item")


def fill(future: Future[Any], make: Callable[..., Any], *arguments: Any) -> None:
    """Call `make` and put what it returns or raises into the future."""
    try:
        future.set_result(make(*arguments))
    except BaseException as error:
        future.set_exception(error)


def in_threads(work: Callable[[Item], Value], items: Sequence[Item], at_once: int) -> Sequence[Future[Value]]:
    """Begin the work on each item, so many at once; return what becomes of each.

    An executor would refuse it while the interpreter ends, which is when sandboxes must be closed, and would not
    let the interpreter end before the work does.
    """
    futures: list[Future[Value]] = [Future() for _ in items]
    waiting = deque(zip(futures, items, strict=True))

    def main() -> None:
        while waiting:
            with contextlib.suppress(IndexError):  # another thread was quicker
                future, item = waiting.popleft()
                if future.set_running_or_notify_cancel():
                    fill(future, work, item)

    for _ in range(min(at_once, len(items))):
        threading.Thread(target=main, name="one of several calls", daemon=True).start()
    return futures


class Once(Generic[Key, Value]):
    """Values that are made once: by the first who asks, while the others wait. An error is not remembered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[Key, threading.Lock] = {}
        self._values: dict[Key, Value] = {}

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._values:
                self._values[key] = make()
            return self._values[key]


class Pending(Generic[Value]):
    """A call in a thread of its own, from begin() on, so that nobody has to wait for its end.

    changed: notified at its end; it is held neither during the call nor during `unwanted`, which is given what
    the call returned where nobody took it: what was made by then is not lost.
    """

    def __init__(
        self,
        call: Callable[[], Value],
        changed: threading.Condition,
        unwanted: Callable[[Value], object] = lambda result: None,
    ) -> None:
        self._call, self._changed, self._unwanted = call, changed, unwanted
        self._result: list[Value] = []
        self._error: BaseException | None = None
        self._given_up = False
        self.done = False

    def begin(self) -> None:
        """Begin the call. An interrupt may come in here too, after which it may go on: give_up() holds for that."""
        threading.Thread(target=self._main, name="a call that nobody has to wait for", daemon=True).start()

    def _main(self) -> None:
        try:
            self._result.append(self._call())
        except BaseException as error:
            self._error = error
        with self._changed:
            self.done = True
            self._changed.notify_all()
            given_up = self._given_up
        if given_up:
            self._discard()

    def take(self) -> Value:
        """Return what the call returned, or raise what it raised; once it is done."""
        if self._error is not None:
            raise self._error
        return self._result[0]

    def give_up(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._given_up = True
            unwanted = self.done and bool(self._result)
        if unwanted:  # in a thread of its own too: to unmake something may take as long as to make it
            threading.Thread(target=self._discard, name="what nobody wants", daemon=True).start()

    def _discard(self) -> None:
        for result in self._result:
            with contextlib.suppress(Exception):
                self._unwanted(result)
