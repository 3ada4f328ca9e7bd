"""Sandboxes without isolation: a copy of the repository in a folder, and commands that run as you.

An explicit opt-in for machines where no other kind works. It gives up: isolation from your files, from the
network and from other processes (a command can read and delete what you can), and the limits on single
processes. What stays: fresh copies, a clean environment, the deadline, bounded output, and the meter that kills
a command whose processes or files use too much.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from . import SandboxUnavailable
from .bubblewrap import ENVIRONMENT
from .files import FOLDERS, Snapshot, State
from .hosted import HostedBackend, HostedSandbox
from .limits import Limits
from .process import Command, Ended
from .watchdog import MARKER, kill_marked

WARNING = (
    "sandbox subprocess: the agent's commands run as you, without isolation from your files, "
    "the network and other processes"
)


class SubprocessBackend(HostedBackend):
    """Opens unisolated sandboxes for one run, and warns once that they are.

    Commands run in the copy, whose path is in the variable REPO; there is no /testbed on this machine, and a
    command that names it fails. In write_file and read_file, /testbed, /tmp and /home/agent are folders of the
    sandbox, as in the other kinds.
    """

    name = "subprocess"

    def __init__(
        self,
        root: Path | None = None,
        memory_mb: int = 2048,
        disk_mb: int = 512,
        processes: int = 256,
        run: str = "",
    ) -> None:
        """Make the backend's folder in `root` (default: in memory where there is room, see root.places).

        run: the id of the run that it is for. Raises SandboxUnavailable where there is no bash or no git.
        """
        if missing := [tool for tool in ("bash", "git") if shutil.which(tool) is None]:
            raise SandboxUnavailable(f"the subprocess sandbox needs {' and '.join(missing)}: install it")
        super().__init__(root, Limits(memory_mb, disk_mb, processes, cpu_seconds=0), run)
        warnings.warn(WARNING, stacklevel=2)

    def _make(self, number: int, path: Path, repository: Snapshot) -> HostedSandbox:
        state = State(path)
        state.make()
        repository.write(path / FOLDERS["/testbed"], None)
        return SubprocessSandbox(self, state)


class SubprocessSandbox(HostedSandbox):
    """One folder in which commands run."""

    def __init__(self, backend: SubprocessBackend, state: State) -> None:
        super().__init__(backend, state, backend.limits)
        bash = shutil.which("bash")
        assert bash is not None  # the backend has looked
        self._bash = bash
        self._repository = state.path / FOLDERS["/testbed"]
        self._environment = {
            **ENVIRONMENT,
            "PATH": os.pathsep.join((f"{sys.prefix}/bin", os.environ.get("PATH", os.defpath))),
            "HOME": str(state.path / FOLDERS["/home/agent"]),
            "TMPDIR": str(state.path / FOLDERS["/tmp"]),
            "REPO": str(self._repository),
            MARKER: f"{state.path}/",
        }

    def _start(self, code: bytes, env: Mapping[str, str], file: IO[bytes] | None, may_write: bool) -> Command:
        return Command(
            [self._bash, "-c", code],
            env={**self._environment, **env},
            cwd=self._repository,
            pass_fds=[file.fileno()] if file else [],
        )

    def _sweep(self) -> None:
        kill_marked(str(self.state.path))

    def _exit_code(self, ended: Ended) -> int:
        return ended.status if ended.status >= 0 else 128 - ended.status
