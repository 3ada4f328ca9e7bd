"""What a run's events add up to, where no other test shows it."""

from __future__ import annotations

import resource
import subprocess
import sys

from swegym_tutorial.summary import RunSummary
from swegym_tutorial.terminal import left_out_lines, progress_line
from swegym_tutorial.words import summary_table


def test_notes_on_long_work_stand_beside_their_phase() -> None:
    summary = RunSummary()
    summary.update([{"event": "phase", "name": "looking for images"}, {"event": "note", "text": "3 of 31"}])
    assert progress_line(summary) == "looking for images: 3 of 31"
    summary.update([{"event": "phase", "name": "drawing the figure"}])
    assert progress_line(summary) == "drawing the figure" and summary.notes == ["3 of 31"]


def test_case_11_tasks_without_an_image_are_counted_where_people_look() -> None:
    # SWE-Gym#18, OpenHands#7168: images missing or misnamed
    summary = RunSummary()
    summary.update([{"event": "tasks_left_out", "tasks": {"a__a-1": "no image x", "b__b-2": "no image y"}}])
    told = "2 tasks left out (a__a-1, b__b-2): no image x"
    assert left_out_lines(summary) == [told]
    assert ("tasks", told) in summary_table(summary)
    assert left_out_lines(RunSummary()) == []


def test_case_4_tasks_that_are_not_valid_are_counted_beside_them() -> None:
    # SWE-bench#26, #294: known to be broken or flaky
    summary = RunSummary()
    summary.update([{"event": "tasks_left_out", "tasks": {"c__c-3": "not valid: flaky: 3 tries differ"}}])
    summary.update([{"event": "tasks_left_out", "tasks": {"a__a-1": "no image x"}}])
    lines = [
        "1 task left out (c__c-3): not valid: flaky: 3 tries differ",
        "1 task left out (a__a-1): no image x",
    ]
    assert left_out_lines(summary) == lines and ("tasks", "; ".join(lines)) in summary_table(summary)
    summary.update(
        [{"event": "run_start", "steps": 1, "clients": 1, "time": 1.0}]
    )  # a resumed run says it anew
    assert left_out_lines(summary) == []


def test_a_run_may_open_as_many_files_as_the_system_allows() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    code = (
        "import resource; from swegym_tutorial.run import _raise_file_limit as up\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard)); up()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    expected = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    assert done.stdout.strip() == str(expected), done.stderr


def test_a_batch_that_nothing_is_resolved_in_says_what_became_of_it() -> None:
    summary = RunSummary()
    start = {"event": "run_start", "time": 1.0, "steps": 3, "clients": 1}
    episode = {"event": "episode", "phase": "run-1", "job": "train-job0", "reward": 0.0}
    summary.update([start, {"event": "phase", "name": "training"}])
    summary.update(
        [{**episode, "outcome": outcome} for outcome in ("empty_patch", "unresolved", "empty_patch")]
    )
    assert progress_line(summary) == "train-job0 batch 1 of 3: 3 attempts graded, 0 resolved (2 empty_patch)"
    summary.update([{**episode, "reward": 1.0, "outcome": "resolved"}])
    assert progress_line(summary) == "train-job0 batch 1 of 3: 4 attempts graded, 1 resolved"
