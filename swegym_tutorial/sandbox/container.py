"""A running container of any kind, and one program in it whose end nobody has to wait for.

Knows threads; nothing of tasks, shells or any engine. docker.py and modal.py fill `Container` in.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from . import SandboxError

WORDS = 4096  # bytes of a program's stderr that are kept: its first, and its last


class Throttled(SandboxError):
    """The engine or service is too busy to start a container now; a later try may work."""


class NotStarted(SandboxError):
    """The engine refused to start a program: nothing of it ran, so it may be tried again."""


class Container(ABC):
    """One running container. fault() and remove() come from any thread at any time, also during a run()."""

    keep = "1"  # ids of the processes that are not a command's, with spaces between: see supervisor.others

    @abstractmethod
    def run(self, program: Sequence[str], env: Mapping[str, str], take: Callable[[int, bytes], None]) -> int:
        """Run a program to its end, as root with stdin empty; return its exit code, -1 where only its end is known.

        env is added to the container's environment. take(1, data) is given its stdout and take(2, data) its
        stderr as they come, in pieces of a few MB at most; what take raises ends the run. It may be called
        while another run goes on. One that never returns is left to its thread. Raises SandboxError where the
        engine fails or hangs up, and NotStarted where it is sure that nothing ran.
        """

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Write a file of any size at a free absolute path in an existing folder. Raises SandboxError."""

    @abstractmethod
    def unpack(self, archive: bytes) -> None:
        """Unpack a tar archive at the container's root, its files owned by root. Raises SandboxError."""

    @abstractmethod
    def fault(self) -> str | None:
        """Say why the container does not run, or cannot be asked; None where it runs."""

    @abstractmethod
    def remove(self) -> None:
        """End all in it and delete it; nothing where it is gone already. Raises SandboxError."""


class _Abandoned(Exception):
    """Nobody waits for this program any more."""


class Call:
    """One program in a container, run by a thread of its own: an engine that never answers holds nobody up.

    out: is given what the program writes to stdout. limit: bytes of both streams after which `flooded` is set.
    """

    def __init__(
        self,
        container: Container,
        program: Sequence[str],
        env: Mapping[str, str],
        out: Callable[[bytes], object],
        limit: int | None = None,
    ) -> None:
        self.head = self.words = b""  # the first and the last of what it wrote to stderr
        self.code: int | None = None
        self.error: BaseException | None = None
        self.started = False  # whether it wrote anything to stderr
        self.ended = False
        self.flooded = False
        self._container, self._program, self._env = container, program, env
        self._out, self._limit, self._size = out, limit, 0
        self._abandoned = False
        self._changed = threading.Condition()

    def start(self) -> None:
        threading.Thread(target=self._main, name="a program in a sandbox", daemon=True).start()

    def wait_for_start(self, seconds: float) -> None:
        """Return when it wrote to stderr, ended, flooded, was abandoned, or after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.started or self._over(), seconds)

    def wait(self, seconds: float, *, flooded: bool = False) -> bool:
        """Return when it ended, flooded (unless that is known), was abandoned, or after so many seconds."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.ended or self._abandoned or (self.flooded and not flooded), seconds
            )
            return self.ended

    def abandon(self) -> None:
        """Take nothing more from it, and wake up who waits for it."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def _over(self) -> bool:
        return self.ended or self.flooded or self._abandoned

    def _main(self) -> None:
        code, error = None, None
        try:
            code = self._container.run(self._program, self._env, self._take)
        except BaseException as raised:
            error = raised
        with self._changed:
            self.code, self.error, self.ended = code, error, True
            self._changed.notify_all()

    def _take(self, stream: int, data: bytes) -> None:
        with self._changed:
            if self._abandoned:
                raise _Abandoned
            if stream == 2:
                self.head += data[: WORDS - len(self.head)]
                self.words = (self.words + data)[-WORDS:]
                if not self.started:
                    self.started = True
                    self._changed.notify_all()
            else:
                self._out(data)
            self._size += len(data)
            if self._limit is not None and self._size > self._limit and not self.flooded:
                self.flooded = True
                self._changed.notify_all()
