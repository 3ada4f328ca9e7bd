"""Find and end what runs left behind, in every kind of sandbox that this machine can ask.

A run ends its sandboxes itself, and watchdogs do it for a run that was killed; this is for the rest. Knows
nothing of what the sandboxes did.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator
from pathlib import Path

from . import Leftover, SandboxError
from . import root as local_root

ASKED = ("local", "docker", "modal")


def find(kind: str, run: str | None = None) -> list[Leftover]:
    """Return the sandboxes of a kind: of one run, or with None of all runs.

    Of the local kind only what no run uses any more is seen, and not of which run it was. Raises SandboxError
    (SandboxUnavailable where the kind cannot be asked here).
    """
    if kind == "local":
        return [] if run is not None else [_folder(path) for path in local_root.leftovers()]
    return importlib.import_module(f".{kind}", __package__).leftovers(run)


def _folder(path: Path) -> Leftover:
    age = None
    with contextlib.suppress(OSError):
        age = time.time() - path.stat().st_mtime
    return Leftover("local", str(path), "", age, True)


def end(leftovers: list[Leftover]) -> Iterator[tuple[Leftover, str | None]]:
    """End each and yield it with None, or with why it could not be ended."""
    for leftover in leftovers:
        try:
            if leftover.kind == "local":
                local_root.reap(Path(leftover.name))
            else:
                importlib.import_module(f".{leftover.kind}", __package__).reap(leftover)
        except (SandboxError, OSError) as error:
            yield leftover, str(error)
        else:
            yield leftover, None
