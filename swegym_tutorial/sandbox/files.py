"""The folders of one sandbox on this machine: read, written and deleted without following an agent's links.

/testbed, /tmp and /home/agent inside are folders of a private state folder outside, so files are read and
written directly. Everything in there is hostile: links that lead out, pipes, folders without rights, trees
deeper than any path. Knows nothing of commands or namespaces.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import REPOSITORY, SandboxError

HOME = "/home/agent"
FOLDERS: Mapping[str, str] = {
    REPOSITORY: "testbed",
    "/tmp": "tmp",
    HOME: "home",
}  # inside -> in the state folder
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK = 1 << 20


@dataclass(frozen=True)
class State:
    """The state folder of one sandbox. owner: the user and group id of its files; None leaves them ours."""

    path: Path
    owner: int | None = None

    @functools.cached_property
    def folders(self) -> tuple[Path, ...]:
        return tuple(self.path / name for name in FOLDERS.values())

    def make(self) -> None:
        """Make the state folder and the agent's temporary and home folder; the repository comes from a copy."""
        self.path.mkdir(mode=0o700)
        for name in ("tmp", "home"):
            os.mkdir(self.path / name, 0o755)
            self.give(self.path / name)

    def give(self, target: int | Path) -> None:
        """Make an open file or a path that we made the agent's."""
        if self.owner is not None:
            os.chown(target, self.owner, self.owner)

    def reopen(self) -> None:
        """Give the top folders ordinary rights again, should the agent have taken them away.

        One that it removed, or put something else in place of, becomes an empty folder: without isolation it can.
        """
        for folder in self.folders:
            try:
                mode = os.lstat(folder).st_mode
            except FileNotFoundError:
                mode = 0
            if not stat.S_ISDIR(mode):
                folder.unlink(missing_ok=True)
                os.mkdir(folder, 0o755)
                self.give(folder)
            elif mode & 0o755 != 0o755:
                os.chmod(folder, stat.S_IMODE(mode) | 0o755)

    def write(self, path: str, data: bytes) -> None:
        """Put data at an absolute path inside, in place of a regular file or of nothing.

        It is written beside the path and renamed onto it, so that the file's own rights do not matter; they
        are kept. Raises SandboxError for a path that leads elsewhere, with what is wrong with it.
        """
        with self._parent(path, make=True) as (folder, name):
            try:
                old = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                old = None
            if old is not None and not stat.S_ISREG(old.st_mode):
                raise SandboxError(f"{path} in the sandbox is not a regular file, so it is not written to")
            new = f".{os.urandom(6).hex()}.new"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(new, flags, 0o644, dir_fd=folder), "wb") as file:
                self.give(file.fileno())
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode) if old else 0o644)
                file.write(data)
            os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)

    def read(self, path: str, limit: int) -> bytes:
        """Return up to limit + 1 bytes of the regular file at an absolute path inside.

        Raises FileNotFoundError where there is none, and SandboxError for a path outside the folders.
        """
        missing = FileNotFoundError(f"no regular file at {path} in the sandbox")
        try:
            with self._parent(path, make=False) as (folder, name):
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not block
                with open(os.open(name, flags, dir_fd=folder), "rb") as file:
                    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                        raise missing
                    return file.read(limit + 1)
        except OSError:
            raise missing from None

    @contextlib.contextmanager
    def _parent(self, path: str, *, make: bool) -> Iterator[tuple[int, str]]:
        """Open the folder that holds `path`, a step at a time so that no step follows a link."""
        top, parts = _split(path)
        folder = os.open(self.path / top, _FOLDER_FLAGS)
        try:
            for part in parts[:-1]:
                inner = self._enter(folder, part, path, make=make)
                os.close(folder)
                folder = inner
            yield folder, parts[-1]
        finally:
            os.close(folder)

    def _enter(self, folder: int, part: str, path: str, *, make: bool) -> int:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=folder)
                made = os.open(part, _FOLDER_FLAGS, dir_fd=folder)
                self.give(made)
                return made
        try:
            return os.open(part, _FOLDER_FLAGS, dir_fd=folder)
        except NotADirectoryError:
            if not make:
                raise
            raise SandboxError(
                f"{part!r} in {path} is a link or a file in the sandbox, not a folder"
            ) from None


def _split(path: str) -> tuple[str, list[str]]:
    """Return the folder of the state folder that `path` lies in, and its parts below that."""
    for inside, name in FOLDERS.items():
        if path.startswith(inside + "/") and "\0" not in path:
            parts = [part for part in path[len(inside) :].split("/") if part not in ("", ".")]
            if parts and ".." not in parts:
                return name, parts
    raise SandboxError(
        f"{path!r} is no path of a file under {', '.join(FOLDERS)}, where alone files are kept"
    )


@dataclass(frozen=True)
class Snapshot:
    """A folder in memory, from which copies are made faster than from files. Links are left out."""

    entries: tuple[tuple[str, int, bytes | None], ...]  # path, mode, content; None for a folder

    @staticmethod
    def of(folder: Path) -> Snapshot:
        """Read every file and folder below `folder`, and `folder` itself as the path ""."""
        entries: list[tuple[str, int, bytes | None]] = []
        for base, _, names in os.walk(folder):
            inside = os.path.relpath(base, folder)
            start = "" if inside == "." else inside + "/"
            entries.append((start, 0o755, None))
            for name in sorted(names):
                full = os.path.join(base, name)
                with open(full, "rb") as file:
                    entries.append((start + name, stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read()))
        return Snapshot(tuple(entries))

    def write(self, folder: Path, owner: int | None) -> None:
        """Write the copy at `folder`, which must not exist, as the files of `owner` (None: ours)."""
        for inside, mode, content in self.entries:
            path = f"{folder}/{inside}"
            if content is None:
                os.mkdir(path, mode)
                if owner is not None:
                    os.chown(path, owner, owner)
                continue
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            try:
                if owner is not None:
                    os.fchown(file, owner, owner)
                at = 0
                while at < len(content):
                    at += os.write(file, content[at : at + _CHUNK])
            finally:
                os.close(file)


def remove_tree(folder: Path, patience: float = 10.0) -> None:
    """Delete a folder and all in it, whatever rights and depth; none is fine too.

    Only for folders that no living process of an agent can write to; tries again while a dying one still does.
    Raises SandboxError where it does not go in `patience` seconds.
    """
    with contextlib.suppress(OSError):
        _remove_quickly(folder)
    end = time.monotonic() + patience
    while folder.exists():
        subprocess.run(["chmod", "-R", "u+rwX", folder], stderr=subprocess.DEVNULL)
        done = subprocess.run(["rm", "-rf", folder], stderr=subprocess.PIPE, text=True, errors="replace")
        if done.returncode and time.monotonic() > end:
            raise SandboxError(f"the folder {folder} could not be deleted: {done.stderr.strip()[-300:]}")
        if done.returncode:
            time.sleep(0.05)


def _remove_quickly(folder: Path) -> None:
    """Delete an ordinary tree. Holds one file open at a time, unlike shutil.rmtree, which holds one a level."""
    folders = [os.fspath(folder)]
    for path in folders:  # grows as it goes: parents before children
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    os.unlink(entry.path)
    for path in reversed(folders):
        os.rmdir(path)
