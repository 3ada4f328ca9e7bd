"""A real JupyterLab on this machine, with settings and folders of its own, which takes along all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
PATIENCE = 240.0  # seconds for whatever a slow machine may take long for
ENDING = 120.0  # seconds in which a kernel and its run must be gone
SERVER_ENDING = 3.0  # seconds for the server itself, which may hang when it has nothing left to do
AS_SAVED = "as_saved"  # the folder of copies that no test changes
MARK = "SWEGYM_TUTORIAL_BROWSER_TEST"  # in the environment of all processes of one Lab, which are found by it
SETTINGS: dict[str, dict[str, Any]] = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/apputils-extension/themes": {"theme": "JupyterLab Light", "adaptive-theme": False},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},  # a test saves when it wants to
}


class Lab:
    """A running JupyterLab over a copy of the notebooks. `close` ends it, its kernels, and their runs."""

    def __init__(self, temp: Path, log: Path) -> None:
        """temp: an empty folder for everything that it writes. log: file for what it and its kernels print."""
        self.notebooks, self.temp = temp / "notebooks", temp / "tmp"
        self.token = secrets.token_hex(16)
        self.url = ""
        self._runtime = temp / "runtime"
        self.temp.mkdir()
        for folder in (self.notebooks, self.notebooks / AS_SAVED):
            shutil.copytree(ROOT / "notebooks", folder, ignore=shutil.ignore_patterns("runs", ".*"))
        for name, settings in SETTINGS.items():
            path = temp / "settings" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings), encoding="utf-8")
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", *self._options()],
                env=self._environment(temp),
                cwd=self.notebooks,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self.url = self._wait_for_url(log)
        except BaseException:
            self.close()
            raise

    def _options(self) -> list[str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return [
            "--no-browser",
            "--allow-root",
            "--ip=127.0.0.1",
            f"--port={port}",  # it takes another one where this is taken by then
            f"--ServerApp.root_dir={self.notebooks}",
            "--ServerApp.terminals_enabled=False",
            "--LabApp.extension_manager=readonly",  # the other one asks the package index
        ]

    def _environment(self, temp: Path) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
        environment.pop("TINKER_BASE_URL", None)
        return environment | {
            MARK: self.token,
            "JUPYTER_TOKEN": self.token,
            "JUPYTER_CONFIG_DIR": str(temp / "config"),
            "JUPYTER_DATA_DIR": str(temp / "data"),
            "JUPYTER_RUNTIME_DIR": str(self._runtime),
            "JUPYTERLAB_SETTINGS_DIR": str(temp / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(temp / "workspaces"),
            "IPYTHONDIR": str(temp / "ipython"),
            "TMPDIR": str(self.temp),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "SWEGYM_TUTORIAL_QUICK": "1",
        }

    def _wait_for_url(self, log: Path) -> str:
        def answers() -> str | None:
            assert self._process.poll() is None, f"JupyterLab has ended: {log.read_text()[-2000:]}"
            for path in self._runtime.glob("jpserver-*.json"):
                with contextlib.suppress(ValueError):  # half written
                    return str(json.loads(path.read_text())["url"]).rstrip("/")
            return None

        return str(wait_until(answers, "JupyterLab tells its address"))

    def processes(self) -> list[psutil.Process]:
        """All that belongs to it: by the mark in the environment, and what descends from those."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.token:
                    for each in (process, *process.children(recursive=True)):
                        found[each.pid] = each
        return [process for process in found.values() if alive(process)]

    def close(self) -> list[str]:
        """Shut the kernels down, then the server; returns what their runs left behind, which is killed then."""
        server = self._process.pid
        with contextlib.suppress(OSError, ValueError):
            kernels = [kernel["id"] for kernel in json.loads(self._ask("GET", "/api/kernels"))]
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda kernel: self._ask("DELETE", f"/api/kernels/{kernel}"), kernels))
        left = self._wait_for_end(except_for=server)
        with contextlib.suppress(OSError):
            self._ask("POST", "/api/shutdown")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SERVER_ENDING)
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait(ENDING)
        return left

    def _wait_for_end(self, except_for: int) -> list[str]:
        end = time.monotonic() + ENDING
        while True:
            left = [f"{p.pid}: {' '.join(command(p))}" for p in self.processes() if p.pid != except_for]
            left += [f"folder {path.name}" for path in self.temp.glob("swegym-*")]
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.1)

    def _ask(self, method: str, path: str) -> bytes:
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(self.url + path, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=ENDING) as answer:
            return bytes(answer.read())


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return ["gone"]


def wait_until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """Wait for something that a test can look at; returns what it was."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"did not happen within {seconds:.0f} s: {what}"
        time.sleep(0.1)
    return found
