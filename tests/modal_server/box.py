"""One container of the loopback Modal server: real processes in bubblewrap, which live until it ends.

Unlike the package's local sandbox, whose commands each get namespaces of their own, a container here has one
process 1 and one process table for its whole life, as on Modal: what a command leaves running goes on running,
and is seen by the next one. Knows nothing of gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

from swegym_tutorial.sandbox.bubblewrap import CLEAN
from swegym_tutorial.sandbox.files import remove_tree
from swegym_tutorial.sandbox.probe import binaries
from swegym_tutorial.sandbox.view import View
from swegym_tutorial.sandbox.watchdog import MARKER

FS_TOOL = "/__modal/.bin/modal-sandbox-fs-tools"  # the client runs this program to read and write files
_FOLDERS = ("dev", "etc", "home", "opt", "proc", "root", "run", "srv", "tmp", "usr", "var/tmp")
_ACCOUNTS = {"passwd": "root:x:0:0:root:/root:/bin/bash\n", "group": "root:x:0:\n"}
_READ = 1 << 18

# What FS_TOOL does: the command as JSON is its argument, the file's bytes are its stdin or stdout.
_FS_PROGRAM = r"""
import json, os, sys

def fail(kind, message):
    sys.stderr.write(json.dumps({"error_kind": kind, "message": message}))
    sys.exit(1)

(operation, arguments), = json.loads(sys.argv[1]).items()
path = arguments["path"]
try:
    if operation == "WriteFile":
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            while data := sys.stdin.buffer.read(1 << 20):
                file.write(data)
    elif operation == "ReadFile":
        with open(path, "rb") as file:
            while data := file.read(1 << 20):
                sys.stdout.buffer.write(data)
    else:
        fail("NotSupported", operation)
except FileNotFoundError:
    fail("NotFound", "path does not exist")
except IsADirectoryError:
    fail("IsDirectory", "path is a directory")
except (NotADirectoryError, FileExistsError):
    fail("NotDirectory", "a part of the path is not a directory")
except PermissionError:
    fail("PermissionDenied", "permission denied")
except OSError as error:
    fail("Other", str(error))
"""


class Changes:
    """Wakes all who wait whenever something changed. One event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()


class Process:
    """One process, its output kept in files so that it can be read again from any offset. One event loop."""

    def __init__(
        self,
        argv: list[str],
        env: Mapping[str, str],
        folder: Path,
        number: int,
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._changes = Changes()
        self._stdin = asyncio.Lock()
        self.stdin_written = 0
        self.stdin_closed = False
        self.status: int | None = None  # the exit code, or minus the signal
        self._popen = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=dict(env),
            pass_fds=pass_fds,
        )
        self._output: dict[int, IO[bytes]] = {}
        self._open: set[int] = set()
        for stream, pipe in ((1, self._popen.stdout), (2, self._popen.stderr)):
            assert pipe is not None
            self._output[stream] = open(folder / f"{number}.{stream}", "a+b", buffering=0)  # noqa: SIM115
            self._open.add(stream)
            os.set_blocking(pipe.fileno(), False)
            self._loop.add_reader(pipe.fileno(), self._readable, stream, pipe)
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._loop.add_reader(self._pidfd, self._ended)

    def _readable(self, stream: int, pipe: IO[bytes]) -> None:
        try:
            data = os.read(pipe.fileno(), _READ)
        except BlockingIOError:
            return
        if data:
            self._output[stream].write(data)
        else:
            self._loop.remove_reader(pipe.fileno())
            pipe.close()
            self._open.discard(stream)
        self._changes.tell()

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.status = self._popen.wait()
        self._changes.tell()

    async def read(self, stream: int, offset: int, size: int) -> bytes:
        """Return what comes at the offset, waiting for it; b"" once the last writer has closed the pipe."""
        while True:
            open_before = stream in self._open
            if self._output[stream].closed:
                return b""
            if data := os.pread(self._output[stream].fileno(), size, offset):
                return data
            if not open_before:
                return b""
            await self._changes.wait()

    async def wait(self) -> int:
        while self.status is None:
            await self._changes.wait()
        return self.status

    async def write(self, data: bytes, offset: int, *, close: bool = False) -> None:
        """Write to its stdin what lies beyond the bytes that were written before."""
        async with self._stdin:
            pipe = self._popen.stdin
            assert pipe is not None
            view = memoryview(data)[max(0, self.stdin_written - offset) :]
            with contextlib.suppress(BrokenPipeError):  # it ended, or closed its stdin: as on Modal, no error
                while view:
                    count = await asyncio.to_thread(os.write, pipe.fileno(), view[: 1 << 16])
                    self.stdin_written += count
                    view = view[count:]
            if close and not self.stdin_closed:
                self.stdin_closed = True
                pipe.close()

    def kill(self) -> None:
        """Kill it and what belongs to its process group; what made itself a session of its own stays."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let its files go; nothing of it can be read afterwards."""
        for stream, pipe in ((1, self._popen.stdout), (2, self._popen.stderr)):
            if stream in self._open and pipe is not None:
                self._loop.remove_reader(pipe.fileno())
                pipe.close()
            self._output[stream].close()
        self._open.clear()
        if self._popen.stdin is not None and not self.stdin_closed:
            self._popen.stdin.close()


class Box:
    """One container. All methods in one event loop."""

    def __init__(self, folder: Path, view: View) -> None:
        self.root = folder / "root"
        self._folder, self._view = folder, view
        self._entry: Process | None = None
        self._pid, self._status = 0, -1
        self._processes: list[Process] = []
        self.environment = {"HOME": "/root", "LANG": "C.UTF-8", **dict(view.environment)}

    async def start(self, argv: Iterable[str], contents: Iterable[Path]) -> None:
        """Fill its root with copies of the folders `contents` and run argv as its process 1's child."""
        for name in _FOLDERS:
            (self.root / name).mkdir(parents=True, exist_ok=True)
        for content in contents:
            shutil.copytree(content, self.root, symlinks=True, dirs_exist_ok=True)
        for name, text in _ACCOUNTS.items():
            (self._folder / name).write_text(text, encoding="utf-8")
        self._status, end = os.pipe()  # open to the end: bubblewrap dies of writing to one that nobody reads
        command = [
            binaries()[0],
            "--unshare-user",
            "--uid",
            "0",
            "--gid",
            "0",
            "--unshare-pid",
            "--unshare-net",
        ]
        command += ["--unshare-ipc", "--unshare-uts", "--hostname", "modal", "--bind", str(self.root), "/"]
        command += self._view.arguments
        for name in _ACCOUNTS:
            command += ["--ro-bind", str(self._folder / name), f"/etc/{name}"]
        command += ["--proc", "/proc", "--dev", "/dev", "--chdir", "/", "--clearenv"]
        for name, value in self.environment.items():
            command += ["--setenv", name, value]
        command += ["--json-status-fd", str(end), "--", "/bin/sh", "-c", 'echo; exec "$@"', "entry", *argv]
        try:
            marked = {**CLEAN, MARKER: f"{self._folder}/"}
            self._entry = self._start(command, marked, (end,))
        finally:
            os.close(end)
        self._pid = await asyncio.to_thread(_child_pid, self._status)
        if not await self._entry.read(1, 0, 1):  # the empty line: its files are in place
            said = await self._entry.read(2, 0, 1000)
            raise OSError(f"the container did not start: {said.decode('utf-8', 'replace')}")

    def run(self, argv: list[str], workdir: str, env: Mapping[str, str]) -> Process:
        """Start a command in it."""
        if argv[0] == FS_TOOL:
            argv = ["python3", "-c", _FS_PROGRAM, *argv[1:]]
        enter = f"nsenter -t {self._pid} -U --preserve-credentials -m -p -n -i -u".split()
        change = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', workdir or "/"]
        return self._start([*enter, *change, *argv], {**self.environment, **env})

    def _start(self, argv: list[str], env: Mapping[str, str], pass_fds: tuple[int, ...] = ()) -> Process:
        process = Process(argv, env, self._folder, len(self._processes), pass_fds)
        self._processes.append(process)
        return process

    async def wait(self) -> int:
        """Wait for the end of its main command; return the exit code."""
        assert self._entry is not None
        status = await self._entry.wait()
        return status if status >= 0 else 128 - status

    async def gone(self) -> None:
        """Wait for the end of its main command and of all others, nsenter's own processes too, once it is killed."""
        for process in list(self._processes):
            await process.wait()

    def kill(self) -> None:
        """End every process in it: the kernel kills them with process 1."""
        if self._pid and self._entry is not None and self._entry.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        for process in self._processes[1:]:  # nsenter stops with what it runs, and then hinders its end
            process.kill()

    def remove(self) -> None:
        """Delete its files, once it has ended. What it wrote can be read until it is closed."""
        remove_tree(self._folder)

    def close(self) -> None:
        for process in self._processes:
            process.close()
        self._processes.clear()
        if self._status >= 0:
            os.close(self._status)
            self._status = -1


def _child_pid(status: int) -> int:
    """Read from bubblewrap's status pipe which process is the container's first."""
    text = b""
    while not (found := re.search(rb'"child-pid": (\d+)\D', text)):
        data = os.read(status, 4096)
        if not data:
            raise OSError("bubblewrap did not start the container")
        text += data
    return int(found[1])
