"""A user namespace for sandboxes that root starts, in which an agent is a user of its own.

The kernel does not hold root to a number of processes (RLIMIT_NPROC), and a sandbox made by root would run as
root outside. So root makes one namespace a backend, in which bubblewrap sets a sandbox up as the mapped root,
and then becomes one of AGENTS users that own nothing else on the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

AGENTS = 4096  # users for agents: sandbox i runs as number i mod AGENTS
FIRST_INSIDE = 1000  # the first agent's user id inside
_WANTED_OUTSIDE = 2_000_000  # the first agent's user id outside, where the machine has as many
_OTHERS_INSIDE = 1_000_000  # the machine's other users: the mapped root may then read what root may read

# The child makes the namespace, waits for its mapping, and forbids further namespaces in it.
_CHILD = """
import ctypes, os, sys
if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):
    sys.exit(os.strerror(ctypes.get_errno()))
print("made", flush=True)
sys.stdin.readline()
with open("/proc/sys/user/max_user_namespaces", "w") as file:
    file.write("0")
print("closed", flush=True)
sys.stdin.readline()
"""


@dataclass(frozen=True)
class UserNamespace:
    """An open user namespace. Agent i is FIRST_INSIDE + i inside and first_outside + i outside."""

    fd: int
    first_outside: int

    def close(self) -> None:
        os.close(self.fd)


def make_user_namespace() -> UserNamespace | None:
    """Make the namespace, as root; None where this root may not (in most containers, say)."""
    first = _first_outside()
    if os.geteuid() != 0 or first is None:
        return None
    mapping = f"0 0 1\n{FIRST_INSIDE} {first} {AGENTS}\n{_OTHERS_INSIDE} 1 {first - 1}\n"
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        if child.stdout.readline() != "made\n":
            return None
        try:
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{child.pid}/{name}").write_text(mapping)
            child.stdin.write("\n")
            child.stdin.flush()
            if child.stdout.readline() != "closed\n":
                return None
            return UserNamespace(os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC), first)
        except OSError:
            return None


def _first_outside() -> int | None:
    """Return where AGENTS user ids start that this namespace has for us; None where it has too few."""
    try:
        lines = Path("/proc/self/uid_map").read_text().splitlines()
    except OSError:
        return None
    inside, _, count = map(int, lines[0].split())
    first = min(_WANTED_OUTSIDE, inside + count - AGENTS - 2)  # the last of 65536 is `nobody`
    return first if len(lines) == 1 and inside == 0 and first > 1 else None
