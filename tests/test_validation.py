"""Whether tasks can be trusted: tried in real sandboxes, remembered, and heeded by a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from swegym_tutorial import TrainingConfig, TrainingRun, load_tasks, trust, validation
from swegym_tutorial.connect import RunError
from swegym_tutorial.events import EventReader
from swegym_tutorial.grading import Bench
from swegym_tutorial.sandbox import BackendClosed, SandboxError
from swegym_tutorial.sandbox.local import LocalBackend
from swegym_tutorial.swegym_grading import SwegymHarness
from swegym_tutorial.task_text import listing
from swegym_tutorial.validation import Status, Try, Validation, conclude, validate

ROOT = Path(__file__).parent.parent
USELESS = "diff --git a/n b/n\nnew file mode 100644\n--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+nothing of use\n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SWEGYM_TUTORIAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Numbered:
    """A backend that tells each sandbox, in /tmp/number, how many were opened before it."""

    name = "numbered"

    def __init__(self, sandboxes, failures: int = 0):
        self._sandboxes, self.failures, self.opened = sandboxes, failures, 0

    def open(self, task):
        if self.failures:
            self.failures -= 1
            raise SandboxError("no room")
        box = self._sandboxes.open(task)
        box.write_file("/tmp/number", str(self.opened).encode())
        self.opened += 1
        return box


# Case 4 (SWE-bench#26, #294, sb-cli#15): the gold patch does not pass, or flakes.
@pytest.mark.slow
def test_case_4_every_bundled_task_is_valid_in_the_sandbox(sandboxes, config):
    found = list(validate(load_tasks(split=None), sandboxes, config))
    assert len(found) == 120 and {each.task.instance_id: each.why for each in found if not each.valid} == {}
    for each in found:
        assert {*each.task.fail_to_pass, *each.task.pass_to_pass} == {*each.gold} == {*each.base}
        assert set(each.gold.values()) == {"PASSED"}


@pytest.mark.slow
def test_case_4_a_broken_task_is_told(task, sandboxes, config):
    broken = {
        "the gold patch is unresolved": replace(task, patch=USELESS),
        "the gold patch is empty_patch": replace(task, patch=""),
        "base already passes": replace(task, fail_to_pass=task.pass_to_pass),
        "FAIL_TO_PASS is empty": replace(task, fail_to_pass=()),
        "base does not pass": replace(task, pass_to_pass=task.fail_to_pass),
        "the hidden tests tell nothing: on base the test patch does not": replace(task, test_patch="x\n"),
        "the hidden tests tell nothing: on base no test told": replace(task, test_command="exit 3 #"),
    }
    broken = {why: replace(each, instance_id=f"t-{n}") for n, (why, each) in enumerate(broken.items())}
    found = {each.task.instance_id: each for each in validate([*broken.values()], sandboxes, config)}
    for why, each in broken.items():
        assert found[each.instance_id].status is Status.BROKEN
        assert found[each.instance_id].why.startswith(why), found[each.instance_id].why


@pytest.mark.slow
def test_case_4_a_flaky_task_is_told_by_its_test(task, sandboxes, config):
    new = "diff --git a/tests/test_new.py b/tests/test_new.py\nnew file mode 100644\n--- /dev/null\n"
    new += "+++ b/tests/test_new.py\n@@ -0,0 +1,2 @@\n+def test_new():\n+    assert open('/tmp/number').read() != '4'\n"
    wanted = (*task.pass_to_pass, "tests/test_new.py::test_new")
    flaky = replace(task, test_patch=task.test_patch + new, pass_to_pass=wanted)
    tries = []
    (found,) = validate(
        [flaky], Numbered(sandboxes), config, times=3, workers=1, on_try=lambda: tries.append(1)
    )
    assert found.status is Status.FLAKY and found.tries == 3 and len(tries) == 3
    assert "tests/test_new.py::test_new on gold (PASSED 2 times, FAILED 1 times)" in found.why
    assert found.gold["tests/test_new.py::test_new"] == "PASSED"


def test_tries_that_differ_are_flaky_and_tries_that_agree_are_not(task):
    test = task.fail_to_pass[0]
    passed, failed = Try(gold={test: "PASSED"}), Try("the gold patch is unresolved", gold={test: "FAILED"})
    assert conclude(task, [passed, passed]).status is Status.VALID
    assert conclude(task, [failed, failed]).status is Status.BROKEN
    assert conclude(task, [passed, failed]).status is Status.FLAKY
    assert conclude(task, [passed, Try("slow", gold=passed.gold)]).why == "2 tries differ: 1 of 2 fail; slow"
    unlisted = Try(gold={test: "PASSED", "another": "FAILED"})
    assert conclude(task, [passed, unlisted]).status is Status.VALID
    assert conclude(task, [replace(passed, leak="/x holds it"), passed]).why == "/x holds it"
    assert conclude(task, [replace(passed, leak="/x holds it"), passed]).status is Status.BROKEN


def test_a_sandbox_that_fails_says_nothing_of_the_task(task, sandboxes, config, monkeypatch):
    monkeypatch.setattr(validation, "PAUSE", 0.01)
    (found,) = validate([task], Numbered(sandboxes, failures=2), config)
    assert found.valid
    (found,) = validate([task], Numbered(sandboxes, failures=99), config)
    assert found.status is Status.UNCHECKED and found.why == "the sandbox failed: no room"
    trust.keep(found, "local", print)
    assert trust.recall(task) is None


def test_a_task_whose_files_are_another_commits_is_broken(task, sandboxes, config, monkeypatch):
    monkeypatch.setattr(validation, "PAUSE", 99)  # nothing is tried again
    (found,) = validate([replace(task, base_commit="deadbeef")], sandboxes, config, times=2)
    assert found.status is Status.BROKEN and found.tries == 2
    assert found.why.startswith(
        f"{task.instance_id}: the files give commit {task.base_commit}, not base_commit"
    )
    trust.keep(found, "local", print)
    assert trust.recall(found.task).status == "broken"


def test_a_closed_backend_is_no_fault_of_the_sandbox_to_be_waited_out(task, config):
    closed = LocalBackend()
    closed.close()
    with pytest.raises(BackendClosed, match="make a new one"):
        list(validate([task], closed, config))


def as_swegym(monkeypatch, sandboxes, config, lines: dict[bool, str]) -> None:
    """Have tasks graded as SWE-Gym's, by tests that print these lines without and with the gold patch."""

    class Like:
        def knows(self, task):
            return True

        def commands(self, task, install=True):
            telling = (
                f"if git diff --quiet -- src; then printf '{lines[False]}'; else printf '{lines[True]}'; fi"
            )
            return ["true", "git status", "git apply - < /dev/null || true", telling, "git status"]

        def parse(self, task, log):
            found = (line.split() for line in log.splitlines())
            return {words[1]: words[0] for words in found if len(words) == 2}

    harness = SwegymHarness(Like)
    monkeypatch.setattr(validation, "Bench", lambda *_: Bench(sandboxes, config, lambda task: harness))


@pytest.mark.parametrize("fixed, kept, status", [("PASSED", "XFAIL", "valid"), ("XFAIL", "PASSED", "broken")])
def test_a_listed_test_may_fail_as_expected_with_the_gold_patch_unless_it_must_be_fixed(
    task, sandboxes, config, monkeypatch, fixed, kept, status
):
    theirs = replace(task, parser="swegym", test_command="", fail_to_pass=("t::a",), pass_to_pass=("t::b",))
    lines = {False: "FAILED t::a\\nPASSED t::b\\n", True: f"{fixed} t::a\\n{kept} t::b\\n"}
    as_swegym(monkeypatch, sandboxes, config, lines)
    (found,) = validate([theirs], sandboxes, config)
    assert (found.status, found.gold) == (status, {"t::a": fixed, "t::b": kept}), found.why


@pytest.mark.slow
def test_the_grader_of_a_run_heeds_what_is_known(task, sandboxes, config):
    valid, flaky = own(task, 0), own(task, 1)
    trust.keep(Validation(valid, Status.VALID, gold={"t": "XFAIL"}), "local", print)
    trust.keep(Validation(flaky, Status.FLAKY, "differs"), "local", print)
    numbered = Numbered(sandboxes)
    known = trust.trust_in([valid, flaky])
    grader = trust.make_grader(numbered, config, known)
    patch = task.patch.encode()
    assert [grader.grade(each, patch).shared for each in (valid, valid, flaky, flaky)] == [
        *(False, True, False, False)
    ]
    opened = numbered.opened
    assert not grader.grade(valid, b"").reward and numbered.opened == opened
    settings = replace(config, share_verdicts=False, grade_empty_patches=True)
    grader = trust.make_grader(numbered, settings, known)
    assert not grader.grade(valid, patch).shared and not grader.grade(valid, patch).shared
    opened = numbered.opened
    assert not grader.grade(valid, b"").reward and numbered.opened > opened


VALID = {"status": Status.VALID, "tries": 3, "gold": {"t": "XFAIL"}, "base": {"t": "FAILED"}, "told": 7}


def test_what_is_known_is_kept_until_the_task_changes(task, cache):
    assert trust.recall(task) is None
    trust.keep(Validation(task, **VALID), "local", print)
    record = trust.recall(task)
    assert record is not None and (record.status, record.tries, record.sandbox) == ("valid", 3, "local")
    assert record.gold == {"t": "XFAIL"} and record.package == "0.1.0" and record.told == 7
    (file,) = (cache / "validations").iterdir()
    assert json.loads(file.read_text()) == asdict(record)
    assert trust.recall(replace(task, problem_statement="Anew.", hints_text="x", split="held-out")) == record
    for change in (
        {"base_commit": "0" * 40},
        {"patch": "x"},
        {"test_patch": "x"},
        {"fail_to_pass": ("x",)},
        {"pass_to_pass": ("x",)},
        {"test_command": "x"},
        {"image": "x"},
        {"setup": "x"},
        {"parser": "swegym"},
        {"version": "9"},
        {"files": {}},
    ):
        assert trust.recall(replace(task, **change)) is None
    trust.keep(Validation(task, Status.FLAKY, "differs"), "docker", print)
    assert (trust.recall(task) or record).status == "flaky" and len([*file.parent.iterdir()]) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"status": "valid"}', "\xff"])
def test_a_damaged_record_is_no_record(task, text):
    trust.keep(Validation(task, **VALID), "local", print)
    (file,) = trust.folder().iterdir()
    file.write_bytes(text.encode("latin-1"))
    assert trust.recall(task) is None


def test_a_cache_that_cannot_be_written_to_is_told_and_stops_nothing(task, cache):
    cache.write_text("no folder")
    said: list[str] = []
    trust.keep(Validation(task, **VALID), "local", said.append)
    assert len(said) == 1 and "SWEGYM_TUTORIAL_CACHE" in said[0] and trust.recall(task) is None


def own(task, number: int):
    """A task that is none of the bundled ones."""
    return replace(task, instance_id=f"me__own-{number}", version=str(number))


def test_what_a_run_makes_of_it(task):
    valid, broken, flaky, unknown = (own(task, n) for n in range(4))
    trust.keep(Validation(valid, **VALID), "local", print)
    trust.keep(Validation(broken, Status.BROKEN, "the gold patch is unresolved"), "local", print)
    trust.keep(Validation(flaky, Status.FLAKY, "3 tries differ"), "local", print)
    found = trust.trust_in([task, valid, broken, flaky, unknown])
    assert found.not_valid == {
        "me__own-1": "not valid: broken: the gold patch is unresolved",
        "me__own-2": "not valid: flaky: 3 tries differ",
    }
    assert found.gold == {"me__own-0": {"t": "XFAIL"}} and found.flaky == {"me__own-2"}
    assert found.never_validated == ("me__own-3",)  # the bundled tasks are, by their own tests
    states = {name: record.status for name, record in trust.recall_all([valid, broken]).items()}
    assert [line.split()[2] for line in listing([valid, broken, flaky], states=states)] == [
        *("valid", "broken", "-")
    ]


def events(run: TrainingRun, name: str) -> list[dict]:
    return [event for event in EventReader(run.folder.path).read() if event["event"] == name]


def left_out(run: TrainingRun, tasks) -> list[str]:
    """The tasks that a run goes on with."""
    run.folder.open()
    (run.folder.path / "config.json").write_text(json.dumps(run.config.to_json()))
    run._tasks.leave_out_invalid(trust.trust_in(tasks))
    run.folder.close()
    return [task.instance_id for task in run._tasks.train]


def test_case_4_training_leaves_out_what_is_not_valid_and_says_so(task, tmp_path):
    tasks = [own(task, n) for n in range(3)]
    trust.keep(Validation(tasks[0], **VALID), "local", print)
    trust.keep(Validation(tasks[1], Status.BROKEN, "no"), "local", print)
    config = TrainingConfig.laptop(tasks="my own.jsonl")
    run = TrainingRun(config, tmp_path / "run", tasks=tasks)
    assert left_out(run, tasks) == ["me__own-0", "me__own-2"]
    assert [event["tasks"] for event in events(run, "tasks_left_out")] == [
        {"me__own-1": "not valid: broken: no"}
    ]
    (trusted,) = events(run, "tasks_trusted")
    assert (
        trusted["never_validated"] == ["me__own-2"] and trusted["validate"] in events(run, "note")[0]["text"]
    )
    (note,) = events(run, "note")
    assert note["text"].startswith("1 of the 3 tasks were never validated")
    source = Path("my own.jsonl").absolute()
    assert f"`swegym-tutorial tasks validate --tasks '{source}' --sandbox auto`" in note["text"]

    # A run that goes on keeps the tasks that it began with, and so their order, whatever is found meanwhile.
    trust.keep(Validation(tasks[0], Status.FLAKY, "oh"), "local", print)
    again = TrainingRun(config, tmp_path / "run", tasks=tasks, resume=True)
    assert left_out(again, tasks) == ["me__own-0", "me__own-2"] and len(events(again, "note")) == 1

    every = TrainingRun(replace(config, only_valid=False), tmp_path / "all", tasks=tasks)
    assert left_out(every, tasks) == [each.instance_id for each in tasks]
    assert not events(every, "tasks_left_out")


def test_a_run_without_any_valid_task_ends_before_a_server_is_started(task, tmp_path):
    trust.keep(Validation(own(task, 0), Status.BROKEN, "no gold"), "local", print)
    run = TrainingRun(TrainingConfig.laptop(), tmp_path / "run", tasks=[own(task, 0)]).start()
    with pytest.raises(RunError, match="none of the 1 tasks can be used: not valid: broken: no gold"):
        run.wait()
    assert not events(run, "phase")


def test_the_bundled_tasks_need_no_note(tmp_path):
    tasks = load_tasks()[:2]
    run = TrainingRun(TrainingConfig.laptop(), tmp_path / "run", tasks=tasks)
    assert left_out(run, tasks) == [task.instance_id for task in tasks] and not events(run, "note")


@pytest.mark.slow
def test_the_command_shows_keeps_and_writes_what_it_finds(task, tmp_path, cache):
    names = ("repo", "instance_id", "base_commit", "problem_statement", "patch", "test_patch")
    rows = []
    for n, patch in enumerate((task.patch, USELESS)):
        instance = {name: getattr(task, name) for name in names} | {
            "instance_id": f"me__own-{n}",
            "patch": patch,
        }
        instance |= {"FAIL_TO_PASS": list(task.fail_to_pass), "PASS_TO_PASS": list(task.pass_to_pass)}
        rows.append({"instance": instance, "test_command": task.test_command, "files": dict(task.files)})
    source = tmp_path / "own.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "swegym_tutorial.cli", "tasks", *arguments, "--tasks", str(source)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=300)

    done = command("validate", "--times", "2", "--table", str(tmp_path / "table.md"))
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("   1 of 2  me__own-") and lines[-1] == f"table: {tmp_path / 'table.md'}"
    assert lines[-2] in ("1 valid, 1 broken of 2 tasks", "1 broken, 1 valid of 2 tasks")
    table = (tmp_path / "table.md").read_text()
    assert "| me__own-0 | valid | 2 |" in table and "| me__own-1 | broken | 2 |" in table
    assert "the gold patch is unresolved" in table and len([*(cache / "validations").iterdir()]) == 2
    assert [line.split()[1:3] for line in command("list").stdout.splitlines()] == [
        ["me__own-0", "valid"],
        ["me__own-1", "broken"],
    ]
