"""Sandboxes on this machine by bubblewrap: no network, no foreign files, no rights, bounded use.

Each command runs in fresh namespaces over the sandbox's own folders. It stops accidents and greedy or curious
code; it is no defence against an attack on the kernel itself. Works for root and for ordinary users, on Linux.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from . import SandboxError, SandboxUnavailable
from .bubblewrap import CLEAN, Bubblewrap
from .files import FOLDERS, Snapshot, State
from .hosted import HostedBackend, HostedSandbox
from .limits import Limits
from .probe import binaries, probe
from .process import Command, Ended, wait_gone
from .userns import AGENTS, make_user_namespace
from .view import make_view
from .watchdog import MARKER, kill_marked

_USUAL_END = 0.1  # seconds in which the kernel usually ends what is left inside


class LocalBackend(HostedBackend):
    """Opens bubblewrap sandboxes for one run.

    The limits hold for one sandbox: memory_mb of resident memory for all its processes together and of address
    space for each one, disk_mb of files in /testbed, /tmp and /home/agent, so many processes and threads at
    once, cpu_seconds for each process. Sums over processes and files are looked at a few times a second, so a
    command can exceed them by what it takes meanwhile (limits.Meter tells how much); /dev/shm holds 64 MB.
    """

    name = "local"

    def __init__(
        self,
        root: Path | None = None,
        memory_mb: int = 2048,
        disk_mb: int = 512,
        processes: int = 256,
        cpu_seconds: int = 3600,
        bwrap: str | None = None,
        run: str = "",
    ) -> None:
        """Make the backend's folder in `root` (default: in memory where there is room, see root.places) and try a sandbox out.

        bwrap: the program to use, instead of those found. run: the id of the run that it is for. Raises SandboxUnavailable where none works here.
        """
        super().__init__(root, Limits(memory_mb, disk_mb, processes, cpu_seconds), run)
        self._namespace = None
        try:
            self._namespace = make_user_namespace()
            view = make_view(self.root)
            programs = [bwrap] if bwrap else binaries()
            self._bubblewrap = probe(programs, view, self.limits, self._namespace, self.root)
        except BaseException:
            self.close()
            raise

    def _make(self, number: int, path: Path, repository: Snapshot) -> HostedSandbox:
        agent = number % AGENTS
        state = State(path, self._bubblewrap.outside(agent))
        state.make()
        repository.write(path / FOLDERS["/testbed"], state.owner)
        return LocalSandbox(self, state, self._bubblewrap, agent)

    def _let_go(self) -> None:
        if self._namespace is not None:
            self._namespace.close()


class LocalSandbox(HostedSandbox):
    """One bubblewrap sandbox: folders that last, and fresh namespaces for each command."""

    def __init__(self, backend: LocalBackend, state: State, bubblewrap: Bubblewrap, agent: int) -> None:
        super().__init__(backend, state, backend.limits)
        self._bubblewrap, self._agent = bubblewrap, agent
        self._prefix = bubblewrap.prefix(state, agent)
        self._environment = {**CLEAN, MARKER: f"{state.path}/"}
        self._status_fd = -1
        self._status = b""

    def _start(self, code: bytes, env: Mapping[str, str], file: IO[bytes] | None, may_write: bool) -> Command:
        self._status_fd, end = os.pipe()
        extra = [argument for name, value in env.items() for argument in ("--setenv", name, value)]
        become = self._bubblewrap.become(self._agent, may_write=may_write)
        command = [*self._prefix, *extra, "--json-status-fd", str(end), "--", *become, "/bin/bash", "-c"]
        fds = (end, *self._bubblewrap.pass_fds, *([file.fileno()] if file else []))
        try:
            return Command([*command, code], env=self._environment, pass_fds=fds)
        except BaseException:
            os.close(self._status_fd)
            raise
        finally:
            os.close(end)

    def _sweep(self) -> None:
        """Wait for the end of process 1 inside, and so of every process: the kernel kills them with it."""
        try:  # ends at once: bubblewrap, the one that writes, is gone
            self._status = b"".join(iter(lambda: os.read(self._status_fd, 4096), b""))
        finally:
            os.close(self._status_fd)
        child = self._told("child-pid")
        if child is None:  # killed before it told: process 1 may be there, waiting for ever to be set up
            kill_marked(str(self.state.path))
            return
        if not wait_gone(child, _USUAL_END):
            # Killed while it was set up, bubblewrap leaves process 1 alive: already out of its process group,
            # and not yet bound to its parent's life.
            kill_marked(str(self.state.path))
            if not wait_gone(child):
                raise SandboxError(f"process {child} of the sandbox was killed and does not end")
        with contextlib.suppress(ChildProcessError):  # ours to reap where we are process 1 of a container
            os.waitpid(child, os.WNOHANG)

    def _told(self, what: str) -> int | None:
        """Return a number that bubblewrap told on the status pipe: "child-pid" first, "exit-code" last."""
        # Found in the text, not parsed: killed while it writes, bubblewrap leaves its JSON document unfinished.
        found = re.search(rb'"%s": (-?\d+)' % what.encode(), self._status)
        return int(found[1]) if found else None

    def _exit_code(self, ended: Ended) -> int:
        code = self._told("exit-code")
        if code is not None:
            return code
        said = ended.output.text().strip()[-300:]
        raise SandboxError(f"bubblewrap failed with status {ended.status} and ran no command: {said!r}")


def why_unavailable() -> str | None:
    """Return why the local sandbox cannot work on this machine, with the mend; None where it works."""
    try:
        LocalBackend().close()
    except SandboxUnavailable as error:
        return str(error)
    return None
