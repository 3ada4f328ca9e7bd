"""What works on this machine, and how to mend what doesn't. Tries things instead of guessing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

MB = 1 << 20


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    works: bool
    told: str  # what was found, or the mend
    needed: bool = False  # for the laptop run


def report() -> bool:
    """Print the findings; returns whether the laptop run can work here."""
    fine = True
    for check in (_python, _git, _local_sandbox, _server, _tasks, _disk, _notebooks, _credentials, _modal):
        finding = check()
        fine = fine and (finding.works or not finding.needed)
        mark = "yes" if finding.works else "NO " if finding.needed else "no "
        print(f"{mark}  {finding.what:22} {finding.told}")
    print(
        "\nThe laptop run works here."
        if fine
        else "\nThe laptop run does not work here yet: mend each NO above."
    )
    return fine


def _version(name: str) -> str:
    return f"{name} {importlib.metadata.version(name)}"


def _python() -> Finding:
    packages = [_version(name) for name in ("tinker", "transformers", "numpy")]
    return Finding(
        "Python and packages", True, ", ".join([f"Python {platform.python_version()}", *packages]), True
    )


def _git() -> Finding:
    path = shutil.which("git")
    return Finding("git", path is not None, path or "install git: repositories and patches need it", True)


def _local_sandbox() -> Finding:
    from .sandbox import SandboxError
    from .sandbox.local import LocalBackend
    from .tasks import load_tasks

    try:
        backend = LocalBackend()
        try:
            start = time.monotonic()
            box = backend.open(load_tasks()[0])
            result = box.exec("python -m pytest --version && git status --short", timeout=30)
        finally:
            backend.close()
    except SandboxError as error:
        return Finding("local sandbox", False, str(error), True)
    told = f"a command in bubblewrap took {time.monotonic() - start:.2f} s, opening included"
    if result.exit_code:
        return Finding(
            "local sandbox", False, f"pytest or git does not run inside: {result.output.strip()}", True
        )
    return Finding("local sandbox", True, told, True)


def _server() -> Finding:
    missing = [
        name for name in ("torch", "peft", "starlette", "uvicorn") if importlib.util.find_spec(name) is None
    ]
    if missing:
        mend = f'{", ".join(missing)} missing: pip install "swegym_tutorial[local]"'
        return Finding("local server", False, mend, True)
    from .bundled import POLICY
    from .server.process import LocalServer

    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        try:
            with LocalServer(
                {"tiny": POLICY}, state_dir=Path(folder), log_path=Path(folder) / "log"
            ) as server:
                told = f"{_version('torch')}, {_version('peft')}; ready in {time.monotonic() - start:.1f} s at {server.url}"
        except RuntimeError as error:
            return Finding("local server", False, str(error), True)
    return Finding("local server", True, told, True)


def _tasks() -> Finding:
    from .tasks import load_tasks

    counts = {split: len(load_tasks(split=split)) for split in ("train", "held-out")}
    return Finding("bundled tasks", True, ", ".join(f"{n} {split}" for split, n in counts.items()), True)


def _disk() -> Finding:
    free = shutil.disk_usage(tempfile.gettempdir()).free // MB
    told = f"{free:,} MB free in {tempfile.gettempdir()}"
    return Finding(
        "disk", free > 1000, told if free > 1000 else f"only {told}: set TMPDIR to a larger disk", True
    )


def _notebooks() -> Finding:
    missing = [name for name in ("jupyterlab", "ipywidgets") if importlib.util.find_spec(name) is None]
    if missing:
        return Finding(
            "notebooks", False, f'{", ".join(missing)} missing: pip install "swegym_tutorial[notebooks]"'
        )
    return Finding(
        "notebooks", True, f"{_version('jupyterlab')}, {_version('ipywidgets')}; make lab opens them"
    )


def _credentials() -> Finding:
    missing = [name for name in ("TINKER_BASE_URL", "TINKER_API_KEY") if not os.environ.get(name)]
    if missing:
        return Finding(
            "Tinker server", False, f"{' and '.join(missing)} not set; only the spindle preset needs them"
        )
    return Finding("Tinker server", True, f"TINKER_BASE_URL is {os.environ['TINKER_BASE_URL']}")


def _modal() -> Finding:
    if importlib.util.find_spec("modal") is None:
        return Finding(
            "Modal", False, 'not installed; only the full run needs it: pip install "swegym_tutorial[modal]"'
        )
    token = bool(os.environ.get("MODAL_TOKEN_ID")) or (Path.home() / ".modal.toml").exists()
    told = _version("modal") if token else f"{_version('modal')}, but no token: run `modal token new`"
    return Finding("Modal", token, told)
