"""What a sandbox is: an isolated place with a task's repository at /testbed, where commands run.

A backend opens sandboxes; each kind has its module. local.py (bubblewrap) and subprocess.py (no isolation, an
explicit opt-in) stand on hosted.py (folders, copies, closing) and process.py (one command under supervision);
docker.py and modal.py stand on remote.py and can open tasks that bring a container image. Sandboxes know
nothing of agents, tests or rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..config import TrainingConfig
from ..tasks import Task

REPOSITORY = "/testbed"
CLOSING = 25.0  # seconds after which a backend's close() returns, whatever hangs
KINDS = ("auto", "local", "docker", "modal", "subprocess")


class SandboxError(RuntimeError):
    """The sandbox failed, not the command in it: an infrastructure fault, which never becomes a reward."""


class SandboxUnavailable(SandboxError):
    """This kind of sandbox cannot work on this machine; the text names the cause and the mend."""


class BackendClosed(SandboxError):
    """The backend opens nothing any more, so that another try is of no use."""

    def __init__(self) -> None:
        super().__init__(
            "the backend is closed: make a new one; a run closes the one that it is given, at its end"
        )


@dataclass(frozen=True)
class CommandResult:
    """What one command did. A command that fails or is killed is a result; a failing sandbox raises."""

    exit_code: int  # 128 + signal where one ended it; 124 after a timeout
    output: str  # stdout and stderr in the order they came; UTF-8, undecodable bytes replaced
    timed_out: bool
    truncated_bytes: int  # left out between head and tail where the output passed the limit; 0 otherwise
    seconds: float


class Sandbox(Protocol):
    """One isolated copy of a task's repository. Used by one thread at a time; close() from any, any time."""

    def exec(
        self,
        command: str,
        *,
        timeout: float,
        output_bytes: int = 65_536,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a bash command in /testbed with stdin closed; no process of it outlives the call.

        timeout: seconds; it holds whatever the command does. output_bytes: half of it is kept from the
        output's start and half from its end. env: added to the sandbox's own environment.
        Raises SandboxError where the sandbox is closed or broken.
        """
        ...

    def write_file(self, path: str, data: bytes) -> None:
        """Write a file of any size at an absolute path inside; folders are made. Raises SandboxError."""
        ...

    def read_file(self, path: str, limit: int = 64 << 20) -> bytes:
        """Return a regular file's bytes, up to limit + 1 of them, following no symbolic link.

        Raises FileNotFoundError where there is no such regular file, SandboxError where the sandbox is gone.
        """
        ...

    def close(self) -> None:
        """End all in it and delete it. Safe to call twice."""
        ...


class SandboxBackend(Protocol):
    """Opens sandboxes of one kind for one run. Safe for many threads.

    Any object with these methods is one. Where it has an attribute `closed` that is True, a run refuses it at once.
    """

    name: str

    def open(self, task: Task) -> Sandbox:
        """Return a fresh sandbox with the task's repository at base_commit, nothing else of the task in it.

        Raises SandboxError; BackendClosed after close(), so that nobody tries again.
        """
        ...

    def missing(self, tasks: Sequence[Task]) -> dict[str, str]:
        """Find the tasks that cannot be opened here: instance_id -> why (its image cannot be had, say).

        Asks whatever service has the images, several at once. Raises SandboxError where it answers for none.
        """
        ...

    def close(self) -> None:
        """Close every sandbox still open and delete what the backend keeps. Safe to call twice.

        Calls in other threads, to the backend and to its sandboxes, raise SandboxError within a second or two.
        Returns within CLOSING seconds or so; what is not gone by then is ended in the background, by a process of
        its own or by its lifetime, and SandboxError says so.
        """
        ...


@dataclass(frozen=True)
class Leftover:
    """A sandbox that is there now, of this driver or another: `sandboxes list` shows it, `reap` ends it."""

    kind: str  # local, docker or modal
    name: str  # its folder, or its id at the service
    run: str  # the id of the run that opened it; "" where it is not known
    age: float | None  # seconds
    orphan: bool | None  # whether its driver is gone; None: cannot be told from here


def backend(
    name: str,
    config: TrainingConfig | None = None,
    *,
    run: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> SandboxBackend:
    """Return the backend of that name, one of KINDS.

    auto is local, or docker where bubblewrap cannot work, as on macOS; `say` is told then.
    config: its limits are asked for (default: the laptop's). run: an id that the sandboxes carry, so that they
    can be listed and reaped. say: told of long work, such as an image that is pulled.
    Raises SandboxUnavailable where it cannot work here or there is none of that name.
    """
    config = config or TrainingConfig.laptop()
    if name == "auto":
        return _local_or_docker(config, run, say)
    if name == "local":
        from .local import LocalBackend

        return LocalBackend(memory_mb=config.sandbox_memory_mb, processes=config.sandbox_processes, run=run)
    if name == "subprocess":
        from .subprocess import SubprocessBackend

        return SubprocessBackend(
            memory_mb=config.sandbox_memory_mb, processes=config.sandbox_processes, run=run
        )
    if name == "docker":
        from .docker import DockerBackend

        return DockerBackend(config, run=run, say=say)
    if name == "modal":
        from .modal import ModalBackend

        return ModalBackend(config, run=run, say=say)
    raise SandboxUnavailable(f"no sandbox is called {name!r}; there are {', '.join(KINDS)}")


def how_to_end(sandboxes: object) -> str:
    """Return how a warning about sandboxes that were not ended goes on; "" where they are none of this package's."""
    if not any(kind.__module__.startswith(f"{__name__}.") for kind in type(sandboxes).__mro__):
        return ""
    return "; `swegym-tutorial sandboxes list` shows what is open, `sandboxes reap` ends it"


def _local_or_docker(config: TrainingConfig, run: str, say: Callable[[str], None]) -> SandboxBackend:
    try:
        return backend("local", config, run=run, say=say)
    except SandboxUnavailable as error:
        no_local = error
    try:
        opened = backend("docker", config, run=run, say=say)
    except SandboxUnavailable as error:
        raise SandboxUnavailable(f"{no_local} Docker neither: {error}") from error
    say(f"sandboxes run in Docker. {no_local}")
    return opened
