"""Case 10 (SWE-bench#465, mini-swe-agent#787): no answer, and no secret of ours, lies about in an agent's sandbox."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swegym_tutorial import answers
from swegym_tutorial.answers import SECRETS, AnswerShown, added_lines, answers_in, check_answers, prepare
from swegym_tutorial.patches import hide_history, touched_files
from swegym_tutorial.sandbox import CommandResult, Sandbox, SandboxBackend, SandboxError, backend
from swegym_tutorial.tasks import GIT_ENV, Task, TaskError, load_tasks, materialise


@pytest.fixture(scope="module")
def answered() -> Task:
    """A task whose patches add lines that are long enough to be told from others."""
    task = load_tasks()[0]
    assert added_lines(task.patch) and added_lines(task.test_patch)
    return task


def test_case_10_neither_answers_nor_secrets_lie_about(
    any_backend: SandboxBackend, answered: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, f"secret-{secrets.token_hex(8)}")
    with closing(any_backend.open(answered)) as box:
        assert answers_in(box, answered) == []
        shown = box.exec("env; ps -eww 2>&1 || ps 2>&1", timeout=60).output
    assert not [name for name in SECRETS if os.environ[name] in shown]
    assert check_answers(any_backend, answered) == ""


PLACES = ("build/lib/copy.py", "/copy.orig", "/.hidden/x")  # in the repository, /tmp and the home


def test_case_10_what_lies_about_is_told(any_backend: SandboxBackend, answered: Task) -> None:
    with closing(any_backend.open(answered)) as box:
        box.write_file("/tmp/copy.orig", answered.patch.encode() + answered.test_patch.encode())
        plant = 'cd "$REPO"; mkdir -p build/lib ~/.hidden; cp "${TMPDIR:-/tmp}/copy.orig" build/lib/copy.py'
        plant += "; cp build/lib/copy.py ~/.hidden/x; echo build > .git/info/exclude"
        done = box.exec(plant.replace("$REPO", "${REPO:-/testbed}"), timeout=60)
        assert done.exit_code == 0, done.output
        found = answers_in(box, answered)
    for place in PLACES:
        for what in ("the gold patch", "the hidden tests"):
            assert any(f"{place} holds" in told and told.endswith(f"lines of {what}") for told in found), (
                found
            )
    assert len(found) == 6


def test_case_10_the_environment_and_the_processes_are_searched_too(
    any_backend: SandboxBackend, answered: Task
) -> None:
    with closing(any_backend.open(answered)) as box:
        shown = {"HF_TOKEN": "agent@example.org"}  # a text that stands in the environment of all kinds
        found = answers_in(box, answered, shown)
        processes = (
            box.exec("test -r /proc/self/environ", timeout=60).exit_code == 0
        )  # not in every container
    assert "the environment holds the secret in HF_TOKEN" in found
    if processes and any_backend.name != "subprocess":  # where the processes are those of the machine
        assert any(told.startswith("/proc/") for told in found)


def test_case_10_what_the_repository_holds_itself_is_no_answer(answered: Task) -> None:
    line = "return some_usual_value"
    common = replace(answered, patch=f"--- a/x\n+++ b/x\n@@ -1 +1,2 @@\n x\n+    {line}\n")
    with closing(backend("local")) as made, closing(made.open(answered)) as box:
        box.write_file("/testbed/copy.py", f"  {line}\n".encode())
        assert answers_in(box, common) == ["copy.py holds 1 of the 1 lines of the gold patch"]
        box.exec(f"echo '{line}' > src/own.py; git add src/own.py; git commit -q -m x", timeout=60)
        assert answers_in(box, common) == []


def test_case_10_an_agents_sandbox_in_which_the_answer_lies_is_refused(answered: Task) -> None:
    with closing(backend("local")) as made:
        with closing(made.open(answered)) as box:
            box.write_file("/tmp/solution", answered.patch.encode())
            with pytest.raises(AnswerShown, match="could read the answer: /tmp/solution holds"):
                prepare(box, answered, made)
            box.exec("rm /tmp/solution", timeout=60)
            prepare(box, answered, made)
        with closing(made.open(answered)) as box:
            box.write_file("/tmp/solution", answered.patch.encode())
            prepare(box, answered, made)  # one search a task and backend: its sandboxes are all alike
            with pytest.raises(AnswerShown):
                prepare(box, replace(answered, instance_id="another"), made)


CHILD = """
import json, os
from contextlib import closing
from swegym_tutorial import load_tasks
from swegym_tutorial.answers import answers_in
from swegym_tutorial.sandbox import backend
task = load_tasks()[0]
with closing(backend("local")) as made, closing(made.open(task)) as box:
    seen = box.exec("cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\\\0' '\\\\n'; ls /proc | grep -c '^[0-9]'", timeout=60)
    print(json.dumps([answers_in(box, task), seen.output]))
"""


def test_case_10_a_driver_started_with_secrets_shows_none_of_them() -> None:
    # Set before the process starts, so that they stand in its /proc/PID/environ for as long as it lives.
    given = {name: f"secret-{secrets.token_hex(8)}" for name in SECRETS}
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found, seen = json.loads(done.stdout)
    assert found == [] and "secret-" not in seen
    assert int(seen.split()[-1]) < 12  # its own processes alone


def test_case_10_a_sandbox_that_cannot_be_searched_is_loud(answered: Task) -> None:
    with closing(backend("local")) as made, closing(made.open(answered)) as box:
        box.exec("mkdir ~/bin; printf '#!/bin/sh\\n' > ~/bin/grep; chmod +x ~/bin/grep", timeout=60)
        broken: Any = _Changed(box, "PATH=~/bin:$PATH\n")
        with pytest.raises(SandboxError, match="could not be searched for answers"):
            answers_in(broken, answered)


def test_what_is_mounted_in_a_place_is_not_searched(tmp_path: Path) -> None:
    # Python's packages lie in the local sandbox where they lie on this machine, perhaps in /tmp or in a home: a
    # million lines, and on the same device as the rest where TMPDIR is on the same disk.
    place, mounts = tmp_path / "place", tmp_path / "mounts"
    for name in ("mounted with space/lib/x", "mounted with space too/x", "other/x", "x"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("text\n")
    at = f"{place}/mounted with space".replace(" ", "\\040")
    mounts.write_text(f"dev {tmp_path} ext4 rw 0 0\ndev {place} ext4 rw 0 0\ndev {at} ext4 ro 0 0\n")
    function = answers._SEARCH[answers._SEARCH.index("files() {") : answers._SEARCH.index("home=")]
    code = f"{function}\nfiles '{place}'".replace("/proc/self/mounts", f"'{mounts}'")
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    found = sorted(done.stdout.rstrip("\0").split("\0"))
    assert found == [f"{place}/{name}" for name in ("mounted with space too/x", "other/x", "x")]


class _Changed:
    """A sandbox in which something comes before each command."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.box, name)

    def __init__(self, box: Sandbox, before: str) -> None:
        self.box, self.before = box, before

    def exec(self, command: str, **options: Any) -> CommandResult:
        return self.box.exec(self.before + command, **options)


def test_case_10_leftovers_of_an_images_makers_are_removed(answered: Task) -> None:
    module, test = touched_files(answered.patch)[0], touched_files(answered.test_patch)[0]
    folder, name = module.rpartition("/")[0], module.rpartition("/")[2].removesuffix(".py")
    kept = f"{folder}/__pycache__/other.cpython-311.pyc"
    with closing(backend("local")) as made, closing(made.open(answered)) as box:
        box.write_file("/testbed/a.rej", answered.patch.encode())
        box.write_file("/testbed/.pytest_cache/v/cache/lastfailed", answered.fail_to_pass[0].encode())
        box.write_file("/tmp/model.patch", answered.patch.encode())
        box.write_file(f"/testbed/{module}.orig", answered.patch.encode())
        box.write_file(f"/testbed/{folder}/__pycache__/{name}.cpython-311.pyc", b"x")
        tests = test.rpartition("/")[0]
        box.write_file(
            f"/testbed/{tests}/__pycache__/{test[len(tests) + 1 : -3]}.cpython-311-pytest-8.pyc", b"x"
        )
        box.write_file(f"/testbed/{kept}", b"x")
        box.exec("printf '%s\\n' '*.pyc' '*.orig' '*.rej' .pytest_cache > .git/info/exclude", timeout=60)
        assert answers_in(box, answered)
        hide_history(box, answered)
        left = box.exec("git ls-files -o; ls /tmp/*.patch 2> /dev/null", timeout=60).output.split()
        assert left == [kept] and answers_in(box, answered) == []


def test_case_10_a_repository_made_of_files_is_checked(answered: Task, tmp_path: Path) -> None:
    for name in (".git/config", "sub/.git/HEAD", "x/.GIT/hooks/post-checkout"):
        hostile = replace(answered, files={**answered.files, name: "x"}, base_commit="")
        with pytest.raises(TaskError, match="lies in a git folder"):
            materialise(hostile, tmp_path / name.replace("/", "-"))


def test_case_10_a_repository_with_a_history_is_refused(
    answered: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "real"
    real.mkdir()
    git = shutil.which("git")
    assert git
    (real / "git").write_text(
        f'#!/bin/sh\n[ "$1" = gc ] && {git} tag later && exit\nexec {git} "$@"\n'
    )  # a git that leaves something behind
    (real / "git").chmod(0o755)
    monkeypatch.setitem(GIT_ENV, "PATH", f"{real}:{os.environ['PATH']}")
    with pytest.raises(TaskError, match="its history shows more than one commit"):
        materialise(answered, tmp_path / "made")
