"""A sandbox in a container: commands and files, whatever engine the container is of.

What runs inside is supervisor.py's, and one call to the engine runs a command. Knows deadlines and what becomes
of a call that fails; nothing of tasks, images or any engine.
"""

from __future__ import annotations

import base64
import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from . import CommandResult, SandboxError, supervisor
from .container import Call, Container, NotStarted
from .process import Output
from .supervisor import Stdout, Told, told
from .threads import Pending

OUTPUT_LIMIT = 256 << 20  # bytes: unlike on this machine, all of it travels
ARGUMENT_LIMIT = 40_000  # bytes of a command or a file that travel in the call itself: services refuse 64 KiB
START_PATIENCE = 120.0  # seconds that a busy engine may take to start a program in a container
SLACK = 10.0  # seconds after a command's deadline until it is ended by a second call
CLEAR_PATIENCE = 60.0  # seconds that this may take until the container is given up
CLEAR_TRIES = 3  # where process 1 is not alone kept, a supervisor that is just ending may kill the first
FILE_PATIENCE = 300.0  # seconds for moving one file
START_PAUSES = (0.3, 1.0, 3.0)  # seconds before a program that the engine did not start is tried again
LIFETIME_SLACK = 2.0  # seconds: the container's clock counts whole ones
TIMEOUT_CODE, KILLED_CODE, NO_SHELL_CODE = 124, 137, 127

Result = TypeVar("Result")


class RemoteSandbox:
    """One container with a task's repository. The protocol's methods, for one thread and close() from any."""

    def __init__(
        self,
        container: Container,
        environment: Mapping[str, str],
        lifetime: float,
        forget: Callable[[RemoteSandbox], None],
        born: float,
    ) -> None:
        """environment: of every command. lifetime: seconds after which the container ends by itself.

        born: when its start began, by time.monotonic().
        """
        self.container = container
        self.environment = dict(environment)
        self._lifetime, self._forget, self._born = lifetime, forget, born
        self._busy = threading.Lock()  # held while a command runs or a file is moved
        self._state = threading.Condition()  # guards what follows, and wakes who waits for the engine
        self._calls: set[Call] = set()
        self._broken = ""
        self._closed = self._removed = False

    def exec(
        self,
        command: str,
        *,
        timeout: float,
        output_bytes: int = 65_536,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a bash command in the repository; see the protocol.

        It runs as the image's user, in the environment that the task's set-up made. A command that writes more
        than 256 MB is killed, with a line in brackets at the end of its output and exit code 137. Where the
        deadline does not hold inside (a command can stop its supervisor), a second call holds it from outside;
        where that fails too, the container is removed and SandboxError raised.
        """
        code = command.encode("utf-8", "replace")
        if b"\0" in code:
            return CommandResult(126, "bash: a command cannot hold a NUL byte\n", False, 0, 0.0)
        start, output = time.monotonic(), Output(output_bytes)
        with self._busy:
            file = self._stage(code) if len(code) > ARGUMENT_LIMIT else ""
            program = supervisor.supervise("" if file else code.decode(), file, timeout, self.container.keep)
            said, flooded = self._supervised(program, {**self.environment, **(env or {})}, output, timeout)
        seconds = time.monotonic() - start
        shown = output.text()
        if flooded:
            shown += "\n" if shown and not shown.endswith("\n") else ""
            shown += f"[killed: it wrote more than {OUTPUT_LIMIT >> 20} MB of output]\n"
            return CommandResult(KILLED_CODE, shown, False, output.left_out, seconds)
        code_or_killed = KILLED_CODE if said.exit_code is None else said.exit_code
        return CommandResult(
            TIMEOUT_CODE if said.late else code_or_killed, shown, said.late, output.left_out, seconds
        )

    def _supervised(
        self, program: Sequence[str], env: Mapping[str, str], output: Output, timeout: float
    ) -> tuple[Told, bool]:
        """Run supervisor.supervise and hold its deadline from outside; also return whether it flooded."""
        for pause in (*START_PAUSES, None):
            stdout = Stdout(output.add)
            with self._calling(program, env, stdout.add, OUTPUT_LIMIT) as call:
                call.wait_for_start(START_PATIENCE)
                in_time = call.wait(timeout + SLACK) or call.flooded
                if cleared := not call.ended:
                    self._clear()
                    if not call.wait(SLACK, flooded=True):
                        raise self._give_up("a command was killed and did not end")
                said = told(call.head, call.words)
                whole = stdout.end(said.mark)
                # A supervisor that ends by itself says so, and one that was killed has another exit code than 0.
                if call.code in (-1, 0) and not whole and not call.flooded:
                    raise self._give_up("the engine hung up before the command's end")
                if said.started and call.code != 0 and not cleared:
                    self._clear()  # it killed its supervisor, or the engine failed
            if said.started:
                if call.error is not None:  # so some output may be missing
                    raise self._failed(call.error) from call.error
                if call.code not in (-1, 0):  # what it said may be the command's words
                    said = Told(True, late=not in_time)
                return said, call.flooded
            if call.error is not None and not isinstance(call.error, NotStarted):
                raise self._give_up(str(call.error))  # it may run, and must not run twice
            # The engine started no program. The container may be full of dying processes, or the engine busy.
            if fault := self._fault():
                raise self._give_up(fault)
            if call.code in (126, 127):  # a command before this one has removed /bin/bash
                output.add(call.words)
                return Told(True, NO_SHELL_CODE), False
            if pause is None:
                said_instead = call.error or call.words.decode("utf-8", "replace").strip()[-300:]
                raise SandboxError(
                    f"the command was not started: {said_instead or 'the engine says nothing'}"
                )
            self._pause(pause)
        raise AssertionError("the loop returns or raises")

    def write_file(self, path: str, data: bytes) -> None:
        """Write a file of any size at any absolute path inside; see the protocol.

        An existing file's rights are kept. Raises SandboxError for a path that leads over a link, or to
        something that is no regular file.
        """
        _check_path(path)
        with self._busy:
            file = self._stage(data) if len(data) > ARGUMENT_LIMIT else ""
            encoded = "" if file else base64.b64encode(data).decode()
            call = self._move(supervisor.write(path, encoded, file), lambda data: None)
        if not call.words.endswith(b"written\n"):
            said = call.words.decode("utf-8", "replace").strip().removeprefix("no ")
            raise SandboxError(f"{path} could not be written: {said or 'the sandbox does not say why'}")

    def read_file(self, path: str, limit: int = 64 << 20) -> bytes:
        """Return a regular file's bytes; see the protocol."""
        _check_path(path)
        data = bytearray()
        stdout = Stdout(data.extend)
        with self._busy:
            call = self._move(supervisor.read(path, limit + 1), stdout.add)
        if not stdout.end(told(call.head, call.words).mark):
            if call.code in (-1, 0):  # where there is no file, it ends with another code
                raise SandboxError(f"{path} could not be read: the engine hung up")
            raise FileNotFoundError(f"no regular file at {path} in the sandbox")
        return bytes(data)

    def unpack(self, archive: bytes) -> None:
        """Unpack a tar archive at the root. Raises SandboxError."""
        self._put(lambda: self.container.unpack(archive))

    def close(self) -> None:
        """End all in it and delete it; a command that runs in another thread raises SandboxError there."""
        self.end()
        if self._removed:
            return
        self.container.remove()  # where that fails it is not forgotten, and a later call tries again
        self._removed = True
        self._forget(self)

    def end(self) -> None:
        """Let who uses it in another thread hear at once that it is closed, and nobody use it any more."""
        with self._state:
            self._closed = True
            for call in self._calls:
                call.abandon()
            self._state.notify_all()

    def _stage(self, data: bytes) -> str:
        """Put data that is too large for an argument into a file of the sandbox, and return its path."""
        path = f"/.swegym-{secrets.token_hex(8)}"  # the one folder that no command can remove or replace
        self._put(lambda: self.container.put(path, data))
        return path

    def _put(self, work: Callable[[], None]) -> None:
        """Have the engine put files into the container."""
        self._check_open()
        try:
            self._apart(work)
        except SandboxError as error:
            raise self._failed(error) from error

    def _move(self, program: Sequence[str], out: Callable[[bytes], object]) -> Call:
        """Run one of supervisor.py's programs that move a file to its end."""
        with self._calling(program, self.environment, out) as call:
            if not call.wait(FILE_PATIENCE):
                raise self._give_up(f"a file was not moved within {FILE_PATIENCE:.0f} s")
        if call.error is not None:
            raise self._failed(call.error) from call.error
        return call

    @contextlib.contextmanager
    def _calling(
        self,
        program: Sequence[str],
        env: Mapping[str, str],
        out: Callable[[bytes], object],
        limit: int | None = None,
    ) -> Iterator[Call]:
        """Start a program; however the block is left, nothing of it runs afterwards."""
        call = Call(self.container, program, env, out, limit)
        try:
            self._begin(call)
            yield call
        except BaseException:  # an interrupt may come at any point
            with contextlib.suppress(SandboxError):
                if not call.ended:
                    self._clear()
            raise
        finally:
            self._done_with(call)
        self._check_open()

    def _begin(self, call: Call) -> None:
        with self._state:
            self._refuse()
            self._calls.add(call)
        call.start()

    def _done_with(self, call: Call) -> None:
        call.abandon()
        with self._state:
            self._calls.discard(call)

    def _apart(self, work: Callable[[], Result]) -> Result:
        """Return what the work returns, which a thread of its own does: end() lets nobody wait for the engine."""
        pending = Pending(work, self._state)
        pending.begin()
        with self._state:
            if not self._state.wait_for(lambda: pending.done or self._closed, FILE_PATIENCE):
                raise SandboxError(f"the engine did not answer within {FILE_PATIENCE:.0f} s")
            self._refuse()
        return pending.take()

    def _pause(self, seconds: float) -> None:
        with self._state:
            self._state.wait_for(lambda: self._closed, seconds)
            self._refuse()

    def _clear(self) -> None:
        """End every process of a command by a call of its own. Where that fails the container is given up."""
        for _ in range(CLEAR_TRIES):
            call = Call(self.container, supervisor.clear(self.container.keep), {}, lambda data: None)
            self._begin(call)
            try:
                call.wait(CLEAR_PATIENCE)
            finally:
                self._done_with(call)
            if call.words.endswith(b"swept\n"):
                return
            if not call.ended or call.error is not None:
                break
        raise self._give_up("a command could not be ended")

    def _failed(self, error: BaseException) -> SandboxError:
        """The error for what the engine refused: why the container is dead, or else the engine's words."""
        self._check_open()
        fault = self._fault()
        return self._give_up(fault) if fault else SandboxError(str(error))

    def _fault(self) -> str | None:
        return self._apart(self.container.fault)

    def _give_up(self, why: str) -> SandboxError:
        """Remove the container for good, and return the error that says why."""
        why = self._fault() or why  # an engine may not know yet of a container that has just ended
        if time.monotonic() - self._born >= self._lifetime - LIFETIME_SLACK:
            why = f"its lifetime of {self._lifetime:.0f} s is over ({why})"
        with self._state:
            self._refuse()
            self._broken = why
        threading.Thread(target=self._remove_quietly, name="remove a container", daemon=True).start()
        return SandboxError(f"the sandbox broke: {why}")

    def _remove_quietly(self) -> None:
        with contextlib.suppress(SandboxError):
            self.container.remove()

    def _check_open(self) -> None:
        with self._state:
            self._refuse()

    def _refuse(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox is closed")
        if self._broken:
            raise SandboxError(f"the sandbox broke: {self._broken}")


def _check_path(path: str) -> None:
    parts = path.split("/")
    if not path.startswith("/") or "\0" in path or ".." in parts or parts[-1] in ("", "."):
        raise SandboxError(f"{path!r} is no absolute path of a file")
