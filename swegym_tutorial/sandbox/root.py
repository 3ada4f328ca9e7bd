"""The one folder in which a backend keeps its sandboxes, watched so that it never outlives the driver.

Knows how such a folder is recognised and deleted; nothing of what lies in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from . import CLOSING, SandboxError
from .files import remove_tree
from .threads import in_threads
from .watchdog import kill_marked

PREFIX = "swegym-"
MEMORY = Path("/dev/shm")
MEMORY_ROOM = (
    4 << 30
)  # bytes that must be free there and in the machine's memory for sandboxes to be kept there
DRIVER = "driver.json"  # locked by the driver for as long as it lives, and says who it is
_GOODBYE = 5.0  # seconds for the watchdog to see that nothing is left to do


class RootFolder:
    """A new private folder, with a watchdog that deletes it and what runs in it when this process is gone."""

    def __init__(self, parent: Path | None = None, run: str = "") -> None:
        """Make it in `parent`, or where places() says first; run: the id of whose it is.

        Raises SandboxError where it cannot.
        """
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent or places()[0])).resolve()
        except OSError as error:
            raise SandboxError(
                f"no folder for the sandboxes could be made: {error}; is TMPDIR right?"
            ) from error
        self._watchdog = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                str(Path(__file__).with_name("watchdog.py")),
                str(self.path),
                str(os.getpid()),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )
        fresh = self.path / "driver.new"  # gets its name once it is locked: unlocked, it would be a leftover
        self._lock = open(fresh, "w", encoding="utf-8")  # noqa: SIM115 (held until close)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        json.dump({"pid": os.getpid(), "started": started, "run": run}, self._lock)
        self._lock.flush()
        fresh.rename(self.path / DRIVER)

    def close(self, patience: float = CLOSING) -> None:
        """End every process started for a sandbox in it, delete it, and let the watchdog go.

        Raises SandboxError where it is not gone after `patience` seconds, at least one; the watchdog goes on then.
        """
        patience = max(1.0, patience)
        kill_marked(str(self.path))
        (deleted,) = in_threads(remove_tree, [self.path], 1)  # a disk may be stuck
        try:
            deleted.result(patience)
        except TimeoutError:
            raise SandboxError(
                f"the folder {self.path} was not deleted within {patience:.0f} s; its watchdog goes on"
            ) from None
        finally:
            self._lock.close()
            assert self._watchdog.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._watchdog.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._watchdog.wait(_GOODBYE if deleted.done() else 0)


def places() -> list[Path]:
    """Return the folders in which backends keep theirs, the best one now first.

    Sandboxes are many small files that come and go: in memory that costs a tenth of what it costs on disk, and
    a hundredth on an ext4 without journal, which does not reuse an inode for a minute. TMPDIR, where it is set,
    comes before that.
    """
    temporary = Path(tempfile.gettempdir())
    if not MEMORY.is_dir() or not os.access(MEMORY, os.W_OK):
        return [temporary]
    room = os.statvfs(MEMORY)
    free = min(room.f_bavail * room.f_frsize, psutil.virtual_memory().available)
    roomy = free >= MEMORY_ROOM and not room.f_flag & os.ST_NOEXEC and "TMPDIR" not in os.environ
    return [MEMORY, temporary] if roomy else [temporary, MEMORY]


def leftovers(parent: Path | None = None) -> list[Path]:
    """Return the sandbox folders in `parent` (default: in all places) whose driver is dead.

    A watchdog deletes them seconds after the driver's death, so what stays was left by a machine that went
    down or a watchdog that was killed too. `reap` deletes them.
    """
    found = []
    for folder in sorted(f for place in ([parent] if parent else places()) for f in place.glob(f"{PREFIX}*")):
        try:
            with open(folder / DRIVER, encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: others may look too
        except OSError:  # locked by its living driver, another user's, or no folder of ours
            continue
        found.append(folder)
    return found


def reap(folder: Path) -> None:
    """Delete one of the leftovers, and end what still runs for it. Raises SandboxError where it does not go."""
    kill_marked(str(folder))
    remove_tree(folder)
