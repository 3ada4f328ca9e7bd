"""Whether the answer to a task, or a secret of ours, lies about where an agent could find it.

What is looked for never enters the sandbox: what an agent can read there comes out, and is compared here. Not
searched: the repository's own files, which are base_commit's; binary files; programs and packages below /usr and
/opt. Knows nothing of verdicts.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import closing

from .patches import OWN_GIT, HistoryShown, hide_history
from .sandbox import Sandbox, SandboxBackend, SandboxError
from .tasks import Task

SECRETS = (  # environment variables of ours
    *("TINKER_API_KEY", "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    *("WANDB_API_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GITHUB_TOKEN"),
)
SHORTEST = 12  # characters of a line that tells anything
SEARCH_TIMEOUT = 120.0  # seconds
OUTPUT_BYTES = 32 << 20

# Prints PATH NUL LINE for each long line of small text files. A sandbox without isolation has no /testbed: there
# only its own folders are searched, since all of the machine lies open anyway.
_SEARCH = r"""
export LC_ALL=C
lines() { grep -s -a -H -Z -E -e '.{12,}' "$@"; }
texts() { xargs -0 -r grep -s -I -H -Z -E -e '.{12,}' --; }
others() { GIT_DIR="$PWD/.git" GIT_WORK_TREE="$PWD" git ls-files -o -z; }
files() {  # below a place, but not in what is mounted there: of the local sandbox, Python and its packages
    local place=$1 skip=() point
    while read -r _ point _; do
        printf -v point %b "$point"
        [[ $point == "$place"/* ]] && skip+=(-path "$point" -prune -o)
    done < /proc/self/mounts
    find "$@" -xdev "${skip[@]}" -type f -size -1024k -print0
}
home=$(cd ~ && pwd)
{
    others
    if [[ $PWD == /testbed ]]; then
        files / -maxdepth 1
        for place in /home /mnt /root /run /srv /tmp /var/tmp /workspace "$home"; do files "$place"; done
        files /opt -maxdepth 2
    else
        files "$home"; files "${TMPDIR:?}"
    fi
} 2> /dev/null | texts
env | lines --label='the environment' -
if [[ $PWD == /testbed ]]; then
    for file in /proc/[0-9]*/environ /proc/[0-9]*/cmdline; do
        tr '\0' '\n' 2> /dev/null < "$file" | lines --label="$file" -
    done
fi
echo 'the search is over' | lines --label=. -
"""
_OVER = ".\0the search is over"
_TRACKED = f"{OWN_GIT}LC_ALL=C git grep -h -I -E -e '.{{{SHORTEST},}}' HEAD"

# What was searched and shows nothing, by backend: its sandboxes for one task are all alike. No dict holds
# them, for own ones may be dataclasses: those have no hash, or with slots no weak reference.
_clean: deque[tuple[Callable[[], SandboxBackend | None], set[Hashable]]] = deque(maxlen=16)
_lock = threading.Lock()


class AnswerShown(SandboxError):
    """An answer or a secret lies about in a sandbox that an agent was to get; the text says what and where."""


def prepare(sandbox: Sandbox, task: Task, sandboxes: SandboxBackend) -> None:
    """Make a fresh sandbox ready for an agent, and check that no answer lies about.

    The history of an image's repository is hidden, and that is checked, each time; a repository that was made of
    the task's files is one commit, which materialise() has checked. What else there is to read is searched once a
    task and backend. Raises HistoryShown and AnswerShown, and SandboxError where the sandbox fails.
    """
    if task.image:
        hide_history(sandbox, task)
    clean = _clean_of(sandboxes)
    key = (task.instance_id, task.base_commit, task.image, task.patch, task.test_patch)
    if key not in clean:
        if found := answers_in(sandbox, task):
            raise AnswerShown(f"{task.instance_id}: an agent could read the answer: {'; '.join(found)}")
        clean.add(key)


def _clean_of(sandboxes: SandboxBackend) -> set[Hashable]:
    """Return the keys of what was searched in this backend's sandboxes; holds on to no backend that allows that."""
    with _lock:
        for known, clean in _clean:
            if known() is sandboxes:
                return clean
        try:
            _clean.append((weakref.ref(sandboxes), set()))
        except TypeError:  # it has slots, and none for weak references
            _clean.append((lambda: sandboxes, set()))
        return _clean[-1][1]


def check_answers(sandboxes: SandboxBackend, task: Task) -> str:
    """Prepare a sandbox as for an agent; return in words what lies about, "" for nothing. Raises SandboxError."""
    with closing(sandboxes.open(task)) as sandbox:
        try:
            prepare(sandbox, task, sandboxes)
        except (HistoryShown, AnswerShown) as error:
            return str(error)
    return ""


def answers_in(sandbox: Sandbox, task: Task, secrets: Mapping[str, str] = os.environ) -> list[str]:
    """Search a prepared sandbox for the task's gold patch, its hidden tests, and secrets; say what is where.

    secrets: where the SECRETS are found, by name. Raises SandboxError where it cannot be searched.
    """
    result = sandbox.exec(_SEARCH, timeout=SEARCH_TIMEOUT, output_bytes=OUTPUT_BYTES)
    if not result.output.rstrip().endswith(_OVER):
        why = f"after {result.seconds:.0f} s" if result.timed_out else result.output[-300:].strip()
        raise SandboxError(f"{task.instance_id}: the sandbox could not be searched for answers: {why}")
    told = _by_file(result.output.splitlines())
    found = _found(told, task, secrets, frozenset())
    if not found:
        return []
    # What the repository's own files hold too is no answer, such as a `return False` in a copy of them.
    tracked = sandbox.exec(_TRACKED, timeout=SEARCH_TIMEOUT, output_bytes=OUTPUT_BYTES).output
    return _found(told, task, secrets, frozenset(map(str.strip, tracked.splitlines())))


def _found(
    told: Mapping[str, set[str]], task: Task, secrets: Mapping[str, str], known: frozenset[str]
) -> list[str]:
    """Say which files hold at least half of the lines that are looked for and not known, or a secret."""
    looked_for = {"the gold patch": added_lines(task.patch), "the hidden tests": added_lines(task.test_patch)}
    found = []
    for path, lines in told.items():
        for what, wanted in looked_for.items():
            wanted -= known
            hits = len(wanted & lines)
            if wanted and 2 * hits >= len(wanted):
                found.append(f"{path} holds {hits} of the {len(wanted)} lines of {what}")
        for name in SECRETS:
            secret = secrets.get(name, "")
            if len(secret) >= 8 and any(secret in line for line in lines):
                found.append(f"{path} holds the secret in {name}")
    return found


def _by_file(output: Iterable[str]) -> dict[str, set[str]]:
    """Return path -> its lines, also as they are without the mark of a patch."""
    told: dict[str, set[str]] = defaultdict(set)
    for row in output:
        path, mark, line = row.partition("\0")
        if mark:
            told[path] |= {line.strip(), line.strip().removeprefix("+").strip()}
    return told


def added_lines(patch: str) -> frozenset[str]:
    """Return the lines that a patch adds and that tell anything, stripped: long, and not there before."""
    rows = patch.splitlines()
    added = {row[1:].strip() for row in rows if row.startswith("+") and not row.startswith("+++ ")}
    before = {row[1:].strip() for row in rows if row.startswith((" ", "-"))}
    return frozenset(line for line in added - before if len(line) >= SHORTEST)
