"""Which files of this machine a sandbox sees: a system to run programs, the interpreter, and nothing else.

Python and its packages are shown read-only where they lie; this package's own folder, its source checkout and
with them the tasks' solutions are hidden wherever they lie. Knows paths alone; nothing of commands.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
SHIMS = "/opt/agent/bin"  # inside: commands that the interpreter's own bin folder lacks
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "mime.types")
# Names are looked up in files alone: the machine's own list may name services, whose libraries each look-up would load.
_NAMES = "passwd: files\ngroup: files\nhosts: files\n"
_PARTS = ("bin", "lib", sys.platlibdir, "pyvenv.cfg")  # of a prefix


@dataclass(frozen=True)
class View:
    """What is shown of the machine's files, as arguments for bubblewrap, and the environment that goes with it."""

    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]


def make_view(folder: Path) -> View:
    """Look at this machine and this interpreter; `folder`: ours, to keep files that are shown inside.

    Raises OSError where the files cannot be written.
    """
    packages = package_folders()
    shown = {Path("/usr"), Path("/usr/lib"), Path("/usr/local/lib"), *interpreter_folders(), *packages}
    etc, shims = _write_etc(folder / "etc"), _write_shims(folder / "bin")
    arguments = [*_system(), "--ro-bind", str(etc), "/etc", *layers(shown, hidden_folders(shown))]
    arguments += [*_way_to(Path(SHIMS)), "--ro-bind", str(shims), SHIMS] if any(shims.iterdir()) else []
    path = f"{sys.prefix}/bin:{SHIMS}:/usr/local/bin:/usr/bin:/bin"
    environment = [("PATH", path)]
    if packages:  # the user's site folder, say: inside, the interpreter would not look there by itself
        environment.append(("PYTHONPATH", ":".join(map(str, packages))))
    return View(tuple(arguments), tuple(environment))


def _system() -> list[str]:
    arguments = []
    for name in _SYSTEM:
        path = f"/{name}"
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    return arguments


def _way_to(path: Path, made: Collection[Path] = ()) -> list[str]:
    """Make the folders above a path with ordinary rights: bubblewrap's own are unreadable to a second user.

    made: folders that are there.
    """
    folders = [above for above in reversed(path.parents[:-1]) if above not in made]
    return [a for above in folders for a in ("--perms", "0755", "--dir", str(above))]


def interpreter_folders() -> list[Path]:
    """Return what this interpreter and its standard library are run from, links and targets alike.

    Only the parts of its prefixes that belong to it: a virtual environment may lie in, or be, a source checkout.
    """
    prefixes = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    prefixes |= {os.path.realpath(prefix) for prefix in prefixes}
    prefixes.add(os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
    parts = [Path(prefix, part) for prefix in sorted(prefixes - {"/"}) for part in _PARTS]
    return [path for path in parts if path.exists()]


def package_folders() -> list[Path]:
    """Return the folders of installed packages on sys.path that lie outside the interpreter's own."""
    inside = (*interpreter_folders(), Path("/usr"))
    entries = [Path(entry) for entry in dict.fromkeys(sys.path)]
    folders = [path for path in entries if path.name in ("site-packages", "dist-packages") and path.is_dir()]
    return [path for path in folders if not any(path.is_relative_to(folder) for folder in inside)]


def hidden_folders(shown: Iterable[Path]) -> set[Path]:
    """Return the folders that would show a task's solution: this package, its copies installed where an
    interpreter's folders are shown, and the source checkouts that they lie in."""
    copies = {PACKAGE} | {Path(place, PACKAGE.name) for place in sys.path if place}
    for folder in shown:
        for place in ("", "python3*/site-packages", "python3*/dist-packages"):
            copies |= set(folder.glob(f"{place}/{PACKAGE.name}".lstrip("/")))
    copies = {
        copy for copy in copies if copy.is_dir()
    }  # each by its own name and, links followed, by the true one
    hidden = {copy for copy in copies if not copy.is_symlink()} | {copy.resolve() for copy in copies}
    return hidden | {above for folder in hidden for above in folder.parents if _is_checkout(above)}


def _is_checkout(folder: Path) -> bool:
    signs = (".git", "pyproject.toml", "setup.py")
    return folder != Path("/") and any((folder / sign).exists() for sign in signs)


def layers(shown: set[Path], hidden: set[Path]) -> list[str]:
    """Return bubblewrap's arguments that show some folders read-only and hide some, the deepest rule winning.

    A folder hidden in a shown one becomes empty, one shown in a hidden one appears in it, and so on.
    """
    rules: dict[Path, bool] = {}
    for path in sorted(shown | hidden, key=lambda p: len(p.parts)):
        above = next((p for p in path.parents if p in rules), None)
        visible = path not in hidden
        if visible != (rules[above] if above else False):
            rules[path] = visible
    arguments: list[str] = []
    made: set[Path] = set()  # nothing is put over these later: what comes later lies deeper, or beside them
    for path, visible in rules.items():
        if not visible:
            arguments += ["--perms", "0755", "--size", "65536", "--tmpfs", str(path)]
        else:
            arguments += [*_way_to(path, made), "--ro-bind", str(path), str(path)]
            made.update(path.parents)
    for path, visible in rules.items():
        if not visible:
            arguments += ["--remount-ro", str(path)]
    return arguments


def _write_etc(folder: Path) -> Path:
    """Write the few files of /etc that programs need; a sandbox's users are laid over them."""
    folder.mkdir()
    for name in _ETC:
        source = Path("/etc", name)
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore_dangling_symlinks=True)
        elif source.is_file():
            shutil.copyfile(source, folder / name)
    (folder / "hosts").write_text("127.0.0.1 localhost sandbox\n::1 localhost\n", encoding="utf-8")
    (folder / "nsswitch.conf").write_text(_NAMES, encoding="utf-8")
    for name in ("passwd", "group"):
        (folder / name).touch()
    for base, _, names in os.walk(folder):  # readable inside, whatever our umask
        os.chmod(base, 0o755)
        for name in names:
            if not os.path.islink(path := os.path.join(base, name)):
                os.chmod(path, 0o644)
    return folder


def _write_shims(folder: Path) -> Path:
    """Write the commands python, python3 and pytest where the interpreter's bin folder has none."""
    folder.mkdir()
    folder.chmod(0o755)
    python = shlex.quote(sys.executable)
    commands = {"python": python, "python3": python, "pytest": f"{python} -m pytest"}
    for name, command in commands.items():
        if not Path(sys.prefix, "bin", name).exists():
            shim = folder / name
            shim.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
            shim.chmod(0o755)
    return folder
