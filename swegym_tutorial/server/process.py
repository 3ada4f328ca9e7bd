"""The local server as a child process that is ready when `start` returns and gone when its parent is.

Imports neither torch nor the server itself, so it costs nothing where no server is started.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from .main import SESSION_PATIENCE, check_extras

START_PATIENCE = 180.0  # seconds; importing torch from a cold disk takes a while
STOP_PATIENCE = 0.8  # seconds after which a server that was told to end is killed


class LocalServer:
    """A server on 127.0.0.1 with a free port and a random key. `with LocalServer(...) as server:` starts and stops it.

    url, key and pid are set by `start`. The child runs in a session of its own, so a Ctrl-C in the terminal is
    its parent's business alone; it ends within a second of its parent's end, however that comes.
    """

    def __init__(
        self,
        models: Mapping[str, Path],
        state_dir: Path,
        *,
        log_path: Path | None = None,
        threads: int | None = None,
        session_patience: float = SESSION_PATIENCE,
    ) -> None:
        """models: base_model names and their folders. log_path: default state_dir / "server.log".

        threads, session_patience: see `serve`.
        """
        self._models = {name: str(Path(folder).resolve()) for name, folder in models.items()}
        self._state_dir = Path(state_dir).resolve()
        self.log_path = Path(log_path or self._state_dir / "server.log")
        self._options = {"threads": threads, "session_patience": session_patience}
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.key = ""
        self.pid = 0

    def start(self, stop: threading.Event | None = None) -> bool:
        """Start the child and wait until it answers. Raises RuntimeError with the end of its log where it doesn't.

        Returns True; or False, with the child gone, as soon as `stop` is set while it starts. After stop() it can be
        started again, and has the same address and key: clients find it where it was.
        """
        check_extras()
        self._state_dir.mkdir(parents=True, exist_ok=True)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.key = self.key or f"tml-{secrets.token_urlsafe(24)}"
        told = {
            "models": self._models,
            "state_dir": str(self._state_dir),
            "api_key": self.key,
            "options": {**self._options, "port": urlsplit(self.url).port or 0},
            "parent": os.getpid(),
        }
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __package__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(),
                start_new_session=True,
            )
        self.pid = self._process.pid
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.flush()
            line = self._ready_line(stop or threading.Event())
            if line is None:
                self.stop()
                return False
            self.url = json.loads(line)["url"]
        except BaseException as error:
            self.stop()
            if isinstance(error, BrokenPipeError):
                raise RuntimeError(self._why("ended at once")) from error
            raise
        return True

    def stop(self) -> None:
        """End the child; returns when it is gone, within a few seconds. Does nothing where it is gone already."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def death(self) -> str | None:
        """Return how the child ended where it did so by itself, with the end of its log; None while it runs."""
        process = self._process
        if process is None or process.poll() is None:
            return None
        return self._why(f"ended with status {process.returncode}")

    def __enter__(self) -> LocalServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _ready_line(self, stop: threading.Event) -> bytes | None:
        assert self._process is not None and self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + START_PATIENCE
        line = b""
        while not line.endswith(b"\n"):
            if stop.is_set():
                return None
            if time.monotonic() > deadline:
                raise RuntimeError(self._why(f"was not ready within {START_PATIENCE:.0f} s"))
            if not select.select([descriptor], [], [], 0.1)[0]:
                continue
            piece = os.read(descriptor, 4096)
            if not piece:
                raise RuntimeError(self._why("ended before it was ready"))
            line += piece
        return line

    def _why(self, what: str) -> str:
        lines = self.log_path.read_text(errors="replace").strip().splitlines()
        return f"the local server {what}; the end of {self.log_path}:\n" + "\n".join(lines[-15:])


def _environment() -> dict[str, str]:
    """The parent's environment, and its module path, so that the child finds what the parent found."""
    path = os.pathsep.join(os.path.abspath(place) for place in sys.path if place or os.getcwd())
    quiet = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}
    return {**quiet, **os.environ, "PYTHONPATH": path}
