"""Run one command under supervision: its output in bounded memory, its deadline held, its end made sure.

Knows pipes, clocks and process groups; nothing of folders, namespaces or tasks.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from . import SandboxError
from .limits import Meter

OUTPUT_LIMIT = (
    1 << 30
)  # bytes: a command that writes more is killed, so that `yes` doesn't burn its whole time
_READ = 1 << 18
_END_PATIENCE = 10.0  # seconds that a killed process gets to be gone
_LOOK_FOR_END = 0.02  # seconds between two looks whether it ended, where the system has no pidfd
_PIPE = 1 << 20  # bytes that a pipe can hold, unless root made it larger


class Output:
    """The head and the tail of a stream in bounded memory, and how many bytes were left out between them."""

    def __init__(self, limit: int) -> None:
        self._head_size, self._tail_size = (limit + 1) // 2, limit // 2
        self._head, self._tail = bytearray(), bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        if room := self._head_size - len(self._head):
            self._head += data[:room]
            data = data[room:]
        if len(data) >= self._tail_size:
            self._tail[:] = data[len(data) - self._tail_size :]
        else:
            self._tail += data
            del self._tail[: max(0, len(self._tail) - self._tail_size)]

    @property
    def left_out(self) -> int:
        return self.total - len(self._head) - len(self._tail)

    def text(self) -> str:
        """The output as text; the bytes left out are told on a line of their own."""
        if not self.left_out:
            return (self._head + self._tail).decode("utf-8", "replace")
        head, tail = self._head.decode("utf-8", "replace"), self._tail.decode("utf-8", "replace")
        return f"{head}\n[... {self.left_out} bytes left out ...]\n{tail}"


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int  # of its main process: the exit code, or minus the signal
    output: Output
    timed_out: bool
    excess: str | None  # the limit for which it was killed, in words
    seconds: float


class Command:
    """One running command. `supervise` is called once, by the thread that started it; `kill` from any."""

    def __init__(
        self,
        argv: Sequence[str | bytes],
        *,
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start it in a process group of its own, stdin closed, stdout and stderr in one pipe.

        Raises SandboxError where the system refuses another process.
        """
        self._lock = threading.Lock()  # the process's id is its own until it is reaped: no signal after that
        self._start = time.monotonic()
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
                env=env,
                cwd=cwd,
                pass_fds=pass_fds,
            )
        except OSError as error:
            raise SandboxError(f"the sandbox could not start a process: {error}") from error

    def kill(self) -> None:
        """Kill the command's process group, if it still runs."""
        with self._lock:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a zombie
                    os.killpg(self._process.pid, signal.SIGKILL)

    def supervise(
        self, *, timeout: float, output_bytes: int, meter: Meter, sweep: Callable[[], None]
    ) -> Ended:
        """Read its output until it ends, reaches its deadline or exceeds a limit; then kill what is left.

        sweep: called once the main process is gone, to end what does not belong to its process group.
        Raises SandboxError where a killed process does not go.
        """
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        os.set_blocking(pipe, False)
        output = Output(output_bytes)
        exit_fd = _pidfd(self._process.pid)
        try:
            try:
                timed_out, excess = self._watch(pipe, exit_fd, output, self._start + timeout, meter)
            finally:
                self.kill()
                self._reap(exit_fd)
                sweep()
            _drain(pipe, output)
        finally:
            self._process.stdout.close()
            if exit_fd is not None:
                os.close(exit_fd)
        return Ended(self._process.returncode, output, timed_out, excess, time.monotonic() - self._start)

    def _watch(
        self, pipe: int, exit_fd: int | None, output: Output, deadline: float, meter: Meter
    ) -> tuple[bool, str | None]:
        """Read until the main process ends; return whether it timed out, and the limit it exceeded."""
        with selectors.PollSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            if exit_fd is not None:
                selector.register(exit_fd, selectors.EVENT_READ)
            while True:
                now = time.monotonic()
                if now >= deadline:
                    return True, None
                if now >= meter.due and (excess := meter.look(self._process.pid)):
                    return False, excess
                wait = max(0.0, min(deadline, meter.due) - now)
                exited = exit_fd is None and self._reaped()
                for key, _ in selector.select(min(wait, _LOOK_FOR_END) if exit_fd is None else wait):
                    if key.fd == exit_fd:
                        exited = True
                    elif data := os.read(pipe, _READ):
                        output.add(data)
                    else:
                        selector.unregister(pipe)
                if exited:
                    return False, None
                if output.total > OUTPUT_LIMIT:
                    return False, f"it wrote more than {OUTPUT_LIMIT >> 20} MB of output"

    def _reaped(self) -> bool:
        with self._lock:
            return self._process.poll() is not None

    def _reap(self, exit_fd: int | None) -> None:
        end = time.monotonic() + _END_PATIENCE
        while not self._reaped():
            if time.monotonic() > end:
                raise SandboxError(
                    f"process {self._process.pid} was killed and does not end; is a disk stuck?"
                )
            if exit_fd is None:
                time.sleep(_LOOK_FOR_END)
            else:
                _readable(exit_fd, 0.2)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # no Linux, or one before 5.3
        return None


def _readable(fd: int, seconds: float) -> bool:
    """Wait until fd can be read, or for so many seconds; return whether it can."""
    with selectors.PollSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(seconds))


def _drain(pipe: int, output: Output) -> None:
    """Read what is left in the pipe, all that it held: for whoever wrote is dead or about to be."""
    end, left = time.monotonic() + 0.5, _PIPE  # a busy machine may let the time pass before the first look
    while left > 0 or time.monotonic() < end:
        if not _readable(pipe, max(0.0, end - time.monotonic())):
            return
        data = os.read(pipe, _READ)
        if not data:
            return
        output.add(data)
        left -= len(data)


def wait_gone(pid: int, seconds: float = _END_PATIENCE) -> bool:
    """Wait until a process that is no child of ours and was killed is gone; return whether it is."""
    fd = _pidfd(pid)
    if fd is not None:
        try:
            return _readable(fd, seconds)
        finally:
            os.close(fd)
    end = time.monotonic() + seconds
    while os.path.exists(f"/proc/{pid}"):
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True
