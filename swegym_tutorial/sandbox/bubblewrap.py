"""The bubblewrap command line of a sandbox.

Knows namespaces, mounts and limits; nothing of tasks, output or deadlines, nor what works on a machine (probe.py).
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from . import REPOSITORY
from .files import FOLDERS, HOME, State
from .limits import Limits
from .userns import FIRST_INSIDE, UserNamespace
from .view import View

TOOLS = ("bash", "prlimit", "setpriv")
_PLACES = "/usr/local/bin:/usr/bin:/bin"  # of the tools, outside and inside
SHARED_MEMORY = 64 << 20  # bytes of /dev/shm, the one other place that can be written to
CLEAN: Mapping[str, str] = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
}  # for bwrap, whose own is readable inside

ENVIRONMENT: Mapping[str, str] = {
    "HOME": HOME,
    "USER": "agent",
    "LOGNAME": "agent",
    "SHELL": "/bin/bash",
    "TERM": "dumb",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "agent",
    "GIT_AUTHOR_EMAIL": "agent@example.org",
    "GIT_COMMITTER_NAME": "agent",
    "GIT_COMMITTER_EMAIL": "agent@example.org",
}


@dataclass(frozen=True)
class Bubblewrap:
    """One way to call bubblewrap that works on this machine.

    namespace: root's own (see userns.py); None where bubblewrap makes one for each command. proc: whether
    /proc can be mounted inside; in some containers it cannot, and programs do without it.
    """

    binary: str
    view: View
    limits: Limits
    namespace: UserNamespace | None
    proc: bool

    def inside(self, agent: int) -> int:
        """The user id inside of the agent of that number."""
        return FIRST_INSIDE + (agent if self.namespace else 0)

    def outside(self, agent: int) -> int | None:
        """The user id outside; None where it is our own."""
        return self.namespace.first_outside + agent if self.namespace else None

    def prefix(self, state: State, agent: int) -> list[str]:
        """The part of the command line that all commands of one sandbox share, up to the environment."""
        write_accounts(state, self.inside(agent))
        arguments = [self.binary, *self._user(), "--unshare-pid", "--unshare-net", "--unshare-ipc"]
        arguments += ["--unshare-uts", "--hostname", "sandbox", "--unshare-cgroup-try"]
        arguments += ["--die-with-parent", "--new-session"]
        for inside, name in FOLDERS.items():
            arguments += ["--perms", "0755", "--dir", os.path.dirname(inside)] if inside == HOME else []
            arguments += ["--bind", str(state.path / name), inside]
        arguments += self.view.arguments  # after /tmp: an interpreter may lie there
        for name in ("passwd", "group"):
            arguments += ["--ro-bind", str(state.path / name), f"/etc/{name}"]
        arguments += ["--proc", "/proc"] if self.proc else []
        arguments += ["--dev", "/dev", "--perms", "1777", "--size", str(SHARED_MEMORY), "--tmpfs", "/dev/shm"]
        arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", REPOSITORY, "--clearenv"]
        for name, value in (*ENVIRONMENT.items(), *self.view.environment):
            arguments += ["--setenv", name, value]
        return arguments

    def _user(self) -> list[str]:
        if self.namespace is None:
            ids = f"--uid {FIRST_INSIDE} --gid {FIRST_INSIDE}"
            return f"--unshare-user {ids} --disable-userns --cap-drop ALL".split()
        fd = (
            self.namespace.fd
        )  # bubblewrap would leave it open inside; but it closes the one that it blocks on
        keep = (
            "--cap-add CAP_SETUID --cap-add CAP_SETGID --cap-add CAP_SETPCAP"  # for setpriv, which drops them
        )
        return f"--userns {fd} --block-fd {fd} --uid 0 --gid 0 --cap-drop ALL {keep}".split()

    def become(self, agent: int, *, may_write: bool = True) -> list[str]:
        """The programs that come before bash: they give up every right and set the limits of each process.

        may_write: False lets no file grow, for a sandbox whose files are over their limit.
        """
        limits, size = self.limits, self.limits.disk_mb << 20 if may_write else 0
        number, processes = self.inside(agent), self.limits.processes + _counted_too()
        drop = f"{tool('setpriv')} --reuid {number} --regid {number} --clear-groups --no-new-privs"
        drop += " --bounding-set=-all --inh-caps=-all"
        limit = f"{tool('prlimit')} --cpu={limits.cpu_seconds}:{limits.cpu_seconds + 1} --as={limits.memory_mb << 20}"
        limit += f" --nproc={processes} --fsize={size} --core=0 --nofile=1024"
        return [*(drop.split() if self.namespace else ()), *limit.split()]

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """What bubblewrap must inherit."""
        return (self.namespace.fd,) if self.namespace else ()


@functools.cache
def tool(name: str) -> str | None:
    """Return where one of TOOLS is; None where it is not.

    Its path is told to bubblewrap, since a search inside would go by a PATH that may lead to the agent's programs.
    """
    return shutil.which(name, path=_PLACES)


def _counted_too() -> int:
    """Processes that count against the limit without being the sandbox's.

    Before Linux 5.14 they are all of the same user, whatever their namespace: then only the meter is exact.
    """
    major, minor = (int(part) for part in platform.release().split(".")[:2])
    return 0 if (major, minor) >= (5, 14) else 4096


def write_accounts(state: State, user: int) -> None:
    """Write /etc/passwd and /etc/group of a sandbox: its agent, and none of the machine's users."""
    passwd = f"root:x:0:0:root:/root:/usr/sbin/nologin\nagent:x:{user}:{user}:agent:{HOME}:/bin/bash\n"
    for name, text in (("passwd", passwd), ("group", f"root:x:0:\nagent:x:{user}:\n")):
        file = state.path / name
        file.write_text(text, encoding="utf-8")
        file.chmod(0o644)
