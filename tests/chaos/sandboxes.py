"""Sandboxes that fail, die, hang and flood at random, around real ones.

A verdict is never changed: whoever grades meets errors only, and floods come before the agent's own commands.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swegym_tutorial.config import TrainingConfig
from swegym_tutorial.sandbox import CommandResult, Sandbox, SandboxBackend, SandboxError
from swegym_tutorial.tasks import Task

FLOOD = "head -c 50000000 /dev/zero | tr '\\0' x; "
HANG = (
    1.0,
    5.0,
)  # seconds beyond a call's timeout, itself cut to HANG_TIMEOUT, that a hanging sandbox keeps silent
HANG_TIMEOUT = 3.0
CALLS = 8  # a sandbox dies, hangs or floods at one of its first calls


@dataclass(frozen=True)
class Shares:
    """The share of sandboxes that meet each fate."""

    open: float = 0.0  # opening it fails
    die: float = 0.0  # every call fails from some call on
    hang: float = 0.0  # one call keeps silent for seconds and then fails, as do all after it
    flood: float = 0.0  # one command of the agent's writes 50 MB first


class ChaoticBackend:
    """Opens sandboxes of another backend, some of them doomed. Safe for many threads."""

    def __init__(
        self, inner: SandboxBackend, config: TrainingConfig, shares: Shares | None = None, seed: int = 0
    ) -> None:
        """config: of the run, whose limits tell an agent's commands from those of grading."""
        self.name = inner.name
        self.injected: Counter[str] = Counter()
        self._inner = inner
        self._shares = shares or Shares()
        self._agents = (config.tool_timeout, 8 * config.observation_chars)
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def open(self, task: Task) -> Sandbox:
        fate, call, pause = self._draw()
        if fate == "open":
            self.count("open")
            raise SandboxError("no sandbox could be had (on purpose)")
        return ChaoticSandbox(self, self._inner.open(task), fate, call, pause, self._agents)

    def _draw(self) -> tuple[str, int, float]:
        with self._lock:
            at, call = self._random.random(), self._random.randrange(CALLS)
            pause = self._random.uniform(*HANG)
        for fate in ("open", "die", "hang", "flood"):
            at -= getattr(self._shares, fate)
            if at < 0:
                return fate, call, pause
        return "", call, pause

    def missing(self, tasks: Sequence[Task]) -> dict[str, str]:
        return self._inner.missing(tasks)

    def close(self) -> None:
        self._inner.close()

    def count(self, kind: str) -> None:
        with self._lock:
            self.injected[kind] += 1


class ChaoticSandbox:
    """One sandbox whose fate comes at its call number `call`; a flood at the first agent's command from there on."""

    def __init__(
        self,
        backend: ChaoticBackend,
        inner: Sandbox,
        fate: str,
        call: int,
        pause: float,
        agents: tuple[float, int],
    ) -> None:
        self._backend, self._inner = backend, inner
        self._fate, self._call, self._pause, self._agents = fate, call, pause, agents
        self._calls = 0
        self._dead = False

    def exec(
        self,
        command: str,
        *,
        timeout: float,
        output_bytes: int = 65_536,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        self._meet_fate(timeout)
        if self._fate == "flood" and self._calls > self._call and (timeout, output_bytes) == self._agents:
            self._fate = ""
            self._backend.count("flood")
            command = FLOOD + command
        return self._inner.exec(command, timeout=timeout, output_bytes=output_bytes, env=env)

    def write_file(self, path: str, data: bytes) -> None:
        self._meet_fate(0)
        self._inner.write_file(path, data)

    def read_file(self, path: str, limit: int = 64 << 20) -> bytes:
        self._meet_fate(0)
        return self._inner.read_file(path, limit)

    def close(self) -> None:
        self._inner.close()

    def _meet_fate(self, timeout: float) -> None:
        self._calls += 1
        if not self._dead and self._calls > self._call and self._fate in ("die", "hang"):
            self._dead = True
            self._backend.count(self._fate)
            if self._fate == "hang":
                time.sleep(min(timeout, HANG_TIMEOUT) + self._pause)
        if self._dead:
            raise SandboxError("the sandbox is gone (on purpose)")
