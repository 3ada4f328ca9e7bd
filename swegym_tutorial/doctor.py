"""What works on this machine, and how to mend what doesn't. Tries things instead of guessing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MB = 1 << 20


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    what: str
    works: bool
    told: str  # what was found, or the mend


def report() -> bool:
    """Print the findings; returns whether the run that is meant can work here.

    Where TINKER_BASE_URL is set that is the full run, as it is the default of `train`; else the laptop run.
    """
    full = bool(os.environ.get("TINKER_BASE_URL"))
    sandboxes = {"local": _local(), "docker": _docker(), "modal": _modal(), "subprocess": _subprocess()}
    usable = [sandboxes[kind] for kind in (("docker", "modal") if full else ("local", "docker"))]
    lacking = [] if any(sandbox.works for sandbox in usable) else usable
    fine = [
        _tell("For every run", [_python(), _git(), _disk()], needed=True),
        _tell("For the laptop run", [_server(), _tasks()], needed=not full),
        _tell("For the full run", [_training_server(), _swegym(), _swegym_tasks()], needed=full),
        _tell("Sandboxes", [each for each in sandboxes.values() if each not in lacking], needed=False),
        _tell(f"{'docker or modal' if full else 'local or docker'} is needed", lacking, needed=True),
        _tell("For notebooks", [_notebooks()], needed=False),
    ]
    name = "full" if full else "laptop"
    works = "works here." if all(fine) else "does not work here yet: mend each NO above."
    print(f"\nThe {name} run {works}")
    return all(fine)


def _tell(heading: str, findings: Sequence[Finding], needed: bool) -> bool:
    """Print findings; return whether all that is needed of them works."""
    if findings:
        print(f"{heading}:")
    for finding in findings:
        mark = "yes" if finding.works else "NO " if needed else "no "
        print(f"  {mark}  {finding.what:20} {finding.told}", flush=True)
    return not needed or all(finding.works for finding in findings)


def _version(name: str) -> str:
    return f"{name} {importlib.metadata.version(name)}"


def _python() -> Finding:
    packages = [_version(name) for name in ("tinker", "transformers", "numpy")]
    return Finding("Python and packages", True, ", ".join([f"Python {platform.python_version()}", *packages]))


def _git() -> Finding:
    path = shutil.which("git")
    return Finding("git", path is not None, path or "install git: repositories and patches need it")


def _local() -> Finding:
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
        return Finding("local sandbox", False, str(error))
    told = f"a command in bubblewrap took {time.monotonic() - start:.2f} s, opening included"
    if result.exit_code:
        told = f"pytest or git does not run inside: {result.output.strip()}"
        return Finding("local sandbox", False, told)
    return Finding("local sandbox", True, told)


def _server() -> Finding:
    missing = [
        name for name in ("torch", "peft", "starlette", "uvicorn") if importlib.util.find_spec(name) is None
    ]
    if missing:
        mend = f'{", ".join(missing)} missing: pip install "swegym_tutorial[local]"'
        return Finding("local server", False, mend)
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
            return Finding("local server", False, str(error))
    return Finding("local server", True, told)


def _tasks() -> Finding:
    from .tasks import load_tasks

    counts = Counter(task.split for task in load_tasks(split=None))
    return Finding("bundled tasks", True, ", ".join(f"{n} {split}" for split, n in counts.items()))


def _disk() -> Finding:
    free = shutil.disk_usage(tempfile.gettempdir()).free // MB
    told = f"{free:,} MB free in {tempfile.gettempdir()}"
    return Finding("disk", free > 1000, told if free > 1000 else f"only {told}: set TMPDIR to a larger disk")


def _notebooks() -> Finding:
    missing = [name for name in ("jupyterlab", "ipywidgets") if importlib.util.find_spec(name) is None]
    if missing:
        return Finding(
            "notebooks", False, f'{", ".join(missing)} missing: pip install "swegym_tutorial[notebooks]"'
        )
    return Finding(
        "notebooks", True, f"{_version('jupyterlab')}, {_version('ipywidgets')}; make lab opens them"
    )


def _docker() -> Finding:
    if importlib.util.find_spec("docker") is None:
        return Finding("docker sandbox", False, 'SDK not installed: pip install "swegym_tutorial[docker]"')
    return _backend("docker", f"{_version('docker')}, and an engine answers")


def _modal() -> Finding:
    if importlib.util.find_spec("modal") is None:
        mend = 'not installed; the full run needs it: pip install "swegym_tutorial[modal]"'
        return Finding("modal sandbox", False, mend)
    return _backend("modal", f"{_version('modal')}, and the token is accepted")


def _subprocess() -> Finding:
    return Finding("subprocess sandbox", True, "--sandbox subprocess, but it isolates nothing")


def _backend(name: str, told: str) -> Finding:
    from .sandbox import SandboxError, backend

    try:
        backend(name).close()
    except SandboxError as error:
        return Finding(f"{name} sandbox", False, str(error))
    return Finding(f"{name} sandbox", True, told)


def _training_server() -> Finding:
    url, key = os.environ.get("TINKER_BASE_URL"), os.environ.get("TINKER_API_KEY")
    missing = [name for name, value in (("TINKER_BASE_URL", url), ("TINKER_API_KEY", key)) if not value]
    if not url or not key:
        told = f"{' and '.join(missing)} not set; only the spindle preset needs them"
        return Finding("Tinker server", False, told)
    from .config import TrainingConfig
    from .preflight import PreflightError, check_address

    name = TrainingConfig.spindle().base_model
    try:
        check_address(url, key, name)
    except PreflightError as error:
        return Finding("Tinker server", False, str(error))
    return Finding("Tinker server", True, f"{url} takes the key and offers {name}")


def _swegym() -> Finding:
    if importlib.util.find_spec("swegym") is None:
        from .swegym_grading import INSTALL

        return Finding("swegym", False, f"not installed; grading SWE-Gym's tasks needs it: {INSTALL}")
    return Finding("swegym", True, _version("swegym"))


def _swegym_tasks() -> Finding:
    from .download import DownloadError
    from .swegym_tasks import cached_path
    from .tasks import TaskError, load_tasks

    try:
        path = cached_path()
        if not path.is_file():
            told = "not downloaded yet: `swegym-tutorial tasks list --tasks swegym`"
            return Finding("SWE-Gym tasks", False, told)
        return Finding("SWE-Gym tasks", True, f"{len(load_tasks('swegym'))} chosen of those in {path}")
    except (TaskError, DownloadError) as error:
        return Finding("SWE-Gym tasks", False, str(error))
