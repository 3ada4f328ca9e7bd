"""One training run as a process of its own, that a killer can end: python -P tests/chaos/driver.py FOLDER [...].

Exits with 0 when the run is done, and with 1 and the error where it failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from swegym_tutorial import TrainingConfig, TrainingRun

ROOT = Path(__file__).resolve().parents[2]

# One attempt at a time: a killed run that is resumed makes the same groups and the same steps as one that never was.
EXACT: dict[str, Any] = {
    "max_staleness": 0,
    "rollout_workers": 1,
    "grading_workers": 1,
    "inflight_groups": 1,
    "groups_per_batch": 2,
    "max_groups_per_batch": 2,
    "minibatch_groups": 1,
    "group_size": 4,
    "kl_coef": 0.1,  # so that the reference is asked, too
    "tool_timeout": 60.0,  # so that no busy moment of the machine decides what an attempt is told
}
# Attempts side by side, of two clients: which groups come first is chance, and all the rest must hold.
SIDE_BY_SIDE: dict[str, Any] = {
    "clients": 2,
    "rollout_workers": 4,
    "groups_per_batch": 3,
    "max_groups_per_batch": 3,
    "group_size": 4,
}


def command(
    folder: Path, *, resume: bool = False, server: tuple[str, str] | None = None, **settings: object
) -> list[str]:
    """Return the command line of a run with the laptop preset's settings, changed."""
    words = [sys.executable, "-P", __file__, str(folder)]
    if resume:
        words.append("--resume")
    if server:
        words += ["--server", *server]
    for name, value in settings.items():
        words += ["--set", f"{name}={value}"]
    return words


def cli_command(folder: Path, *, resume: bool = False, **settings: object) -> list[str]:
    """Return the command line by which a user makes the same run; it resumes with what the folder says."""
    words = [sys.executable, "-P", "-m", "swegym_tutorial.cli", "train", "--output", str(folder)]
    if resume:
        return [*words, "--resume"]
    changed = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return [*words, "--preset", "laptop", *changed]


def environment(temp: Path) -> dict[str, str]:
    """Return what the process is started with: a TMPDIR of its own, by which all that it starts is known."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    quiet = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    env = {**os.environ, **quiet, "TMPDIR": str(temp), "PYTHONPATH": path}
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY"):
        env.pop(name, None)
    return env


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--server", nargs=2, metavar=("URL", "KEY"))
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="settings")
    args = parser.parse_args()
    config = TrainingConfig.laptop().with_settings(args.settings)
    try:
        run = TrainingRun(
            config, args.folder, resume=args.resume, server=tuple(args.server) if args.server else None
        )
        run.start()
        run.wait()
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
