"""A training server that can be killed and started again at its old address, as servers elsewhere are."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from swegym_tutorial.watch import ailment

KEY = "tml-served-by-the-tests"


class Served:
    """`swegym-tutorial serve` with a fixed port and state folder."""

    def __init__(self, state: Path) -> None:
        self.state, self.key = state, KEY
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.begin()
        deadline = time.monotonic() + 180
        while ailment(self.url, self.key):
            assert self._process is not None and self._process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.1)

    def begin(self) -> None:
        """Start it and wait for nothing."""
        command = [sys.executable, "-m", "swegym_tutorial.cli", "serve", "--port", str(self.port)]
        self.state.mkdir(parents=True, exist_ok=True)
        with (self.state / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--state", str(self.state), "--api-key", self.key],
                stdout=log,
                stderr=log,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def free_port() -> int:
    """Return a port that nobody has, of those that the system gives to nobody who asks for any one."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def served(state: Path) -> Iterator[Served]:
    server = Served(state)
    try:
        server.start()
        yield server
    finally:
        server.kill()
