"""Work for several threads: done side by side, or once for all who ask. Knows nothing of sandboxes."""

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
