"""Verdicts, in real sandboxes with real pytest, and the grader that shares them."""

import shlex
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from swegym_tutorial import grading, guards, load_tasks, patches
from swegym_tutorial.events import verdict_to_json
from swegym_tutorial.grading import Bench, Grader, Outcome, Verdict, check_graders, grade, judge
from swegym_tutorial.hidden_tests import HiddenRun, PytestHarness, parse_pytest
from swegym_tutorial.patches import touched_files
from swegym_tutorial.sandbox import SandboxError
from swegym_tutorial.verdicts import explain


def patch_of(sandboxes, task, command: str) -> bytes:
    from swegym_tutorial.patches import capture_patch

    box = sandboxes.open(task)
    try:
        result = box.exec(command, timeout=20)
        assert result.exit_code == 0, result.output
        return capture_patch(box, task, 10_000_000)
    finally:
        box.close()


def test_the_gold_patch_is_resolved(task, sandboxes, config):
    verdict = grade(task, task.patch.encode(), sandboxes, config)
    assert verdict.outcome is Outcome.RESOLVED and verdict.reward == 1.0
    assert set(verdict.tests) >= {*task.fail_to_pass, *task.pass_to_pass}
    assert set(verdict.tests.values()) == {"PASSED"} and "passed" in verdict.log


def test_a_patch_that_is_text_is_refused_before_a_sandbox_is_opened(task, sandboxes, config):
    counting = Counting(sandboxes)
    for text in (task.patch, ""):
        with pytest.raises(TypeError, match=r"a patch is bytes.* this one is str.*patch\.encode\(\)"):
            grade(task, text, counting, config)
        with pytest.raises(TypeError, match="a patch is bytes"):
            Grader(counting, config).grade(task, text)
    assert counting.opened == 0


def test_a_patch_that_changes_nothing_of_use_is_unresolved(task, sandboxes, config):
    verdict = grade(task, patch_of(sandboxes, task, "echo more >> README.md"), sandboxes, config)
    assert verdict.outcome is Outcome.UNRESOLVED and verdict.reward == 0.0
    assert task.fail_to_pass[0] in verdict.detail


class Counting:
    """A backend that counts the sandboxes it opens."""

    name = "counting"

    def __init__(self, sandboxes):
        self._sandboxes = sandboxes
        self.opened = 0

    def open(self, task):
        self.opened += 1
        return self._sandboxes.open(task)

    def close(self):
        pass


class NoSandbox:
    name = "none"

    def open(self, task):
        raise AssertionError("this needs no sandbox")

    def close(self):
        pass


def test_case_5_the_empty_patch_earns_nothing_on_every_bundled_task_and_needs_no_sandbox(config):
    # R2E-Gym#27
    for task in load_tasks(split=None):
        for patch in (b"", b"\n \n"):
            verdict = grade(task, patch, NoSandbox(), config)
            assert (verdict.outcome, verdict.reward) == (Outcome.EMPTY_PATCH, 0.0)


def test_a_patch_that_does_not_apply_or_is_too_large_is_invalid(task, sandboxes, config):
    wrong = task.patch.replace("return", "yield").encode()
    verdict = grade(task, wrong, sandboxes, config)
    assert verdict.outcome is Outcome.INVALID_PATCH and verdict.reward == 0.0 and verdict.detail
    large = grade(task, task.patch.encode(), NoSandbox(), replace(config, patch_bytes=10))
    assert large.outcome is Outcome.INVALID_PATCH and "larger than 10 bytes" in large.detail


def test_a_syntax_error_is_the_agents_zero(task, sandboxes, config):
    path = touched_files(task.patch)[0]
    verdict = grade(task, patch_of(sandboxes, task, f"echo 'def broken(:' >> {path}"), sandboxes, config)
    assert verdict.reward == 0.0 and verdict.outcome in (Outcome.UNRESOLVED, Outcome.TESTS_CRASHED)


def test_tests_that_never_end_are_the_agents_zero(task, sandboxes, config):
    path = touched_files(task.patch)[0]
    patch = patch_of(sandboxes, task, f"printf 'import time\\ntime.sleep(99)\\n' >> {path}")
    verdict = grade(task, patch, sandboxes, replace(config, grading_timeout=2.0))
    assert verdict.outcome is Outcome.TESTS_TIMEOUT and verdict.reward == 0.0


def test_an_interpreter_that_leaves_is_the_agents_zero(task, sandboxes, config):
    path = touched_files(task.patch)[0]
    patch = patch_of(sandboxes, task, f"printf 'import os\\nos._exit(0)\\n' >> {path}")
    verdict = grade(task, patch, sandboxes, config)
    assert verdict.outcome is Outcome.TESTS_CRASHED and verdict.reward == 0.0


def test_tests_that_tell_nothing_without_the_agent_either_are_no_zero(task, sandboxes, config):
    silent = replace(task, test_command="echo no such program; exit 3 #")
    with pytest.raises(SandboxError, match="tell nothing on the untouched repository") as error:
        grade(silent, task.patch.encode(), sandboxes, config)
    assert "exit code 3" in str(error.value) and "no such program" in str(error.value)
    slow = replace(task, test_command="sleep 9 #")
    with pytest.raises(SandboxError, match=r"killed after \d s.*grading_timeout is too short"):
        grade(slow, task.patch.encode(), sandboxes, replace(config, grading_timeout=0.5))
    unfit = replace(task, test_patch=task.test_patch.replace("import", "export"))
    with pytest.raises(SandboxError, match="the test patch does not apply"):
        grade(unfit, task.patch.encode(), sandboxes, config)


def test_tests_that_tell_something_with_the_gold_patch_alone_are_no_fault(task, sandboxes, config):
    path = touched_files(task.patch)[0]
    line = next(line[1:] for line in task.patch.splitlines() if line.startswith("+ "))
    picky = replace(task, test_command=f"grep -q '{line}' {path} && {task.test_command}")
    verdict = grade(picky, patch_of(sandboxes, task, "echo more >> README.md"), sandboxes, config)
    assert verdict.outcome is Outcome.TESTS_CRASHED and verdict.reward == 0.0
    assert grade(picky, task.patch.encode(), sandboxes, config).outcome is Outcome.RESOLVED


def test_the_untouched_repository_is_tried_once_a_run_and_only_where_it_must_be(task, sandboxes, config):
    counting = Counting(sandboxes)
    grader = Grader(counting, config)
    assert grader.grade(task, task.patch.encode()).outcome is Outcome.RESOLVED
    assert counting.opened == 1
    path = touched_files(task.patch)[0]
    crashes = [patch_of(sandboxes, task, f"echo 'import os; os._exit({n})' >> {path}") for n in range(4)]
    verdicts: list[Verdict] = []
    threads = [
        threading.Thread(target=lambda patch=patch: verdicts.append(grader.grade(task, patch)))
        for patch in crashes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [verdict.outcome for verdict in verdicts] == [Outcome.TESTS_CRASHED] * 4
    assert counting.opened == 1 + 4 + 1


def test_a_parser_that_there_is_not_is_told_before_anything_starts(task):
    check_graders(load_tasks(split=None))
    with pytest.raises(ValueError, match="no parser is called 'nose'; there are pytest, swegym"):
        check_graders([task, replace(task, parser="nose")])


# Case 9 (multi-swe-bench#22, OpenHands#10087): edited tests and test configuration are graded as if they weren't.
@pytest.mark.parametrize(
    "cheat",
    [
        "printf 'def test_x():\\n    pass\\n' > {test}",
        "rm {test}",
        "printf 'import pytest\\n@pytest.hookimpl(hookwrapper=True)\\ndef pytest_runtest_makereport(item, call):\\n"
        '    out = yield\\n    r = out.get_result()\\n    r.outcome = "passed"\\n\' > conftest.py',
        "printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini",
        "printf '[tool:pytest]\\naddopts = -k nothing\\n' > setup.cfg",
        "printf 'collect_ignore_glob = [\"*\"]\\n' > tests/conftest.py",
    ],
)
def test_case_9_what_the_agent_did_to_the_tests_is_undone_and_told(task, sandboxes, config, cheat):
    test = touched_files(task.test_patch)[0]
    patch = patch_of(sandboxes, task, cheat.format(test=test))
    verdict = grade(task, patch, sandboxes, config)
    assert verdict.outcome is Outcome.UNRESOLVED and "undone before the tests ran" in verdict.detail


def test_the_verdict_tells_what_swe_gym_alone_would_have_said(task, sandboxes, config):
    counting = Counting(sandboxes)
    verdict = grade(task, patch_of(sandboxes, task, WRITE), counting, config)
    assert (verdict.outcome, verdict.plain) == (Outcome.UNRESOLVED, Outcome.RESOLVED)
    assert counting.opened == 2 and "SWE-Gym" in explain(verdict)
    own = patch_of(sandboxes, task, "echo 'def test_own(): pass' > tests/test_own.py")
    verdict = grade(task, own, counting, config)  # tests of the agent's own decide nothing: no second run
    assert (verdict.outcome, verdict.plain) == (Outcome.UNRESOLVED, Outcome.UNRESOLVED)
    assert counting.opened == 3 and "tests/test_own.py" in verdict.detail


def test_case_9_an_honest_fix_beside_it_is_still_resolved(task, sandboxes, config):
    gold = task.patch.replace("'", "'\\''")
    test = touched_files(task.test_patch)[0]
    command = f"printf '%s' '{gold}' | git apply - && rm {test} && printf '[pytest]\naddopts = -k no\n' > pytest.ini"
    verdict = grade(task, patch_of(sandboxes, task, command), sandboxes, config)
    assert verdict.outcome is Outcome.RESOLVED and "pytest.ini" in verdict.detail


FORGE = (
    "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    out = yield\n    out.get_result().outcome = 'passed'\n"
)
WRITE = f"cat > conftest.py <<'E'\n{FORGE}E\n"


# The same, where the text of the patch hides the name.
@pytest.mark.parametrize(
    "cheat, undone",
    [
        (WRITE + "echo 'conftest.py -diff' > .gitattributes", "conftest.py"),
        (WRITE + "echo '* -diff' > .git/info/attributes", "conftest.py"),
        (
            WRITE + "mv conftest.py tests/; echo '* working-tree-encoding=UTF-16' > .gitattributes",
            ".gitattributes",
        ),
        (
            WRITE + "mkdir 'ä\"\\'; mv conftest.py 'ä\"\\'; ln -s 'ä\"\\/conftest.py' conftest.py",
            'ä"\\/conftest.py',
        ),
        (WRITE + "mv conftest.py forge.py; ln -s forge.py conftest.py", "conftest.py"),
        (
            WRITE
            + "mkdir src/x; mv conftest.py src/x/it; cp src/x/it src/conftest.py; ln -s src/x pytest.ini",
            "pytest.ini",
        ),
        (WRITE + "mv tests t; ln -s t tests; mv conftest.py t/", "t/conftest.py"),
        (WRITE + "rm -r tests; echo > tests", "conftest.py"),
        ("printf '[pytest]\\naddopts = [\"--collect-only\"]\\n' > pytest.toml", "pytest.toml"),
        ("printf '[pytest]\\naddopts = [\"--collect-only\"]\\n' > .pytest.toml", ".pytest.toml"),
        ("git mv {test} tests/other.py", "{test}"),
        ("rm {test}; mkdir -p {test}/x; echo > {test}/x/y", "{test}"),
        ("rm {test}; ln -s ../README.md {test}", "{test}"),
        ("echo '{test} text eol=crlf' > .gitattributes", ".gitattributes"),
        ("mkdir conftest.py; echo > conftest.py/__init__.py", "conftest.py/__init__.py"),
        ("mkdir ':(top)*'; echo > ':(top)*/conftest.py'", ":(top)*/conftest.py"),
    ],
)
def test_case_9_a_name_that_the_patch_hides_is_found_by_git(task, sandboxes, config, cheat, undone):
    test = touched_files(task.test_patch)[0]
    patch = patch_of(sandboxes, task, cheat.replace("{test}", test))
    verdict = grade(task, patch, sandboxes, config)
    assert verdict.outcome in (Outcome.UNRESOLVED, Outcome.TESTS_CRASHED)
    assert undone.replace("{test}", test) in verdict.detail.partition("undone before the tests ran: ")[
        2
    ].split(", ")


def test_case_9_a_copy_and_a_name_that_is_no_utf8_are_found_too(task, sandboxes, config):
    box = sandboxes.open(task)
    command = f"{WRITE}mv conftest.py src/forge; git add -A; git commit -q -m x; cp src/forge conftest.py; git add -A; "
    copied = box.exec(command + "git diff --cached -C -C HEAD", timeout=20).output.encode()
    box.close()
    assert b"copy to conftest.py" in copied
    forge = patch_of(sandboxes, task, f"{WRITE}mv conftest.py src/forge")
    verdict = grade(task, forge + copied, sandboxes, config)
    assert verdict.reward == 0.0
    odd = patch_of(sandboxes, task, "mkdir $'\\xff'; echo x > $'\\xff/conftest.py'; echo > $'a\\tb'")
    verdict = grade(task, odd, sandboxes, config)
    assert verdict.outcome is Outcome.UNRESOLVED and verdict.detail.endswith("tests ran: ?/conftest.py")


def test_case_9_a_file_that_the_gold_patch_touches_is_the_agents_to_change(task, sandboxes, config):
    gold = "--- a/pytest.ini\n+++ b/pytest.ini\n"
    patch = patch_of(sandboxes, task, "printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini")
    verdict = grade(replace(task, patch=gold), patch, sandboxes, config)
    assert verdict.outcome is Outcome.TESTS_CRASHED and "undone" not in verdict.detail


def test_case_9_a_new_test_file_is_put_in_place_whatever_lies_there(task, sandboxes, config):
    lines = "def test_new():\n    assert True\n"
    new = "diff --git a/new/deep/test_new.py b/new/deep/test_new.py\nnew file mode 100644\n"
    new += "--- /dev/null\n+++ b/new/deep/test_new.py\n@@ -0,0 +1,2 @@\n"
    new += "".join(f"+{line}\n" for line in lines.splitlines())
    other = replace(task, test_patch=new, fail_to_pass=("new/deep/test_new.py::test_new",), pass_to_pass=())
    for command in (
        "ln -s src new",
        "echo > new",
        "mkdir -p new/deep/test_new.py; echo > new/deep/test_new.py/x",
    ):
        verdict = grade(other, patch_of(sandboxes, task, command), sandboxes, config)
        assert verdict.outcome is Outcome.RESOLVED, verdict


def test_a_patch_of_two_thousand_guarded_files_is_undone(task, sandboxes, config):
    # More than fits into one command line.
    name = "x" * 200
    script = f"for n in range(2_000): os.makedirs(f'{name}/{{n}}'); open(f'{name}/{{n}}/conftest.py', 'w').write('x')"
    patch = patch_of(sandboxes, task, f'python -c "import os\n{script}"')
    verdict = grade(task, patch, sandboxes, replace(config, patch_bytes=len(patch)))
    assert verdict.outcome is Outcome.UNRESOLVED and "and 1,980 more" in verdict.detail


class Slow:
    """Real sandboxes where all takes long once the repository holds a file called slow."""

    def __init__(self, sandboxes):
        self._sandboxes = sandboxes

    def open(self, task):
        box = self._sandboxes.open(task)
        run = box.exec
        box.exec = lambda command, **how: run(f"if [[ -e slow ]]; then sleep 30; fi\n{command}", **how)
        return box


def test_a_patch_that_git_takes_too_long_for_is_no_fault_of_the_sandbox(task, sandboxes, config, monkeypatch):
    # Thousands of folders in folders do it; left out as a fault, the attempt would have cost nothing.
    monkeypatch.setattr(patches, "GIT_TIMEOUT", 5.0)
    monkeypatch.setattr(guards, "GIT_TIMEOUT", 5.0)
    patch = patch_of(sandboxes, task, "echo > slow; echo > conftest.py")
    verdict = grade(task, patch, Slow(sandboxes), config)
    assert verdict.reward == 0.0 and "not put back within 5 s" in verdict.detail
    monkeypatch.setattr(patches, "GIT_TIMEOUT", 0.001)
    with pytest.raises(SandboxError, match=r"tell nothing on the untouched .*did not end within"):
        grade(task, task.patch.encode(), sandboxes, config)


def run_of(task, output: str) -> HiddenRun:
    return HiddenRun(printed=PytestHarness().read(task, output, "").tests)


def test_case_6_a_run_without_a_result_is_never_a_reward(task):
    # The exit code says nothing: what counts is what the tests told.
    assert judge(task, run_of(task, "all good\n5 passed\n")).outcome is Outcome.TESTS_CRASHED
    assert judge(task, run_of(task, f"PASSED {task.pass_to_pass[0]}\n")).outcome is Outcome.UNRESOLVED
    nothing_wanted = replace(task, fail_to_pass=(), pass_to_pass=())
    assert judge(nothing_wanted, run_of(task, "PASSED t.py::x\n")).outcome is Outcome.UNRESOLVED


@pytest.mark.parametrize("status", ["XFAIL", "SKIPPED", "XPASS", "FAILED", "ERROR"])
def test_only_passed_is_passed(task, status):
    wanted = [*task.fail_to_pass, *task.pass_to_pass]
    lines = [f"{status} {wanted[0]}", *(f"PASSED {test}" for test in wanted[1:])]
    assert judge(task, run_of(task, "\n".join(lines))).outcome is Outcome.UNRESOLVED


def test_the_summary_is_read_whatever_the_order_and_the_worst_counts():
    output = (
        "PASSED t.py::a\nFAILED t.py::b - assert 1 == 2\nPASSED t.py::c[x y]\nERROR t.py::a - boom\nPASSEDx\n"
    )
    expected = {"t.py::a": "ERROR", "t.py::b": "FAILED", "t.py::c[x y]": "PASSED"}
    assert parse_pytest(output) == expected
    assert parse_pytest("\n".join(reversed(output.splitlines()))) == expected


def test_a_wanted_test_whose_id_holds_a_dash_is_read_whole(task):
    wanted = ("t.py::a[x - y]", "t.py::a[x - y - z]", "t.py::a[- - -]")
    output = (
        "PASSED t.py::a[x - y]\nFAILED t.py::a[x - y - z] - assert 1 - 2\nPASSED t.py::a[- - -]\n"
        "FAILED t.py::b - boom - bang\nPASSED t.py::c[u - v]\n"
    )
    expected = {wanted[0]: "PASSED", wanted[1]: "FAILED", wanted[2]: "PASSED", "t.py::b": "FAILED"}
    assert parse_pytest(output, wanted) == {**expected, "t.py::c[u": "PASSED"}
    resolved = replace(task, fail_to_pass=(wanted[0],), pass_to_pass=(wanted[2],))
    assert judge(resolved, run_of(resolved, output)).outcome is Outcome.RESOLVED
    assert parse_pytest("FAILED t.py::a" + " - " * 300_000, wanted) == {"t.py::a": "FAILED"}


def test_an_infrastructure_fault_has_no_reward():
    with pytest.raises(ValueError, match="no reward"):
        _ = Verdict(Outcome.INFRASTRUCTURE, detail="the sandbox died").reward


def test_identical_patches_share_a_verdict_also_while_it_is_being_found(task, sandboxes, config):
    counting = Counting(sandboxes)
    grader = Grader(counting, config)
    verdicts: list[Verdict] = []
    threads = [
        threading.Thread(target=lambda: verdicts.append(grader.grade(task, task.patch.encode())))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counting.opened == 1
    assert [v.outcome for v in verdicts] == [Outcome.RESOLVED] * 6
    assert sorted(v.shared for v in verdicts) == [False] + [True] * 5


def test_a_fault_is_raised_and_not_remembered(task, sandboxes, config):
    class Flaky:
        name = "flaky"
        broken = True

        def open(self, task):
            if self.broken:
                raise SandboxError("no room")
            return sandboxes.open(task)

        def close(self):
            pass

    flaky = Flaky()
    grader = Grader(flaky, config)
    with pytest.raises(SandboxError, match="no room"):
        grader.grade(task, task.patch.encode())
    flaky.broken = False
    assert grader.grade(task, task.patch.encode()).outcome is Outcome.RESOLVED


ODD = """
import os, pathlib, time
state = (os.environ.get("TZ"), os.environ.get("PYTHONHASHSEED"), os.environ.get("LANG"), hash("x"), time.tzname)
pathlib.Path("state.txt").write_text(repr(state) + chr(10))
"""


@pytest.mark.slow
def test_case_7_one_patch_graded_many_times_at_once_gives_one_verdict(task, sandboxes, config):
    # SWE-bench#602: results drift with the machine's load, the time zone and the seed of hashes.
    path = touched_files(task.patch)[0]
    told = replace(
        task, test_command=f"PYTHONPATH=. python -c 'import src.cart'; cat state.txt; {task.test_command}"
    )
    half = patch_of(sandboxes, task, f"cat >> {path} <<'E'\n{ODD}\nE")
    for patch, outcome in ((task.patch.encode(), Outcome.RESOLVED), (half, Outcome.UNRESOLVED)):
        with ThreadPoolExecutor(8) as pool:
            verdicts = list(pool.map(lambda _: grade(told, patch, sandboxes, config), range(8)))  # noqa: B023
        assert {verdict.outcome for verdict in verdicts} == {outcome}
        assert len({tuple(sorted(verdict.tests.items())) for verdict in verdicts}) == 1
    assert len({verdict.log.splitlines()[0] for verdict in verdicts}) == 1
    assert verdicts[0].log.startswith("('UTC', '0', 'C.UTF-8', ")


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first() -> None:
    once = grading._Once(size=len, limit=10)
    assert [once.get(key, lambda key=key: key * 4) for key in "abc"] == [(key * 4, False) for key in "abc"]
    assert once.get("c", str) == ("cccc", True) and once.get("b", str) == ("bbbb", True)
    assert once.get("a", lambda: "found anew") == ("found anew", False)
    assert once.get("b", lambda: "new") == ("new", False)
    verdict = Verdict(Outcome.UNRESOLVED, {"tests/a.py::test_b": "FAILED"}, log="x" * 1000)
    assert 1000 < grading._bytes_of(verdict) < 1500


def bench_with(sandboxes, config, tests: str) -> Bench:
    """A bench whose tasks are run by another command than their own."""

    class Other(PytestHarness):
        def script(self, task, mark, kit):
            return super().script(replace(task, test_command=tests), mark, kit)

    return Bench(sandboxes, config, lambda task: Other())


def test_tests_that_give_no_report_anywhere_are_judged_by_what_they_print_alone(task, sandboxes, config):
    bare = f"env -u PYTEST_ADDOPTS {task.test_command}"
    verdict = grade(task, task.patch.encode(), sandboxes, config, bench_with(sandboxes, config, bare))
    assert verdict.outcome is Outcome.RESOLVED and "there is no report beside" in verdict.detail
    useless = patch_of(sandboxes, task, "echo more >> README.md")
    assert grade(task, useless, sandboxes, config, bench_with(sandboxes, config, bare)).reward == 0.0
    # Where the untouched repository gives one, a run without it is forged.
    path = task.pass_to_pass[0].partition("::")[0]
    sometimes = f'if [ -e {path} ] && ! [ -e off ]; then {task.test_command} "$@"; else {bare} "$@"; fi; : '
    sometimes = f"run() {{ {sometimes}; }}; run"
    off = patch_of(sandboxes, task, f"printf '%s' {shlex.quote(task.patch)} | git apply -; touch off")
    verdict = grade(task, off, sandboxes, config, bench_with(sandboxes, config, sometimes))
    assert verdict.outcome is Outcome.TAMPERED and "without the report" in verdict.detail


def test_what_a_repository_does_by_itself_is_no_sign_of_forgery(task, sandboxes, config):
    conftest = "import _pytest.runner\nold = _pytest.runner.pytest_runtest_call\n"
    conftest += "def new(item): return old(item)\n_pytest.runner.pytest_runtest_call = new\n"
    own = committed(sandboxes, replace(task, files={**task.files, "conftest.py": conftest}))
    counting = Counting(sandboxes)
    verdict = grade(own, task.patch.encode(), counting, config)
    assert verdict.outcome is Outcome.RESOLVED and counting.opened == 2
    path = touched_files(task.patch)[0]
    gold = f"printf '%s' {shlex.quote(task.patch)} | git apply -; "
    patch = patch_of(
        sandboxes,
        own,
        f"{gold}printf 'import _pytest.reports as r\\nr.BaseReport.x = r.BaseReport.__init__ = lambda *a, **k: 0' >> {path}",
    )
    assert grade(own, patch, sandboxes, config).outcome is not Outcome.RESOLVED


def test_canaries_that_no_run_tells_are_missed_in_words_only(task, sandboxes, config):
    alone = f'one() {{ {task.test_command} "$1"; }}; one'
    verdict = grade(task, task.patch.encode(), sandboxes, config, bench_with(sandboxes, config, alone))
    assert verdict.outcome is Outcome.RESOLVED and "nor are they without the agent" in verdict.detail
    path = touched_files(task.patch)[0]
    stops = f"printf '%s' {shlex.quote(task.patch)} | git apply -; printf 'import os\\nSTOP = os.path.exists(\"stop\")' >> {path}; touch stop"
    some = f'some() {{ [ -e stop ] && set -- "$1"; {task.test_command} "$@"; }}; some'
    verdict = grade(
        task, patch_of(sandboxes, task, stops), sandboxes, config, bench_with(sandboxes, config, some)
    )
    assert verdict.outcome is Outcome.TAMPERED and "known results" in verdict.detail


def committed(sandboxes, task):
    """The task with the commit that its files make."""
    box = sandboxes.open(replace(task, base_commit=""))
    commit = box.exec("git rev-parse HEAD", timeout=9).output.strip()
    box.close()
    return replace(task, base_commit=commit)


def test_far_fewer_results_than_with_the_gold_patch_earn_nothing(task, sandboxes, config):
    patch = task.patch.encode()
    assert grade(task, patch, sandboxes, config, told=4).outcome is Outcome.RESOLVED
    verdict = grade(task, patch, sandboxes, config, told=5)
    assert verdict.outcome is Outcome.TAMPERED and "far fewer than with the gold patch" in verdict.detail


def test_what_failed_as_expected_with_the_gold_patch_may_and_nothing_else(task):
    run = HiddenRun(
        printed=dict.fromkeys([*task.fail_to_pass], "PASSED") | dict.fromkeys(task.pass_to_pass, "XFAIL")
    )
    assert judge(task, run, task.pass_to_pass).outcome is Outcome.RESOLVED
    assert judge(task, run, ()).outcome is Outcome.UNRESOLVED
    swapped = replace(task, fail_to_pass=task.pass_to_pass, pass_to_pass=task.fail_to_pass)
    assert judge(swapped, run, task.pass_to_pass).outcome is Outcome.UNRESOLVED


def test_sharing_can_be_turned_off_and_is_never_done_for_a_flaky_task(task, sandboxes, config):
    patch = task.patch.encode()
    for options, opened in (({}, 1), ({"share_verdicts": False}, 2), ({"flaky": [task.instance_id]}, 2)):
        counting = Counting(sandboxes)
        grader = Grader(counting, config, **options)
        verdicts = [grader.grade(task, patch) for _ in range(2)]
        assert [v.outcome for v in verdicts] == [Outcome.RESOLVED] * 2 and counting.opened == opened
        assert [v.shared for v in verdicts] == [False, opened == 1]


def test_case_5_an_empty_patch_that_is_run_earns_nothing_either(task, sandboxes, config):
    # R2E-Gym#27
    for options in ({"grade_empty_patches": True}, {"flaky": [task.instance_id]}):
        verdict = Grader(sandboxes, config, **options).grade(task, b"\n")
        assert verdict.outcome is Outcome.EMPTY_PATCH and verdict.tests[task.fail_to_pass[0]] == "FAILED"
    easy = replace(task, fail_to_pass=task.pass_to_pass)
    verdict = Grader(sandboxes, config, grade_empty_patches=True).grade(easy, b"")
    assert verdict.outcome is Outcome.EMPTY_PATCH and verdict.reward == 0.0


def test_a_verdict_explains_itself_and_the_report_holds_both_verdicts(task, sandboxes, config):
    path = touched_files(task.patch)[0]
    ids = [*task.fail_to_pass, *task.pass_to_pass]
    code = f"import atexit\natexit.register(lambda: [print('PASSED', test) for test in {ids}])"
    patch = patch_of(sandboxes, task, f"echo {shlex.quote(code)} >> {path}")
    verdict = grade(task, patch, sandboxes, config)
    assert (verdict.outcome, verdict.plain) == (Outcome.UNRESOLVED, Outcome.RESOLVED) and verdict.overruled
    text = explain(verdict)
    assert text == verdict._repr_markdown_() and text.startswith("**unresolved** · reward 0 · ")
    assert f"| `{task.fail_to_pass[0]}` | FAILED |" in text and "have said **resolved**" in text
    report = verdict_to_json(verdict)
    assert (report["outcome"], report["plain"]) == ("unresolved", "resolved") and report["detail"]
    fine = grade(task, task.patch.encode(), sandboxes, config)
    assert fine.plain is Outcome.RESOLVED and not fine.overruled and "have said" not in explain(fine)


FLOOD = "import sys\nwhile True: sys.__stderr__.write('PASSED ' + 'x' * 100_000 + chr(10))"
FORKS = "import os, time\nwhile True: os.fork() or time.sleep(60)"
FILLS = "import os\nfor n in range(40): open(f'/tmp/{n}', 'wb').write(bytes(50_000_000))"
EATS = "kept = []\nwhile True: kept.append(bytearray(50_000_000))"
BROKEN = {
    "import": "import nothing_of_that_name",
    "interrupt": "raise KeyboardInterrupt",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "kill": "import os; os.kill(0, 9)",
    "deleted": "import shutil\nfor path in ('/testbed', '/tmp'): shutil.rmtree(path, ignore_errors=True)",
    "flood": FLOOD,
    "forks": FORKS,
    "disk": FILLS,
    "memory": EATS,
}


# Case 37 (rllm#710, open-instruct#1887): the agent's fault is a 0, and never an infrastructure fault.
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("flood", "forks", "disk", "memory")))
        for kind in BROKEN
    ],
)
def test_case_37_what_the_patch_breaks_is_the_agents_zero(task, sandboxes, config, kind):
    path = touched_files(task.patch)[0]
    gold = f"printf '%s' {shlex.quote(task.patch)} | git apply -"
    patch = patch_of(sandboxes, task, f"{gold}; echo {shlex.quote(BROKEN[kind])} >> {path}")
    verdict = grade(task, patch, sandboxes, replace(config, grading_timeout=20.0))
    assert verdict.reward == 0.0 and verdict.detail, verdict


class Dying:
    """A backend whose sandboxes are closed by another thread, as when the machine under one goes."""

    name = "dying"

    def __init__(self, sandboxes, after: float):
        self._sandboxes, self._after = sandboxes, after

    def open(self, task):
        sandbox = self._sandboxes.open(task)
        threading.Timer(self._after, sandbox.close).start()
        return sandbox

    def close(self):
        pass


@pytest.mark.parametrize("after", [0.0, 0.15, 1.5])
def test_case_37_a_sandbox_that_dies_is_no_zero(task, sandboxes, config, after):
    # rllm#710, open-instruct#1887
    slow = replace(task, test_command=f"sleep 5; {task.test_command}")
    with pytest.raises(SandboxError):
        grade(slow, task.patch.encode(), Dying(sandboxes, after), config)


def test_plugins_of_this_machine_are_no_part_of_a_task(task, sandboxes, config):
    lists = replace(task, test_command=f"{task.test_command} --trace-config")
    verdict = grade(lists, task.patch.encode(), sandboxes, config)
    assert verdict.outcome is Outcome.RESOLVED and "PLUGIN registered" in verdict.log
    assert "hypothesis" not in verdict.log
