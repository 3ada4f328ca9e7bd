"""Find and end what runs left behind, in every kind of sandbox that this machine can ask.

A run ends its sandboxes itself, and watchdogs do it for a run that was killed; this is for the rest. Knows
nothing of what the sandboxes did.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import Leftover, SandboxError
from . import root as local_root
from .threads import in_threads

ASKED = ("local", "docker", "modal")
HOSTED = ("local", "subprocess", "auto")  # kinds whose sandboxes are folders of this machine
AT_ONCE = 16  # sandboxes that are ended at the same time


def find(kind: str, run: str | None = None) -> list[Leftover]:
    """Return the sandboxes of a kind: of one run, or with None of all runs.

    Of the local kind only what no run uses any more is seen. Raises SandboxError (SandboxUnavailable where the
    kind cannot be asked here).
    """
    if kind not in HOSTED:
        found: list[Leftover] = importlib.import_module(f".{kind}", __package__).leftovers(run)
        return found
    folders = [_folder(path) for path in local_root.leftovers()]
    return [each for each in folders if run is None or each.run == run]


def _folder(path: Path) -> Leftover:
    age, run = None, ""
    with contextlib.suppress(OSError):
        age = time.time() - path.stat().st_mtime
    with contextlib.suppress(OSError, ValueError, AttributeError):
        run = str(json.loads((path / local_root.DRIVER).read_text(encoding="utf-8")).get("run", ""))
    return Leftover("local", str(path), run, age, True)


def end(leftovers: Sequence[Leftover]) -> Iterator[tuple[Leftover, str | None]]:
    """End each, several at once, and yield it with None, or with why it could not be ended."""
    for leftover, done in zip(leftovers, in_threads(_end, leftovers, AT_ONCE), strict=True):
        try:
            done.result()
        except (SandboxError, OSError) as error:
            yield leftover, str(error)
        else:
            yield leftover, None


def _end(leftover: Leftover) -> None:
    if leftover.kind == "local":
        local_root.reap(Path(leftover.name))
    else:
        importlib.import_module(f".{leftover.kind}", __package__).reap(leftover)


def reap_runs(kind: str, runs: Sequence[str], say: Callable[[str], None]) -> int:
    """End the sandboxes of a kind whose driver is known to be gone; return how many were ended.

    runs: ids of runs that should be dead, such as the earlier parts of a run whose folder is ours now. Their
    sandboxes are ended unless their driver is seen to live; those of other runs where it ran here and is gone.
    What a living run may use is left alone. say: told of every failure; nothing is raised. Costs a few
    milliseconds for the local kinds, and for the others as long as their service takes to answer.
    """
    ended = 0
    try:
        for leftover, why in end(_dead(kind, runs)):
            ended += why is None
            if why is not None:
                say(
                    f"the {kind} sandbox {leftover.name}, left by a run that is gone, could not be ended: {why}"
                )
    except Exception as error:  # what it is called beside must not suffer
        say(f"{kind} sandboxes that runs may have left could not be looked for: {error}")
    return ended


def _dead(kind: str, runs: Sequence[str]) -> list[Leftover]:
    if kind in HOSTED:
        return find(kind)
    found: list[Leftover] = importlib.import_module(f".{kind}", __package__).left_by(runs)
    # A driver that lives may be that of a copy of the run's folder.
    return [each for each in found if each.orphan is not False]
