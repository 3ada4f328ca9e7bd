"""What runs inside a container on our behalf: small bash programs that hold deadlines and move files.

A command runs under SUPERVISE, which tells on its own stderr how it went while the command's two streams go in
order to its stdout: one round trip a command. An engine may lose the end of one stream and not that of the other,
so both end with the same mark, which nobody can know before the command's last process is gone: see Stdout. All
but the start of the command itself is done by bash's builtins, so that a sandbox at its limit of processes is
still supervised. Knows bash and /proc; nothing of engines, tasks or threads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from . import REPOSITORY

MARK_SIZE = 36  # bytes
BASH = ("/bin/bash", "-p", "-c")  # -p: no file or function named by the environment is read

# Process 1 of a container: it lives for $1 seconds, reaps what is orphaned, and no signal from inside ends it,
# also none of those that bash has a handler for. It has no child that could be killed. It wakes up since bash reaps nothing while `read -t` waits.
_KEEP = """
trap '' {1..16} {18..64} 2> /dev/null
exec {never}<> <(:) || exec sleep "$1"
while (( SECONDS < $1 )); do read -r -t 0.2 -u $never; done
"""

# Ends every process but the $keep ones and this one. Where process 1 alone is kept, the kernel kills all others
# at once, and no fork outruns it.
_SWEEP = """
sweep() {
    local pid line clean end=$(( SECONDS + 20 ))
    while (( SECONDS < end )); do
        clean=1
        [[ $keep == 1 ]] && kill -9 -1
        for pid in /proc/[0-9]*; do
            pid=${pid##*/}
            [[ " $keep $$ " == *" $pid "* ]] && continue
            read -r line < "/proc/$pid/stat" || continue
            [[ ${line##*) } == [ZX]* ]] && continue
            kill -9 "$pid"
            clean=
        done
        [[ $clean ]] && return
    done
    return 1
}
"""

# Writes $mark to the descriptor $1: a random one, made only now. The command may have made its stdout non-blocking,
# which is ours too: it is opened anew where that can be done, and tried again and again where not.
_MARK = """
mark() {
    read -r mark < /proc/sys/kernel/random/uuid
    [[ ${#mark} == 36 ]] || printf -v mark '%09x%09x%09x%09x' "$SRANDOM" "$SRANDOM" "$SRANDOM" "$SRANDOM"
    until printf %s "$mark" >> "/proc/self/fd/$1" || printf %s "$mark" >&"$1"; do read -r -t 0.02 <> <(:); done
}
"""

_REOPEN = f"[[ -d {REPOSITORY} && ! -L {REPOSITORY} ]] || {{ rm -rf {REPOSITORY}; mkdir -p {REPOSITORY}; }}"

# $1: seconds; $2: what to keep; $3: the code, or $4: a file that holds it.
# Monitor mode gives the command a process group of its own, so that `kill 0` stays in it.
_SUPERVISE = f"""
exec 3>&2 2> /dev/null 5>&1 < /dev/null
keep=$2
{_SWEEP}
{_MARK}
{_REOPEN}
cd {REPOSITORY} || exit
code=$3
[[ $4 ]] && code="eval \\"\\$(cat $4; rm -f $4)\\""
echo started >&3
exec 4< <(
    set -m
    /bin/bash -c "$code" < /dev/null >&5 2>&5 3>&- 5>&- &
    wait $!
    echo $?
)
read -r -t "$1" -u 4 status
ended=$?
sweep || exit
[[ $status =~ ^[0-9]{{1,3}}$ ]] || status=137
mark 5
word="exit $status"
(( ended > 128 )) && word=late
printf '\\n%s %s\\n' "$word" "$mark" >&3
exit 0
"""

_CLEAR = f"""
exec 3>&2 2> /dev/null
keep=$1
{_SWEEP}
sweep && echo swept >&3
"""

# A path is walked a step at a time, so that no step follows a link. $1: the path; $2: bytes.
_READ = f"""
exec 3>&2 2> /dev/null
{_MARK}
set -f; IFS=/; parts=(${{1#/}}); unset IFS
path=
for part in "${{parts[@]}}"; do
    path+=/$part
    [[ -L $path ]] && exit 1
done
[[ -f $path && -r $path ]] || exit 1
head -c "$2" -- "$path" || exit 1
mark 1
echo "read $mark" >&3
"""

# $1: the path; $2: the data in base64, or $3: a file that holds it, which is moved.
_WRITE = f"""
exec 3>&2
no() {{ echo "no $*" >&3; exit 1; }}
{_REOPEN}
set -f; IFS=/; parts=(${{1#/}}); unset IFS
path=
for part in "${{parts[@]:0:${{#parts[@]}}-1}}"; do
    path+=/$part
    [[ -L $path || -e $path && ! -d $path ]] && no "$path is a link or a file in the sandbox, not a folder"
done
new=$path/.$RANDOM$RANDOM.new
words=$(mkdir -p "${{path:-/}}" 2>&1) || no "$words"
[[ -L $1 || -e $1 && ! -f $1 ]] && no "it is not a regular file in the sandbox, so it is not written to"
if [[ $3 ]]; then words=$(mv -f "$3" "$new" 2>&1); else words=$(printf %s "$2" | base64 -d 2>&1 > "$new"); fi ||
    no "$words"
if [[ -f $1 ]]; then chmod --reference="$1" "$new"; else chmod 644 "$new"; fi
words=$(mv -f "$new" "$1" 2>&1) || no "$words"
echo written >&3
"""

_OTHERS = 'for pid in /proc/[0-9]*; do pid=${pid##*/}; (( pid == $$ )) || echo "$pid"; done'


def keeper(lifetime: float) -> list[str]:
    """The program to start a container with: it does nothing for `lifetime` seconds."""
    return [*BASH, _KEEP, "keeper", str(math.ceil(lifetime))]


def supervise(code: str, file: str, timeout: float, keep: str) -> list[str]:
    """Run the code, or that in a file of the sandbox, for `timeout` seconds at most; then end all but `keep`."""
    return [*BASH, _SUPERVISE, "supervisor", f"{max(timeout, 0.001):.3f}", keep, code, file]


def clear(keep: str) -> list[str]:
    """End every process but those of `keep`, ids with spaces between; it says "swept"."""
    return [*BASH, _CLEAR, "supervisor", keep]


def read(path: str, size: int) -> list[str]:
    """Print up to so many bytes of a regular file; it says "read" and a mark, or nothing where there is none."""
    return [*BASH, _READ, "reader", path, str(size)]


def write(path: str, encoded: str, file: str) -> list[str]:
    """Put base64 data, or a file of the sandbox, at a path; it says "written", or "no" and the reason."""
    return [*BASH, _WRITE, "writer", path, encoded, file]


def others() -> list[str]:
    """Print the ids of the processes that are there: in a fresh container, those to keep."""
    return [*BASH, _OTHERS, "others"]


class Stdout:
    """Passes on what a program writes to stdout, but for the mark at its end.

    The mark is the same as that in the program's last word on stderr. Nothing can be missing where both came: what
    is written to one stream comes in its order. A command cannot forge it, since it is made at random when all the
    command's processes are dead; a word that the command itself says has another one, or none.
    """

    def __init__(self, out: Callable[[bytes], object]) -> None:
        self._out, self._held = out, b""  # the last bytes, which may be the mark

    def add(self, data: bytes) -> None:
        if len(data) < MARK_SIZE:
            data = self._held + data
        elif self._held:
            self._out(self._held)
        self._out(data[:-MARK_SIZE])
        self._held = data[-MARK_SIZE:]

    def end(self, mark: bytes | None) -> bool:
        """Return whether it ended with the mark, and pass on what is left: all that is not the mark."""
        whole = mark is not None and self._held == mark
        if not whole:
            self._out(self._held)
        self._held = b""
        return whole


@dataclass(frozen=True)
class Told:
    """What SUPERVISE said of a command."""

    started: bool
    exit_code: int | None = None  # None: not said, so it was killed itself; or the command was late
    late: bool = False
    mark: bytes | None = None  # with which its stdout ends; None: it did not come to its end


_LAST = re.compile(rb"(?:^|\n)(?:(?:exit (\d{1,3})|late|read) ([0-9a-f-]{36}))\n\Z")


def told(head: bytes, words: bytes) -> Told:
    """Read the first and the last of what it said on stderr.

    The first word is spoken before the command is there, the last one when nothing else is alive, unless the
    command has ended the supervisor and speaks for it: then the supervisor's exit code is not 0.
    """
    found = _LAST.search(words)
    if not found:
        return Told(b"started\n" in head)
    return Told(True, int(found[1]) if found[1] else None, late=b"late " in found[0], mark=found[2])
