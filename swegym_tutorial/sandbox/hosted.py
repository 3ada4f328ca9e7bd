"""What the backends that keep sandboxes in folders of this machine share: copies, commands, closing.

Each kind says how a command is started and how its end is read (local.py, subprocess.py).
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from ..tasks import Task, TaskError, materialise
from . import CLOSING, BackendClosed, CommandResult, SandboxError
from .files import Snapshot, State, remove_tree
from .limits import Limits, Meter
from .process import Command, Ended
from .root import RootFolder
from .watchdog import kill_marked

ARGUMENT_LIMIT = 100_000  # bytes: a longer command goes through a file; the kernel's limit is 128 KiB
TIMEOUT_CODE = 124
KILLED_CODE = 137


class HostedSandbox(ABC):
    """A sandbox in a folder of this machine. The protocol's methods, for one thread and close() from any."""

    def __init__(self, backend: HostedBackend, state: State, limits: Limits) -> None:
        self.state = state
        self._backend = backend
        self._meter = Meter(state.folders, limits)
        self._busy = threading.Lock()  # held while a command runs or a file is moved
        self._starting = (
            threading.Lock()
        )  # held while a command is started, so that close() finds it or stops it
        self._running: Command | None = None
        self._closed = False

    @abstractmethod
    def _start(self, code: bytes, env: Mapping[str, str], file: IO[bytes] | None, may_write: bool) -> Command:
        """Start bash on the code; `file` is an open file to pass on to it."""

    @abstractmethod
    def _sweep(self) -> None:
        """End what the command left running. Called once its main process is gone."""

    @abstractmethod
    def _exit_code(self, ended: Ended) -> int:
        """The exit code of a command that ended by itself. Raises SandboxError where the sandbox failed."""

    def exec(
        self,
        command: str,
        *,
        timeout: float,
        output_bytes: int = 65_536,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a bash command in the repository; see the protocol.

        What a limit or the deadline ends is a result with a line in brackets at the end of its output and exit
        code 137, or 124 with timed_out. Output beyond 1 GiB is a limit too.
        """
        code = command.encode("utf-8", "replace")
        if b"\0" in code:
            return CommandResult(126, "bash: a command cannot hold a NUL byte\n", False, 0, 0.0)
        with self._busy, self._failures("the command could not be run"), contextlib.ExitStack() as stack:
            file = None
            if len(code) > ARGUMENT_LIMIT:
                file = stack.enter_context(tempfile.TemporaryFile())
                file.write(code)
                file.flush()
                file.seek(0)
                code = b'eval "$(cat <&%d)" %d<&-' % (file.fileno(), file.fileno())
            ended, late = self._run(code, env or {}, file, timeout, output_bytes)
        return self._result(ended, late)

    def _run(
        self, code: bytes, env: Mapping[str, str], file: IO[bytes] | None, timeout: float, output_bytes: int
    ) -> tuple[Ended, str | None]:
        try:
            with self._starting:
                self._check_open()
                self.state.reopen()
                self._meter.begin()
                command = self._running = self._start(code, env, file, self._meter.disk_excess is None)
            ended = command.supervise(
                timeout=timeout, output_bytes=output_bytes, meter=self._meter, sweep=self._sweep
            )
        except BaseException:  # an interrupt may come at any point, so also in the midst of the start
            kill_marked(str(self.state.path))
            raise
        finally:
            self._running = None
        self._check_open()
        return ended, self._meter.end(ended.seconds)

    def _result(self, ended: Ended, late: str | None) -> CommandResult:
        output = ended.output.text()
        notes = []
        if ended.timed_out:
            exit_code = TIMEOUT_CODE
        elif ended.excess:
            exit_code = KILLED_CODE
            notes.append(f"[killed: {ended.excess}]")
        else:
            exit_code = self._exit_code(ended)
        if late:
            notes.append(f"[{late}; until some are deleted, no file can grow]")
        if notes:
            output += ("\n" if output and not output.endswith("\n") else "") + "\n".join(notes) + "\n"
        return CommandResult(exit_code, output, ended.timed_out, ended.output.left_out, ended.seconds)

    def write_file(self, path: str, data: bytes) -> None:
        """Write a file at an absolute path inside; see the protocol. Only where the agent has files itself."""
        with self._busy, self._failures(f"{path} could not be written"):
            self._check_open()
            self.state.reopen()
            self.state.write(path, data)

    def read_file(self, path: str, limit: int = 64 << 20) -> bytes:
        """Return a regular file's bytes; see the protocol."""
        with self._busy:
            self._check_open()
            with self._failures(f"{path} could not be read"):
                self.state.reopen()
            return self.state.read(path, limit)

    def close(self) -> None:
        """End all in it and delete it; a command that runs in another thread raises SandboxError there."""
        self.end()
        with self._busy:
            remove_tree(self.state.path)
        self._backend.forget(self)

    def end(self) -> None:
        """End the command that runs in it, and let none start any more."""
        with self._starting:
            self._closed = True
            if self._running is not None:
                self._running.kill()

    def wait_idle(self, seconds: float) -> None:
        """Wait until no command runs and no file is moved in it, or for so many seconds."""
        if self._busy.acquire(timeout=max(0.0, seconds)):
            self._busy.release()

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox is closed")

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SandboxError(f"{what}: {error}") from error


class HostedBackend(ABC):
    """Opens sandboxes in one watched folder. Safe for many threads."""

    name: str

    def __init__(self, root: Path | None, limits: Limits, run: str) -> None:
        self.limits = limits
        self._root = RootFolder(root, run)
        self._numbers = itertools.count()
        self._lock = threading.Condition()
        self._opening = 0
        self._closed = False
        self._sandboxes: set[HostedSandbox] = set()
        self._snapshots: dict[tuple[str, str], _Source] = {}

    @property
    def root(self) -> Path:
        """The folder that holds all of its sandboxes."""
        return self._root.path

    @property
    def closed(self) -> bool:
        return self._closed

    @abstractmethod
    def _make(self, number: int, path: Path, repository: Snapshot) -> HostedSandbox:
        """Make the sandbox of that number at a path that does not exist yet."""

    def open(self, task: Task) -> HostedSandbox:
        """Return a fresh sandbox with the task's repository at base_commit; see the protocol.

        The repository is made by git once a task and then copied from memory, where the task's files are too.
        """
        if not task.files:
            raise SandboxError(self._why_not(task))
        with self._open_one():
            repository = self._source(task).snapshot(self.root, task)
            number = next(self._numbers)
            path = self.root / f"s{number}"
            try:
                sandbox = self._make(number, path, repository)
            except BaseException as error:
                remove_tree(path)
                if isinstance(error, OSError):
                    raise SandboxError(f"a sandbox could not be made in {self.root}: {error}") from error
                raise
            with self._lock:
                if not self._closed:
                    self._sandboxes.add(sandbox)
                    return sandbox
            sandbox.close()
            raise BackendClosed

    def missing(self, tasks: Sequence[Task]) -> dict[str, str]:
        """Find the tasks that cannot be opened here; see the protocol."""
        return {task.instance_id: self._why_not(task) for task in tasks if not task.files}

    def _why_not(self, task: Task) -> str:
        return (
            f"{task.instance_id} brings no files but the image {task.image}, which the {self.name} sandbox "
            "cannot open: use --sandbox docker or modal"
        )

    @contextlib.contextmanager
    def _open_one(self) -> Iterator[None]:
        """Count who is in open(), so that close() can wait for it."""
        with self._lock:
            if self._closed:
                raise BackendClosed
            self._opening += 1
        try:
            yield
        finally:
            with self._lock:
                self._opening -= 1
                self._lock.notify_all()

    def _source(self, task: Task) -> _Source:
        key = (task.instance_id, task.base_commit)
        with self._lock:
            source = self._snapshots.get(key)
            if source is None or source.files != task.files:  # the same name, and other files: another task
                source = self._snapshots[key] = _Source(task.files)
            return source

    def forget(self, sandbox: HostedSandbox) -> None:
        """A sandbox has closed itself."""
        with self._lock:
            self._sandboxes.discard(sandbox)

    def close(self) -> None:
        """Close every sandbox, wait for those being opened, and delete the folder; see the protocol.

        All commands are ended before any folder is deleted, so that who waits for one hears of it at once. What
        is not deleted in time is left to the watchdog.
        """
        end = time.monotonic() + CLOSING
        with self._lock:
            if self._closed:
                return
            self._closed = True
            sandboxes = list(self._sandboxes)
        for sandbox in sandboxes:
            sandbox.end()
        with self._lock:
            self._lock.wait_for(lambda: self._opening == 0, end - time.monotonic())
        for sandbox in sandboxes:
            sandbox.wait_idle(end - time.monotonic())
        try:
            self._root.close(end - time.monotonic())
        finally:
            self._let_go()

    def _let_go(self) -> None:  # noqa: B027 (a kind may keep nothing)
        """Give back what the kind itself keeps. Called once, last of all."""


class _Source:
    """The repository of one task: made by the first who asks, while the others wait."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = files
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None

    def snapshot(self, root: Path, task: Task) -> Snapshot:
        with self._lock:
            if self._snapshot is None:
                with tempfile.TemporaryDirectory(prefix="template-", dir=root) as folder:
                    try:
                        materialise(task, Path(folder, "repository"))
                    except (TaskError, OSError) as error:
                        raise SandboxError(
                            f"the repository of {task.instance_id} could not be made: {error}"
                        ) from error
                    self._snapshot = Snapshot.of(Path(folder, "repository"))
            return self._snapshot
