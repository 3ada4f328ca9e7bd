"""A local training server that can be killed and started again, with the same key and the same checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from swegym_tutorial.bundled import POLICY
from swegym_tutorial.config import TrainingConfig

from .driver import ROOT

PATIENCE = 180.0  # seconds until it answers
KEY = "tml-chaos"


class MortalServer:
    """The bundled policy's server as a child process, which ends with this one. `url` changes with each start."""

    def __init__(self, state: Path) -> None:
        self.key, self.url, self.pid = KEY, "", 0
        self.kills = 0
        self._state = state
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._state.mkdir(parents=True, exist_ok=True)
        told = {
            "models": {TrainingConfig.base_model: str(POLICY)},
            "state_dir": str(self._state),
            "api_key": KEY,
            "options": {"threads": 1},
            "parent": os.getpid(),
        }
        quiet = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "HF_HUB_OFFLINE": "1"}
        with (self._state / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "swegym_tutorial.server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={
                    **os.environ,
                    **quiet,
                    "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(ROOT)]),
                },
                start_new_session=True,
            )
        self.pid = self._process.pid
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(told).encode() + b"\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
            self.kill()
            raise RuntimeError(
                f"the server did not answer within {PATIENCE:.0f} s: see {self._state}/server.log"
            )
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended before it was ready: see {self._state}/server.log")
        self.url = json.loads(line)["url"]

    def kill(self) -> None:
        """End it with SIGKILL. Does nothing where it is gone already."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()

    def restart(self, pause: float = 0.0) -> None:
        """Kill it and start it again, `pause` seconds later."""
        self.kill()
        self.kills += 1
        time.sleep(pause)
        self.start()
