"""Grading as SWE-Gym does it: what lies around its package, in real sandboxes, and the package itself where it is installed."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace

import pytest
from cheats import CHEATS
from cheats import patch_of as patch_of_cheat

from swegym_tutorial import swegym_grading, validation
from swegym_tutorial.grading import Bench, Outcome, check_graders, grade
from swegym_tutorial.hidden_tests import LOG_BYTES
from swegym_tutorial.patches import capture_patch, touched_files
from swegym_tutorial.reporting import Channel, make_kit
from swegym_tutorial.sandbox import SandboxError
from swegym_tutorial.swegym_grading import GradingUnavailable, SwegymHarness

MARK = "0123abcd"
KIT = make_kit(None)


PYTEST = "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python -m pytest -rA -p no:cacheprovider"


class Like:
    """A package of swegym's form: its script's lines in their order, and a parser that cuts ids and keeps the last."""

    def __init__(self, tests: str = PYTEST) -> None:
        self.tests = tests

    def knows(self, task):
        return task.version != "unknown"

    def commands(self, task, install=True):
        files = " ".join(touched_files(task.test_patch))
        put_back = f"git checkout {task.base_commit} {files}"
        apply = f"git apply -v - <<'END_OF_PATCH'\n{task.test_patch}\nEND_OF_PATCH"
        anew = ["[ ! -e install.sh ] || bash install.sh"] if install else []
        start = ["source /opt/miniconda3/bin/activate", "conda activate testbed", "git status", "git show"]
        return [*start, *anew, put_back, apply, f"{self.tests} {files}", put_back]

    def parse(self, task, log):
        tests = {}
        for line in log.split("\n"):
            words = line.split()
            if line.startswith(("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL")) and len(words) > 1:
                tests[words[1]] = words[0]
        return tests


@pytest.fixture
def theirs(task):
    """The bundled task as one of SWE-Gym's, that brings no test command."""
    return replace(task, parser="swegym", test_command="")


def bench_of(sandboxes, config, tests: str = PYTEST) -> Bench:
    harness = SwegymHarness(lambda: Like(tests))
    return Bench(sandboxes, config, lambda task: harness)


@pytest.fixture
def bench(sandboxes, config):
    return bench_of(sandboxes, config)


def patch_of(sandboxes, task, command: str) -> bytes:
    box = sandboxes.open(task)
    try:
        result = box.exec(command, timeout=60)
        assert result.exit_code == 0, result.output
        return capture_patch(box, task, 20_000_000)
    finally:
        box.close()


def with_install(sandboxes, task, script: str) -> bytes:
    """A patch whose code runs before the tests, as a repository's setup.py does."""
    return patch_of(sandboxes, task, f"printf %s {shlex.quote(script)} > install.sh")


def read(task, log: str):
    return SwegymHarness(Like).read(task, f"+ noise\n\n{MARK} applied 0\n{log}\n\n{MARK} ended\n", MARK)


def test_the_gold_patch_is_resolved_and_a_useless_one_is_not(theirs, sandboxes, config, bench):
    verdict = grade(theirs, theirs.patch.encode(), sandboxes, config, bench)
    assert verdict.outcome is Outcome.RESOLVED, verdict
    assert {*theirs.fail_to_pass, *theirs.pass_to_pass} <= {*verdict.tests} and "passed" in verdict.log
    verdict = grade(theirs, patch_of(sandboxes, theirs, "echo more >> README.md"), sandboxes, config, bench)
    assert verdict.outcome is Outcome.UNRESOLVED and f"{theirs.fail_to_pass[0]} (FAILED)" in verdict.detail


def test_case_5_the_empty_patch_earns_nothing(theirs, sandboxes, config, bench):
    # R2E-Gym#27
    assert grade(theirs, b"", sandboxes, config, bench).outcome is Outcome.EMPTY_PATCH


def test_case_4_a_task_is_validated_by_the_same_grader(theirs, sandboxes, config, bench, monkeypatch):
    # SWE-bench#26, #294
    monkeypatch.setattr(validation, "Bench", lambda *_: bench_of(sandboxes, config))
    assert validation.fault_of(theirs, sandboxes, config) is None
    useless = replace(theirs, patch=theirs.patch.replace("\n+ ", "\n+  #"))
    assert "the gold patch is" in (validation.fault_of(useless, sandboxes, config) or "")
    both = replace(theirs, fail_to_pass=theirs.pass_to_pass)
    assert "base already passes" in (validation.fault_of(both, sandboxes, config) or "")


def test_case_9_what_the_agent_did_to_the_tests_is_undone(theirs, sandboxes, config, bench):
    # multi-swe-bench#22, OpenHands#10087
    test = touched_files(theirs.test_patch)[0]
    skip = "import pytest\ndef pytest_collection_modifyitems(items):\n    [i.add_marker('xfail') for i in items]\n"
    for cheat in (
        f"printf {shlex.quote(skip)} > conftest.py",
        f"printf 'def test_x(): pass\\n' > {test}",
        f"rm {test}; mkdir {test}; echo > {test}/x",
    ):
        verdict = grade(theirs, patch_of(sandboxes, theirs, cheat), sandboxes, config, bench)
        assert verdict.outcome is Outcome.UNRESOLVED and "undone before the tests ran" in verdict.detail


def test_what_is_printed_before_the_tests_run_is_no_result(theirs, sandboxes, config, bench):
    wanted = (*theirs.fail_to_pass, *theirs.pass_to_pass)
    forged = "\n".join(f"echo PASSED {test}" for test in wanted)
    patch = with_install(sandboxes, theirs, f"{forged}\n")
    verdict = grade(theirs, patch, sandboxes, config, bench)
    assert verdict.outcome is Outcome.UNRESOLVED and f"PASSED {wanted[0]}" in verdict.log


def test_tests_that_the_agents_code_swaps_during_the_installation_are_put_back(
    theirs, sandboxes, config, bench
):
    lines = "def test_new():\n    assert False\n"
    new = "diff --git a/tests/test_new.py b/tests/test_new.py\nnew file mode 100644\n"
    new += "--- /dev/null\n+++ b/tests/test_new.py\n@@ -0,0 +1,2 @@\n"
    new += "".join(f"+{line}\n" for line in lines.splitlines())
    other = replace(
        theirs, test_patch=new, fail_to_pass=("tests/test_new.py::test_new",), pass_to_pass=(), patch=""
    )
    for swap in (
        "printf 'def test_new(): pass\\n' > tests/test_new.py",
        "mv tests t; mkdir t/x; ln -s t tests",
        "rm -r tests; echo > tests",
    ):
        verdict = grade(other, with_install(sandboxes, theirs, swap), sandboxes, config, bench)
        assert (verdict.outcome, verdict.tests) == (
            Outcome.UNRESOLVED,
            {"tests/test_new.py::test_new": "FAILED"},
        )
    with pytest.raises(SandboxError, match="the test patch does not apply"):  # on base, too
        unfit = replace(theirs, test_patch=theirs.test_patch.replace("import", "export"))
        grade(unfit, theirs.patch.encode(), sandboxes, config, bench_of(sandboxes, config))


def test_what_the_installation_runs_finds_nothing_of_the_tests(theirs, sandboxes, config, bench):
    look = "ls -a / /tmp ~ tests; cat /tmp/*.sh; env; cat /proc/[0-9]*/cmdline | tr '\\0' ' '"
    run = bench.run(theirs, with_install(sandboxes, theirs, look))
    installation = run.log.split("+ conda activate testbed")[1]
    afterwards = run.log.partition(installation)[2]
    assert "+ bash install.sh" in installation and run.channel is Channel.WHOLE
    assert "git apply" in afterwards and theirs.fail_to_pass[0] in afterwards
    for secret in (
        "plugin_",
        "SWEGYM_TUTORIAL_REPORT",
        "git apply",
        theirs.fail_to_pass[0].rpartition("::")[2],
    ):
        assert secret not in installation, secret


@pytest.mark.parametrize(
    "name, outcome",
    [
        ("conftest.py marks all as xfail", Outcome.UNRESOLVED),
        ("a plugin by entry points", Outcome.UNRESOLVED),
        ("forged lines printed at exit", Outcome.UNRESOLVED),
        ("os._exit(0) after forged lines, to the open terminal", Outcome.TAMPERED),
        ("TestReport patched", Outcome.TAMPERED),
        ("a plugin registered while tests are collected", Outcome.TAMPERED),
        ("the tests' functions exchanged when their module is loaded", Outcome.TAMPERED),
    ],
)
def test_cheats_earn_nothing_here_either(theirs, sandboxes, config, bench, name, outcome):
    (cheat,) = (cheat for cheat in CHEATS if cheat.name == name)
    verdict = grade(theirs, patch_of_cheat(cheat, sandboxes, theirs), sandboxes, config, bench)
    assert verdict.outcome is outcome and verdict.detail, verdict


def test_case_9_failures_that_are_made_expected_ones_would_be_resolved_by_the_package_alone(
    theirs, sandboxes, config, bench
):
    # It counts XFAIL as passed.
    cheats = {cheat.name: cheat for cheat in CHEATS}
    patch = patch_of_cheat(cheats["conftest.py turns failures into expected ones"], sandboxes, theirs)
    assert bench.plain(theirs, patch) is Outcome.RESOLVED
    assert bench.plain(theirs, patch_of(sandboxes, theirs, "echo >> README.md")) is Outcome.UNRESOLVED


def test_canaries_run_by_their_file_or_by_its_name(theirs):
    kit = make_kit("tests")
    assert kit.canary is not None
    for tests, end in ((PYTEST, f" {kit.canary.path}"), ('pytest -rA -k "a or', f' or {kit.canary.stem}"')):
        by_name = SwegymHarness(lambda tests=tests: Named(tests)) if "-k" in tests else SwegymHarness(Like)
        line = by_name.script(theirs, MARK, kit).split(" applied ")[1].splitlines()[1]
        assert line.endswith(end), line


class Named(Like):
    """One whose tests are chosen by names."""

    def commands(self, task, install=True):
        *before, _, last = super().commands(task, install)
        return [*before, 'pytest -rA -k "a or b"', last]


def test_a_crash_is_the_agents_zero_where_the_tests_run_without_it(theirs, sandboxes, config, bench):
    path = touched_files(theirs.patch)[0]
    patch = patch_of(sandboxes, theirs, f"printf 'import os\\nos._exit(7)\\n' >> {path}")
    verdict = grade(theirs, patch, sandboxes, config, bench)
    assert (verdict.outcome, verdict.reward) == (Outcome.TESTS_CRASHED, 0.0)
    assert "exit code 7" in verdict.detail
    broken = bench_of(sandboxes, config, "conda: not there;")
    with pytest.raises(SandboxError, match="tell nothing on the untouched repository"):
        grade(theirs, patch, sandboxes, config, broken)


def test_case_16_a_script_of_megabytes_and_a_log_of_megabytes_travel(theirs, sandboxes, config, bench):
    # rllm#649
    data = "".join(f"+{n:099}\n" for n in range(50_000))
    data = (
        "diff --git a/data.csv b/data.csv\nnew file mode 100644\n--- /dev/null\n+++ b/data.csv\n@@ -0,0 +1,50000 @@\n"
        + data
    )
    large = replace(theirs, test_patch=data + theirs.test_patch)
    noisy = bench_of(sandboxes, config, f"cat data.csv; {PYTEST} --ignore")
    run = noisy.run(large, theirs.patch.encode())
    assert run.told and len(run.log) <= LOG_BYTES + 100 and "characters left out" in run.log
    assert {run.tests[test] for test in (*theirs.fail_to_pass, *theirs.pass_to_pass)} == {"PASSED"}


# Case 1 (SWE-bench#43, #279): ids are cut at their first space, and collide.
def test_case_1_cut_ids_are_resolved_and_a_collision_counts_as_its_worst_in_any_order(theirs):
    cut = replace(theirs, fail_to_pass=("t.py::f[a",), pass_to_pass=("t.py::g",))
    fine = ["PASSED t.py::f[a b]", "PASSED t.py::f[a c]", "PASSED t.py::g"]
    mixed = ["PASSED t.py::f[a b]", "FAILED t.py::f[a c] - assert 0", "PASSED t.py::f[a d]", "PASSED t.py::g"]
    for order in (1, -1):
        reading = read(cut, "\n".join(fine[::order]))
        assert reading.tests == {"t.py::f[a": "PASSED", "t.py::g": "PASSED"} and not reading.notes
        reading = read(cut, "\n".join(mixed[::order]))
        assert reading.tests == {"t.py::f[a": "FAILED", "t.py::g": "PASSED"}
        assert reading.notes == "told more than once, so that the worst counts: t.py::f[a (FAILED, PASSED)"


def test_a_flood_of_lines_costs_little_and_hides_nothing(theirs, monkeypatch):
    # A loop that prints x leaves 16 million lines, and reading each by the package took minutes and gigabytes.
    parsed = []
    monkeypatch.setattr(
        Like, "parse", lambda self, task, log, real=Like.parse: parsed.append(log) or real(self, task, log)
    )
    monkeypatch.setattr(swegym_grading, "MOST_TESTS", 3)
    wanted = replace(theirs, fail_to_pass=("t.py::z",), pass_to_pass=())
    results = [
        *(f"PASSED t.py::{n}" for n in range(10)),
        "PASSED t.py::z",
        "FAILED t.py::1",
        "FAILED t.py::9",
    ]
    tests = read(wanted, "x\n" * 100_000 + "\n".join(results) + "\nx" * 100_000).tests
    assert tests == {"t.py::0": "PASSED", "t.py::1": "FAILED", "t.py::2": "PASSED", "t.py::z": "PASSED"}
    assert len(parsed) < 20
    monkeypatch.setattr(
        Like, "parse", lambda self, task, log: {log.split()[0]: "PASSED"} if log.endswith(" ok") else {}
    )
    assert read(wanted, "x\nt.py::z ... ok").tests == {"t.py::z": "PASSED"}  # words of another runner


def test_a_line_that_the_package_stumbles_over_ends_no_run(theirs, monkeypatch):
    # Its parser of pydantic's tests raises IndexError where an agent's code prints ERROR.
    monkeypatch.setattr(
        Like, "parse", lambda self, task, log: dict([log.split()[1::-1]]) if log.split()[1] else {}
    )
    assert read(theirs, "PASSED t.py::a\nERROR\nPASSED t.py::b").tests == {
        "t.py::a": "PASSED",
        "t.py::b": "PASSED",
    }


def test_only_what_is_told_between_the_marks_counts(theirs):
    harness = SwegymHarness(Like)
    log = f"PASSED t.py::early\n\n{MARK} applied 0\nPASSED t.py::a\nFAILED t.py::b\n\n{MARK} ended\nPASSED t.py::b\n"
    assert harness.read(theirs, log, MARK).tests == {"t.py::a": "PASSED", "t.py::b": "FAILED"}
    assert harness.read(theirs, log, "other").tests == {}
    forged = f"\n{MARK} applied 0\nPASSED t.py::b\n\n{MARK} ended\nFAILED t.py::b\n\n{MARK} ended\n"
    assert harness.read(theirs, forged, MARK).tests == {"t.py::b": "FAILED"}
    killed = f"\n{MARK} applied 0\nPASSED t.py::b\n"
    assert harness.read(theirs, killed, MARK).tests == {"t.py::b": "PASSED"}
    usage = f"\n{MARK} applied 0\nERROR: file or directory not found: t.py\nERROR: usage: pytest\n"
    assert harness.read(theirs, usage, MARK).tests == {}
    refused = harness.read(
        theirs, f"+ git apply\nerror: no such file\n\n{MARK} applied 1\nPASSED t.py::a\n", MARK
    )
    assert refused.tests == {} and refused.hindered == "the test patch does not apply: error: no such file"


XFAILS = """
import pytest, sys
def test_always(): pytest.xfail("known")
def test_now():
    if open("state").read().strip() != "base": pytest.xfail("new")
def test_fixed(): assert open("state").read().strip() != "base"
def test_skipped(): pytest.skip(reason="none") if open("state").read().strip() == "skip" else None
"""


def test_a_test_that_fails_as_expected_counts_where_it_did_before(theirs, sandboxes, config, bench):
    lines = XFAILS.strip().splitlines()
    new = "diff --git a/tests/test_x.py b/tests/test_x.py\nnew file mode 100644\n--- /dev/null\n+++ b/tests/test_x.py\n"
    new += f"@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)
    files = {**theirs.files, "state": "base\n"}
    other = replace(theirs, files=files, test_patch=new, patch="", base_commit="")
    box = sandboxes.open(other)
    other = replace(other, base_commit=box.exec("git rev-parse HEAD", timeout=60).output.strip())
    box.close()

    def outcome(state: str, *pass_to_pass: str):
        wanted = replace(
            other,
            fail_to_pass=("tests/test_x.py::test_fixed",),
            pass_to_pass=tuple(f"tests/test_x.py::{name}" for name in pass_to_pass),
        )
        patch = patch_of(sandboxes, other, f"echo {state} > state")
        verdict = grade(wanted, patch, sandboxes, config, bench)
        return verdict.outcome, verdict.detail

    assert outcome("fixed", "test_always", "test_skipped") == (Outcome.RESOLVED, "")
    assert outcome("fixed", "test_now") == (
        Outcome.UNRESOLVED,
        "not passed: tests/test_x.py::test_now (XFAIL)",
    )
    assert outcome("fixed", "test_always", "test_now")[0] is Outcome.UNRESOLVED
    assert outcome("skip", "test_skipped") == (
        Outcome.UNRESOLVED,
        "not passed: tests/test_x.py::test_skipped (SKIPPED)",
    )
    assert outcome("fixed", "test_nowhere")[0] is Outcome.UNRESOLVED
    nothing = replace(other, fail_to_pass=(), pass_to_pass=())
    patch = patch_of(sandboxes, other, "echo fixed > state")
    assert grade(nothing, patch, sandboxes, config, bench).outcome is Outcome.UNRESOLVED


def test_a_missing_package_and_an_unknown_repository_are_told_before_anything_starts(theirs, monkeypatch):
    swegym_grading.load_swegym.cache_clear()
    monkeypatch.setitem(sys.modules, "swegym", None)
    with pytest.raises(GradingUnavailable, match=r"pip install \"swegym @ git\+https://github.com/SWE-Gym"):
        check_graders([theirs])
    check_graders([replace(theirs, parser="pytest")])
    unknown = replace(theirs, version="unknown")
    assert f"{unknown.repo} unknown" in (SwegymHarness(Like).why_not([theirs, unknown]) or "")
    with pytest.raises(GradingUnavailable, match="swegym knows no tests for"):
        SwegymHarness(Like).script(unknown, MARK, KIT)


def test_a_script_of_another_form_is_refused(theirs, monkeypatch):
    monkeypatch.setattr(Like, "commands", lambda self, task, install: ["a", "b", "c", "d", "e"])
    with pytest.raises(GradingUnavailable, match="not that of the release known here"):
        SwegymHarness(Like).script(theirs, MARK, KIT)


# What follows runs the package itself, on small repositories that bear the names of SWE-Gym's.


@pytest.fixture(scope="module")
def package():
    pytest.importorskip("swegym", reason=f"an optional extra: {swegym_grading.INSTALL}")
    return swegym_grading.load_swegym()


def diff_of(sandboxes, task, command: str) -> str:
    return patch_of(sandboxes, task, command).decode()


@pytest.fixture(scope="module")
def monai(task, sandboxes, package):
    """The bundled task under the name of a repository whose tests are named by their files."""
    theirs = replace(task, instance_id="Project-MONAI__MONAI-1", repo="Project-MONAI/MONAI", version="1.3")
    return committed(sandboxes, replace(theirs, files={**task.files, "conftest.py": ""}))


def committed(sandboxes, task):
    """The task with the commit that its files make, graded by swegym."""
    task = replace(task, parser="swegym", test_command="", base_commit="")
    box = sandboxes.open(task)
    commit = box.exec("git rev-parse HEAD", timeout=60).output.strip()
    box.close()
    return replace(task, base_commit=commit)


RUNNER = """
import pathlib, pytest
CASES = dict(part.split("]\\n", 1) for part in pathlib.Path("data/check.test").read_text().split("[case ")[1:])
@pytest.mark.parametrize("text", CASES.values(), ids=CASES)
def test_case(text):
    scope = {}
    exec(pathlib.Path("code.py").read_text(), scope)
    exec(text, scope)
"""


@pytest.fixture(scope="module")
def mypy(sandboxes, package, task):
    """A task whose tests are cases in a data file, and are chosen by their names."""
    files = {
        "code.py": "def double(x): return x\n",
        "test_cases.py": RUNNER,
        "data/check.test": "[case testOld]\nassert double(0) == 0\n",
    }
    theirs = replace(task, instance_id="python__mypy-1", repo="python/mypy", version="1.10", files=files)
    theirs = committed(sandboxes, theirs)
    return replace(
        theirs,
        patch=diff_of(sandboxes, theirs, "echo 'def double(x): return x + x' > code.py"),
        test_patch=diff_of(
            sandboxes, theirs, r"printf '[case testNew]\nassert double(2) == 4\n' >> data/check.test"
        ),
        fail_to_pass=("test_cases.py::test_case[testNew]",),
        pass_to_pass=(),
    )


@pytest.mark.slow
def test_the_package_grades_gold_useless_and_broken_patches(monai, mypy, sandboxes, config):
    for theirs in (monai, mypy):
        check_graders([theirs])
        assert validation.fault_of(theirs, sandboxes, config) is None
        useless = patch_of(sandboxes, theirs, "echo more >> README.md")
        assert grade(theirs, useless, sandboxes, config).outcome is Outcome.UNRESOLVED
    path = touched_files(monai.patch)[0]
    crash = patch_of(sandboxes, monai, f"printf 'import os\\nos._exit(0)\\n' >> {path}")
    assert grade(monai, crash, sandboxes, config).outcome is Outcome.TESTS_CRASHED
    forged = "\n".join(f"echo PASSED {test}" for test in (*monai.fail_to_pass, *monai.pass_to_pass))
    early = patch_of(sandboxes, monai, f'printf \'import os\\nos.system("""{forged}""")\\n\' > setup.py')
    verdict = grade(monai, early, sandboxes, config)
    assert verdict.outcome is Outcome.UNRESOLVED and "\nPASSED " in verdict.log.partition(" applied 0")[0]


def test_our_reading_is_the_packages_own_where_no_id_is_told_twice(monai, sandboxes, config, tmp_path):
    from swegym.harness.grading import get_logs_eval

    run = Bench(sandboxes, config).run(monai, monai.patch.encode())
    log = tmp_path / monai.instance_id.lower() / "test_output.txt"
    log.parent.mkdir()
    log.write_text(f">>>>> Applied Patch (pred)\n{run.log}")
    theirs, found = get_logs_eval(str(log))
    canaries = {test for test in run.plain if "::" in test} - {*run.tests}
    # pip says "ERROR: Could not ..." and "ERROR: No matching ..." before the tests.
    assert found and len(canaries) == 2 and {*theirs} - {*run.tests} <= {"Could", "No", *canaries}
    assert run.tests.items() <= theirs.items() and {*run.tests.values()} == {"PASSED"}


def test_the_package_knows_every_version_of_the_seven_repositories(task, package):
    from swegym.harness.constants import MAP_REPO_VERSION_TO_SPECS

    seven = (
        *("python/mypy", "iterative/dvc", "Project-MONAI/MONAI", "getmoto/moto"),
        *("pandas-dev/pandas", "facebookresearch/hydra", "dask/dask"),
    )
    harness = SwegymHarness()
    for repo in seven:
        for version in MAP_REPO_VERSION_TO_SPECS[repo.lower()]:
            script = harness.script(replace(task, repo=repo, version=version), MARK, KIT)
            assert script.count(f" {MARK}") == 2 and "git apply -v - <<" in script
    with pytest.raises(GradingUnavailable, match=rf"{task.instance_id} \(dask/dask 0.0\)"):
        check_graders([replace(task, parser="swegym", repo="dask/dask", version="0.0")])
