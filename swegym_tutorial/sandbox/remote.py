"""What the backends share whose sandboxes are containers of an engine or service: openings, images, closing.

A kind (docker.py, modal.py) provides:
- a `Container` (container.py): one running container, in which root has /bin/bash, git, coreutils and /proc;
- a subclass of `RemoteBackend` with `_fetch` (make an image ready), `_start` (start a container of it with
  supervisor.keeper(lifetime) as its program), `_why_missing` (ask for an image), and, where the kind can or must,
  `_sweep` and `_let_go`. `_start` raises Throttled where the engine is busy and a later try may work.
The commands are contained.py's. Knows tasks, threads and patience; nothing of any engine.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from ..config import TrainingConfig
from ..tasks import Task
from . import CLOSING, BackendClosed, SandboxError
from .contained import RemoteSandbox
from .container import Container, Throttled
from .files import HOME
from .prepared import BASE, environment_after, repository_archive, reset
from .threads import Once, Pending, fill, in_threads

STARTS = 6  # tries to start a container where the engine is busy
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 20.0  # seconds before the second try, doubled each time; give or take half
ASKED_AT_ONCE = 8  # images that are asked for at the same time
CLOSED_AT_ONCE = 64

Result = TypeVar("Result")


class RemoteBackend(ABC):
    """Opens sandboxes in containers for one run, at most config.sandbox_starts of them at the same time.

    A task with an image gets the repository that the image has at /testbed, reset to base_commit and cleaned;
    the user and HOME are the image's. A task with files gets them as a repository in the kind's own image, with
    the HOME of the local sandbox. A task's set-up is run once an image: the environment that it makes (not its
    shell functions, unless exported) is every command's, so that no command pays for an activation.
    """

    name: str
    start_patience: float | None = None  # seconds for a start, where the kind has no limit of its own
    left_over = "what is left ends with its lifetime"  # what becomes of that which close() could not end

    def __init__(self, config: TrainingConfig, run: str, say: Callable[[str], None]) -> None:
        self.config, self.run, self.say = config, run, say
        self._lock = threading.Condition()
        self._opening = self._starting = 0
        self._closed = False
        self._sandboxes: set[RemoteSandbox] = set()
        self._images: dict[str, Future[Any]] = {}
        self._archives: Once[Hashable, bytes] = Once()
        self._environments: Once[tuple[str, str], Mapping[str, str]] = Once()

    @property
    def closed(self) -> bool:
        return self._closed

    @abstractmethod
    def _fetch(self, image: str, task: Task) -> Any:
        """Make an image ready and return it as `_start` takes it; "" is the kind's own, for tasks with files.

        Called once an image, in a thread that a close() leaves alone; after an error again for the next who
        needs it. Raises SandboxError that names the image and the task.
        """

    @abstractmethod
    def _start(self, image: Any, task: Task) -> Container:
        """Start a container with the limits in the settings. Raises SandboxError, Throttled where it is busy.

        Called in a thread of its own, that nobody may wait for. Whatever it raises, it leaves no container behind.
        """

    @abstractmethod
    def _why_missing(self, image: str) -> str | None:
        """Ask whether an image can be had, without fetching it; return why not, or None where it can.

        Raises SandboxError where whoever has the images does not answer.
        """

    def _sweep(self) -> bool:
        """End what is left of this backend, and return True; False where the kind cannot find it.

        Called once, after the sandboxes. Raises SandboxError.
        """
        return False

    def _let_go(self, gone: bool) -> None:  # noqa: B027 (a kind may keep nothing)
        """Give back what the kind itself keeps. Called once, last of all; gone: nothing is left running."""

    def open(self, task: Task) -> RemoteSandbox:
        """Return a fresh sandbox with the task's repository at base_commit; see the protocol."""
        if not task.image and not task.files:
            raise SandboxError(f"{task.instance_id} brings neither an image nor files")
        with self._open_one():
            image = self._image_of(task)
            archive = b"" if task.image else self._archive(task)
            with self._slot():
                sandbox = self._start_patiently(image, task)
                try:
                    self._prepare(sandbox, task, archive)
                except BaseException as error:
                    if isinstance(error, SandboxError):
                        self._check_open()  # closed: close() ends it
                    with contextlib.suppress(SandboxError):
                        sandbox.close()
                    raise
                return sandbox

    def missing(self, tasks: Sequence[Task]) -> dict[str, str]:
        """Find the tasks that cannot be opened here; see the protocol.

        An image of which nobody can say whether it is there counts as missing, unless that is so of all.
        """
        images = list(dict.fromkeys(task.image for task in tasks if task.image))
        futures = in_threads(self._why_missing, images, ASKED_AT_ONCE)
        why: dict[str, str | None] = {}
        unasked: list[SandboxError] = []
        try:
            for image, future in zip(images, futures, strict=True):
                try:
                    why[image] = future.result()
                except SandboxError as error:
                    why[image] = str(error)
                    unasked.append(error)
        finally:
            for future in futures:  # an interrupt waits for no image
                future.cancel()
        if unasked and len(unasked) == len(images):
            raise unasked[0]
        found = {task.instance_id: why.get(task.image) for task in tasks}
        found |= {
            task.instance_id: "it brings neither an image nor files"
            for task in tasks
            if not task.image and not task.files
        }
        return {name: reason for name, reason in found.items() if reason}

    def close(self) -> None:
        """Close every sandbox, wait for those being started, and end the rest; see the protocol."""
        end = time.monotonic() + CLOSING
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lock.notify_all()
            sandboxes = list(self._sandboxes)
        for sandbox in sandboxes:
            sandbox.end()
        closed = in_threads(RemoteSandbox.close, sandboxes, CLOSED_AT_ONCE)
        wait(closed, max(0.0, end - time.monotonic()))
        with self._lock:
            started = self._lock.wait_for(lambda: self._opening == 0, max(0.0, end - time.monotonic()))
        (swept,) = in_threads(lambda sweep: sweep(), [self._sweep], 1)
        wait([swept], max(1.0, end - time.monotonic()))
        failures = [why for each in closed if (why := _failure(each))]
        nothing_left = _failure(swept) is None and swept.result()
        gone = started and (nothing_left or not failures)
        self._let_go(gone)
        if not gone:
            why = failures[0] if failures else "some are still being started"
            raise SandboxError(
                f"{len(failures)} of {len(sandboxes)} sandboxes were not ended within {CLOSING:.0f} s ({why}); {self.left_over}"
            )

    def _image_of(self, task: Task) -> Any:
        """Fetch an image, or wait for who fetches it already; close() ends the waiting, not the fetching."""
        with self._lock:
            future = self._images.get(task.image)
            if future is None or (future.done() and future.exception()):
                future = self._images[task.image] = Future()
                fetch = (future, self._fetch, task.image, task)
                threading.Thread(target=fill, args=fetch, name="fetch an image", daemon=True).start()
        while not wait([future], timeout=0.2).done:
            self._check_open()
        return future.result()

    def _started(self, image: Any, task: Task) -> RemoteSandbox:
        """Start a container; one that is there after close() is ended here."""
        with self._open_one():
            born = time.monotonic()
            container = self._start(image, task)
            environment = BASE if task.image else {**BASE, "HOME": HOME}
            sandbox = RemoteSandbox(container, environment, self.config.sandbox_lifetime, self._forget, born)
            with self._lock:
                if not self._closed:
                    self._sandboxes.add(sandbox)
                    return sandbox
            sandbox.close()
            raise BackendClosed

    def _while_open(
        self,
        call: Callable[[], Result],
        limit: float | None = None,
        unwanted: Callable[[Result], object] = lambda result: None,
    ) -> Result:
        """Return what the call returns; waits for it no longer than the backend is open, and `limit` seconds.

        unwanted: given the result that came when nobody waited any more.
        """
        pending = Pending(call, self._lock, unwanted)
        try:
            pending.begin()
            with self._lock:
                if not self._lock.wait_for(lambda: pending.done or self._closed, limit):
                    raise SandboxError(f"{self.name}: no sandbox was made within {limit:.0f} s")
                self._check_open()
            return pending.take()
        except BaseException:
            pending.give_up()
            raise

    def _start_patiently(self, image: Any, task: Task) -> RemoteSandbox:
        """Start a container; where the engine is busy, try again after longer and longer pauses."""
        for number in range(STARTS):
            try:
                return self._while_open(
                    lambda: self._started(image, task), self.start_patience, RemoteSandbox.close
                )
            except Throttled:
                if number == STARTS - 1:
                    raise
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**number) * random.uniform(0.5, 1.5)
            with self._lock:
                self._lock.wait_for(lambda: self._closed, pause)
            self._check_open()
        raise AssertionError("the loop returns or raises")

    def _prepare(self, sandbox: RemoteSandbox, task: Task, archive: bytes) -> None:
        if task.image:
            reset(sandbox, task)
        else:
            sandbox.unpack(archive)
        if task.setup:
            key = (task.image, task.setup)
            sandbox.environment = dict(self._environments.get(key, lambda: environment_after(sandbox, task)))

    def _archive(self, task: Task) -> bytes:
        key = (task.instance_id, task.base_commit, frozenset(task.files.items()))
        return self._archives.get(key, lambda: repository_archive(task))

    def _check_open(self) -> None:
        if self._closed:
            raise BackendClosed

    @contextlib.contextmanager
    def _open_one(self) -> Iterator[None]:
        """Count who is in open() and what is being started, so that close() can wait for it."""
        with self._lock:
            self._check_open()
            self._opening += 1
        try:
            yield
        finally:
            with self._lock:
                self._opening -= 1
                self._lock.notify_all()

    @contextlib.contextmanager
    def _slot(self) -> Iterator[None]:
        """Wait until one of the starts at a time that the settings allow is free."""
        with self._lock:
            self._lock.wait_for(lambda: self._closed or self._starting < self.config.sandbox_starts)
            self._check_open()
            self._starting += 1
        try:
            yield
        finally:
            with self._lock:
                self._starting -= 1
                self._lock.notify_all()

    def _forget(self, sandbox: RemoteSandbox) -> None:
        with self._lock:
            self._sandboxes.discard(sandbox)


def _failure(done: Future[Any]) -> str | None:
    """Why something failed that may not be done at all; None where it succeeded."""
    if not done.done():
        return "no answer"
    return str(done.exception()) if done.exception() else None
