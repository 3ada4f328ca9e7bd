"""What a run's events add up to, where no other test shows it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from synthetic import BEGAN, Events, write_run

from swegym_tutorial import cli
from swegym_tutorial.events import EventReader
from swegym_tutorial.plots import png_bytes, reward_time_figure
from swegym_tutorial.summary import ADD_NOTHING, JobState, RunSummary, job_order
from swegym_tutorial.terminal import left_out_lines, progress_line, summarise
from swegym_tutorial.words import alt_text, status_line, summary_table


def test_notes_on_long_work_stand_beside_their_phase() -> None:
    summary = RunSummary()
    summary.update([{"event": "phase", "name": "looking for images"}, {"event": "note", "text": "3 of 31"}])
    assert progress_line(summary) == "looking for images: 3 of 31"
    summary.update([{"event": "phase", "name": "drawing the figure"}])
    assert progress_line(summary) == "drawing the figure" and summary.notes == ["3 of 31"]


def test_a_pause_is_told_in_every_phase() -> None:
    summary = RunSummary()
    summary.update([{"event": "phase", "name": "evaluating the held-out split before training"}])
    summary.update([{"event": "evaluation_start", "job": "base", "attempts": 32}, {"event": "paused"}])
    told = "evaluating the held-out split before training: 0 of 32 attempts, 0 resolved"
    assert progress_line(summary) == f"paused; {told}"
    summary.update([{"event": "unpaused"}])
    assert progress_line(summary) == told


def test_case_11_tasks_without_an_image_are_counted_where_people_look() -> None:
    # SWE-Gym#18, OpenHands#7168: images missing or misnamed
    summary = RunSummary()
    summary.update([{"event": "tasks_left_out", "tasks": {"a__a-1": "no image x", "b__b-2": "no image y"}}])
    told = "2 tasks left out (a__a-1, b__b-2): no image x"
    assert left_out_lines(summary) == [told]
    assert ("tasks", told) in summary_table(summary)
    assert left_out_lines(RunSummary()) == []


def test_a_split_that_lost_all_its_tasks_is_told_beside_them_until_a_resumed_run_says_it_anew() -> None:
    summary = RunSummary()
    gone = {"event": "tasks_left_out", "tasks": {"a__a-1": "no image x"}, "splits": ["held-out-families"]}
    summary.update([gone])
    assert left_out_lines(summary)[1:] == [
        "the split held-out-families is not measured: no task of it is left"
    ]
    summary.update([{"event": "run_start", "steps": 1, "clients": 1, "time": 1.0}])
    assert left_out_lines(summary) == []


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
        "import resource; from swegym_tutorial.connect import raise_file_limit as up\n"
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
    own = [
        {**episode, "reward": 0.9, "outcome": "unresolved"},
        {**episode, "reward": 0.9, "outcome": "resolved"},
    ]
    summary.update(own)  # whatever a run's own reward gives
    assert progress_line(summary) == "train-job0 batch 1 of 3: 6 attempts graded, 2 resolved"


# -- What a run survives ---------------------------------------------------------------------------


def told(events: Events, *more: tuple[str, dict[str, Any]]) -> RunSummary:
    """Feed a run's events, and then others by name and fields."""
    summary = RunSummary()
    summary.update(events)
    summary.update([events.event(name, **fields) for name, fields in more])
    assert summary.odd_events == 0
    return summary


def steps(summary: RunSummary) -> dict[str, list[int]]:
    return {job: [step.step for step in done] for job, done in summary.steps.items()}


JOB = "train-job0"
UNDER_WAY: dict[str, Any] = {"steps": 4, "planned": 9, "evaluations": (), "end": ""}


def test_case_24_steps_after_the_checkpoint_that_a_run_goes_on_from_are_no_part_of_it() -> None:
    # tinker-cookbook#941
    resumed = {"checkpoint": "tinker://x", "restarted": []}
    filling = {"group": 40, "fate": "kept"}
    summary = told(
        Events(**UNDER_WAY, clients=2),
        ("group", {"job": JOB, **filling}),
        ("resumed", {"job": JOB, "step": 1, **resumed}),
    )
    assert steps(summary) == {JOB: [0, 1], "train-job1": [0, 1, 2, 3]} and JOB not in summary.filling
    summary.update(Events(**UNDER_WAY).batch(JOB, 2))
    assert steps(summary)[JOB] == [0, 1, 2] and summary.filling[JOB].groups.total() == 0
    assert steps(told(Events(**UNDER_WAY), ("resumed", {"job": JOB, "step": -1, **resumed}))) == {}
    assert progress_line(summary).startswith("2 of 2 clients in training")


def test_a_run_that_went_back_forgets_what_came_after() -> None:
    events = Events(steps=4)
    summary = told(events, ("rolled_back", {"job": JOB, "step": 0}))
    assert steps(summary) == {JOB: [0]} and [e.label for e in summary.evaluations] == ["before"]
    assert summary.notes == [f"{JOB} goes back to the checkpoint of step 1"]
    summary = told(Events(steps=4), ("rolled_back", {"job": JOB, "step": -1}))
    assert steps(summary) == {} and summary.notes == [f"{JOB} goes back to the start"]
    assert "steps done" not in dict(summary_table(summary))


def test_a_run_that_is_extended_is_not_yet_measured_after_training() -> None:
    events = Events(steps=2)
    summary = told(events)
    assert [e.label for e in summary.evaluations] == ["before", "after"]
    summary.update([events.event("run_start", steps=3, clients=1, resumed=True)])
    assert len(summary.evaluations) == 2 and summary.status == "running"
    summary.update(events.batch(JOB, 2))
    assert [e.label for e in summary.evaluations] == ["before"]


def test_a_wait_is_over_when_it_is_said_when_the_run_ends_and_when_it_is_begun_anew() -> None:
    waiting = ("waiting", {"what": "sampling", "seconds": 50.0, "reason": "HTTP 503"})
    events = Events(**UNDER_WAY)
    summary = told(events, waiting)
    assert summary.waiting is not None and summary.waiting.since == pytest.approx(events.now - 50)
    row = dict(summary_table(summary, events.now + 10))["waiting"]
    assert row == "1 min 0 s for the server (sampling): HTTP 503"
    for end in (
        ("waiting_over", {"seconds": 60.0}), ("run_done", {}), ("run_stopped", {}), ("run_failed", {"reason": "x"}),
        ("run_start", {"steps": 9, "clients": 1}),
    ):  # fmt: skip
        over = told(Events(**UNDER_WAY), waiting, end)
        assert over.waiting is None and "waiting" not in dict(summary_table(over))


def test_each_client_has_its_state_and_a_resume_begins_it_anew() -> None:
    events = Events(**UNDER_WAY, clients=3)
    summary = told(
        events,
        ("job_failed", {"job": "train-job1", "reason": "PolicyError: gone"}),
        ("out_of_time", {"job": JOB, "step": 4, "hours": 1}),
        ("job_done", {"job": JOB}),
        ("job_done", {"job": "train-job2", "step": 4}),
    )
    assert summary.jobs == {
        JOB: JobState("out of time"), "train-job1": JobState("failed", "PolicyError: gone"), "train-job2": JobState("done"),
    }  # fmt: skip
    row = dict(summary_table(summary))["clients"]
    assert row == "job0 out of time; job2 done; train-job1 failed: PolicyError: gone"
    summary.update([events.event("run_start", steps=9, clients=3, resumed=True)])
    assert set(summary.jobs.values()) == {JobState("running")} and not summary.out_of_time


def test_clients_are_in_the_order_of_their_numbers() -> None:
    events = Events(**UNDER_WAY)
    summary = RunSummary()
    for number in (10, 2, 0, 11, 1):
        summary.update(events.batch(f"train-job{number}", 0))
    names = [f"train-job{n}" for n in (0, 1, 2, 10, 11)]
    assert list(summary.steps) == list(summary.filling) == names == sorted(set(names), key=job_order)


def test_what_happened_on_the_way_is_noted_and_counted() -> None:
    unfinished = {
        "phase": "run-1",
        "job": JOB,
        "group": 3,
        "attempt": 1,
        "instance_id": "x",
        "policy_version": 0,
    }
    summary = told(
        Events(**UNDER_WAY),
        ("settings_changed", {"changed": {"steps": [4, 9], "hours": [1.0, 2.0]}}),
        ("reaped", {"kind": "modal", "count": 1, "runs": ["r-1"]}),
        (
            "recovered",
            {"job": JOB, "step": 3, "checkpoint": "tinker://x", "reason": "session lost", "seconds": 61.4},
        ),
        (
            "recovered",
            {"job": JOB, "step": -1, "checkpoint": "tinker://y", "reason": "HTTP 500", "seconds": 2},
        ),
        *[("attempt_unfinished", unfinished)] * 3,
        ("episodes_deleted", {"count": 40, "bytes": 1_500_000_000}),
        ("episodes_deleted", {"count": 2, "bytes": 500_000_000}),
    )
    assert summary.notes == [
        "settings changed: steps was 4, is 9; hours was 1.0, is 2.0",
        "ended 1 sandbox of the kind modal that earlier parts of this run had left",
        f"{JOB} goes on from the checkpoint of step 4 on a new adapter, after 61 s: session lost",
        f"{JOB} goes on from the start on a new adapter, after 2 s: HTTP 500",
    ]
    rows = dict(summary_table(summary))
    assert summary.recovered == 2 and rows["recovered"].startswith("2 times")
    assert rows["unfinished"] == "3 attempts of earlier parts of this run"
    assert rows["disk"] == "the 42 oldest recorded attempts were deleted (2.0 GB): see episodes_gb"


def test_of_many_notes_the_last_are_kept() -> None:
    summary = told(Events(**UNDER_WAY), *[("note", {"text": str(n)}) for n in range(500)])
    assert summary.noted == 500 and summary.notes == [str(n) for n in range(300, 500)]


def test_case_37_lost_attempts_are_in_the_table() -> None:
    # rllm#710, open-instruct#1887
    key = {"phase": "run-1", "job": JOB, "group": 90, "attempt": 0}
    lost = ("episode", {**key, "reward": None, "outcome": "infrastructure", "reason": "SandboxError: died"})
    rows = dict(summary_table(told(Events(**UNDER_WAY), *[lost] * 64)))
    assert rows["faults"] == "64 attempts lost to infrastructure faults (20.0 % of all)"


def test_odd_lines_of_the_new_events_hide_no_others() -> None:
    summary = RunSummary()
    names = [
        "waiting",
        "recovered",
        "resumed",
        "rolled_back",
        "job_failed",
        "job_done",
        "settings_changed",
        "reaped",
    ]
    summary.update([{"time": 1.0, "event": name} for name in [*names, "episodes_deleted", "out_of_time"]])
    summary.update([{"time": 2.0, "event": "note", "text": "still here"}])
    assert summary.odd_events == 10 and summary.notes[-1] == "still here"


FOREIGN: dict[str, dict[str, Any]] = {
    "time": {"event": "note", "text": "x", "time": "soon"},
    "no time": {"event": "note", "text": "x", "time": None},
    "list of changes": {"event": "settings_changed", "changed": [1]},
    "list of tasks": {"event": "tasks_left_out", "tasks": ["a"]},
    "numbered phase": {"event": "phase", "name": 5},
    "no phase": {"event": "phase", "name": None},
    "numbered job": {"event": "job_done", "job": 5},
    "list as a job": {"event": "out_of_time", "job": ["x"]},
    "group of a numbered job": {"event": "group", "job": 5, "fate": "kept"},
    "group with a list as its fate": {"event": "group", "job": "train-job0", "fate": ["kept"]},
    "episode of a list": {"event": "episode", "phase": "run-1", "job": ["x"], "reward": 1, "outcome": "resolved"},
    "episode with tokens in words": {
        "event": "episode", "phase": "run-1", "job": "train-job0", "reward": 1, "sampled_tokens": "many",
    },
    "steps in words": {"event": "run_start", "steps": "many", "clients": 1},
    "clients in words": {"event": "run_start", "steps": 3, "clients": "x"},
    "groups in words": {"event": "run_start", "steps": 3, "clients": 1, "groups_per_batch": "x"},
    "attempts in words": {"event": "evaluation_start", "job": "base", "attempts": "x"},
    "rate in words": {
        "event": "evaluation", "label": "before", "job": "base", "split": "x", "attempts": "x", "resolved": 1, "lost": 0,
    },
    "bytes in words": {"event": "episodes_deleted", "count": 1, "bytes": "x"},
    "waiting in words": {"event": "waiting", "what": "x", "reason": "y", "seconds": "x"},
    "time beyond all floats": {"event": "note", "text": "x", "time": 10**400},
    "infinite time": {"event": "note", "text": "x", "time": float("inf")},
    "no number as time": {"event": "note", "text": "x", "time": float("nan")},
    "time beyond all calendars": {"event": "note", "text": "x", "time": 1e300},
    "steps beyond all floats": {"event": "run_start", "steps": 10**400, "clients": 1},
    "seconds beyond all floats": {
        "event": "recovered", "job": "train-job0", "step": 1, "reason": "x", "seconds": 10**400,
    },
    **{
        f"splits are {splits!r}": {"event": "tasks_left_out", "tasks": {"a": "b"}, "splits": splits}
        for splits in ("abc", {"a": 1}, [1, None], None, 3)
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [*FOREIGN, "reward_mean", "step", "groups", "work_seconds", "job", "batch_seconds"]
)
def test_foreign_values_hide_no_others(name: str) -> None:
    events = Events(**UNDER_WAY, clients=2)
    summary, lines = RunSummary(), list(events)
    last = lines[-1]
    assert last["event"] == "step_done"
    odd = FOREIGN.get(name) or {**last, name: {"x": "y"} if name.endswith("s") else ["x"]}
    summary.update([*lines, {"time": last["time"], **odd}])
    assert summary.odd_events == 1
    plain = RunSummary()
    plain.update(lines)
    assert summary_table(summary, 1e10) == summary_table(plain, 1e10) and alt_text(summary) == alt_text(plain)
    png_bytes(reward_time_figure(summary))
    more = events.event("rollout_start", phase="run-1", job="train-job10", group=0, attempt=0)
    summary.update(
        [more, events.event("job_done", job="train-job10"), events.event("note", text="still here")]
    )
    assert summary.odd_events == 1 and summary.notes[-1] == "still here" and "train-job10" in summary.jobs


@pytest.mark.parametrize("mean", [10**400, float("nan"), -0.1, 1000])
@pytest.mark.parametrize("name", ["reward_mean", "reward_mean_kept"])
def test_a_step_whose_mean_reward_none_can_be_is_an_odd_event(name: str, mean: float) -> None:
    lines = list(Events(**UNDER_WAY))
    summary = RunSummary()
    summary.update([*lines[:-1], {**lines[-1], name: mean}])
    assert summary.odd_events == 1 and steps(summary) == {JOB: [0, 1, 2]}


def test_splits_that_are_told_twice_are_counted_once_and_an_odd_line_leaves_no_half() -> None:
    summary = RunSummary()
    gone = {
        "event": "tasks_left_out",
        "tasks": {"a": "b"},
        "splits": ["held-out-a", "held-out-b", "held-out-a"],
    }
    summary.update([gone, {**gone, "splits": ["held-out-b", "held-out-c"]}])
    assert summary.unmeasured == ["held-out-a", "held-out-b", "held-out-c"]
    summary.update([{**gone, "tasks": {"c": "d"}, "splits": ["held-out-d", 4]}])
    assert summary.odd_events == 1 and summary.left_out == {"a": "b"} and len(summary.unmeasured) == 3


def test_nothing_in_a_log_steers_the_terminal_that_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "x\x1b[2Jy\x9bz\ra\x07"
    events = Events(steps=1, splits=(f"held-out-{evil}",))
    told = [
        ("tasks_left_out", {"tasks": {f"{evil}\nb": f"{evil}\nno image"}, "splits": [f"held-out\n{evil}"]}),
        ("note", {"text": evil}),
        ("attempt_fault", {"reason": evil}),
        ("settings_changed", {"changed": {evil: [evil, evil]}}),
        ("recovered", {"job": evil, "step": 1, "seconds": 1.0, "reason": evil}),
        ("job_failed", {"job": f"train-{evil}", "reason": evil}),
        ("waiting", {"what": evil, "reason": evil, "seconds": 1.0}),
        ("phase", {"name": evil}),
        ("run_failed", {"reason": evil}),
    ]
    (tmp_path / "run").mkdir()
    lines = [*events, *(events.event(name, **fields) for name, fields in told)]
    (tmp_path / "run/events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = summarise(tmp_path / "run")
    assert summary.odd_events == 0 and len(left_out_lines(summary)) == 2
    assert not any("\n" in line for line in left_out_lines(summary))
    assert cli.main(["show", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out + "\n".join([*summary.notes, *map(" ".join, summary_table(summary))])
    assert "\N{REPLACEMENT CHARACTER}[2Jy" in shown
    assert not [c for c in shown if c != "\n" and (c < " " or "\x7f" <= c <= "\x9f")]


def test_a_clock_that_is_set_back_takes_nothing_off_the_run_s_time() -> None:
    lines = list(Events(steps=4, evaluations=()))
    true, read = RunSummary(), RunSummary()
    true.update(lines)
    half = len(lines) // 2
    read.update([*lines[:half], *({**event, "time": event["time"] - 3600} for event in lines[half:])])
    assert read.seconds == pytest.approx(true.seconds, abs=10) and read.set_back > 3500
    assert read.rate.a_second(BEGAN) == pytest.approx(true.rate.a_second(BEGAN), rel=0.5)
    assert status_line(read).startswith("done after ") and "-" not in status_line(read)
    read.update([{"time": 5.0, "event": "run_done"}])
    assert "-" not in status_line(read)


def test_tokens_a_second_are_right_where_the_reader_s_clock_is_behind() -> None:
    summary = told(Events(**UNDER_WAY))
    last = summary.last_event
    assert last is not None
    behind, true = (dict(summary_table(summary, now))["tokens sampled"] for now in (last - 30, last))
    assert behind == true and summary.rate.a_second(last - 100) < summary.tokens / 10


def test_a_pause_before_a_part_of_the_run_begins_is_that_part_s() -> None:
    start = ("run_start", {"steps": 9, "clients": 1, "resumed": True})
    paused, stopped = ("paused", {}), ("run_stopped", {})
    assert told(Events(**UNDER_WAY), stopped, paused, start).status == "paused"
    unfinished = ("attempt_unfinished", {"phase": "run-1", "job": JOB})
    assert told(Events(**UNDER_WAY), unfinished, paused, start).status == "paused"
    assert told(Events(**UNDER_WAY), paused, start).status == "running", "of the part that was killed"
    assert told(Events(**UNDER_WAY), paused, stopped, start).status == "running"
    summary = RunSummary()
    summary.update([{"event": "paused"}, {"event": "run_start", "time": 1.0, "steps": 9, "clients": 1}])
    assert summary.status == "paused"


def test_events_that_add_nothing_may_be_skipped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3, clients=2, evaluations=("before",), end="")
    every, most = EventReader(folder), EventReader(folder, skip=ADD_NOTHING)
    read_all, skipped = RunSummary(), RunSummary(most.skipped)
    read_all.update(every.stream())
    skipped.update(most.stream())
    assert summary_table(skipped, 1e9) == summary_table(read_all, 1e9) and len(summary_table(skipped)) > 5
    counts = most.skipped()
    assert counts["rollout_start", "run-1", "train-job1"] == 3 * 64
    assert counts["sample", "evaluation-before", "base"] == 256
    assert read_all.odd_events == 0 and not every.skipped()


# -- What goes on right now ------------------------------------------------------------------------


def begun(events: Events, job: str, *names: str) -> list[dict[str, Any]]:
    key = {
        "phase": "run-1",
        "job": job,
        "group": 99,
        "attempt": 0,
        "reward": None,
        "outcome": "infrastructure",
    }
    return [events.event(name, **key) for name in names]


def test_an_attempt_has_a_sandbox_until_it_is_ready_and_its_grading_another() -> None:
    for names, at_work in (
        (["rollout_start"], 1),
        (["rollout_start", "sample", "tool"], 1),
        (["rollout_start", "rollout_ready"], 0),
        (["rollout_start", "rollout_ready", "grading_start"], 1),
        (["rollout_start", "rollout_ready", "grading_start", "episode"], 0),
        (["rollout_start", "episode"], 0),  # which infrastructure faults took
    ):
        events = Events(**UNDER_WAY)
        summary = told(events)
        summary.update(begun(events, JOB, *names))
        assert summary.sandboxes.total() == at_work, names
        assert dict(summary_table(summary, events.now))["sandboxes"] == f"{at_work} at work"


def test_sandboxes_of_a_client_or_a_process_that_has_ended_are_gone() -> None:
    events = Events(**UNDER_WAY, clients=2)
    summary = told(events)
    summary.update(begun(events, JOB, *["rollout_start"] * 3))
    summary.update(begun(events, "train-job1", "rollout_start"))
    assert summary.sandboxes.total() == 4
    summary.update([events.event("job_done", job=JOB)])
    assert summary.sandboxes.total() == summary.sandboxes.of("train-job1") == 1
    summary.update(begun(events, JOB, "episode"))  # one that was on its way out
    assert summary.sandboxes.total() == 1
    summary.update([events.event("run_start", steps=9, clients=2, resumed=True)])
    assert summary.sandboxes.total() == 0
    summary.update(begun(events, JOB, "rollout_start"))
    assert summary.sandboxes.of(JOB) == 1


def test_verdicts_of_training_that_come_late_are_not_taken_off_an_evaluation() -> None:
    events = Events(**UNDER_WAY)
    summary = told(events)
    key = {"job": JOB, "group": 99, "attempt": 0}
    training, evaluation = {**key, "phase": "run-1"}, {**key, "phase": "evaluation-after"}
    summary.update([events.event("grading_start", **training) for _ in range(4)])
    summary.update([events.event("job_done", job=JOB)])
    summary.update([events.event("evaluation_start", label="after", job=JOB, split="x", attempts=32)])
    summary.update([events.event("rollout_start", **evaluation) for _ in range(6)])
    late = [events.event("episode", **training, reward=0.0, outcome="unresolved") for _ in range(4)]
    summary.update(late)
    assert summary.sandboxes.total() == summary.sandboxes.of(JOB) == 6 and summary.odd_events == 0
    summary.update(events.event("rollout_ready", **evaluation) for _ in range(6))
    summary.update(late)
    assert summary.sandboxes.total() == summary.sandboxes.of(JOB) == 0, "never below"


def test_tokens_of_steps_that_are_dropped_and_of_unfinished_batches_are_not_counted() -> None:
    events = Events(**UNDER_WAY)
    summary = told(events)
    by_step = [step.tokens for step in summary.steps[JOB]]
    assert summary.tokens == sum(by_step) and min(by_step) >= 64 * 20
    key = {"phase": "run-1", "job": JOB, "group": 99, "attempt": 0, "reward": 1.0, "outcome": "resolved"}
    summary.update([events.event("episode", **key, sampled_tokens=100_000)])
    assert summary.tokens == sum(by_step)
    back = {"job": JOB, "step": 1, "checkpoint": "x", "restarted": []}
    summary.update([events.event("run_stopped"), events.event("run_start", steps=9, clients=1, resumed=True)])
    summary.update([events.event("rolled_back", **back), events.event("resumed", **back)])
    assert summary.tokens == sum(by_step[:2])
    summary.update([*events.batch(JOB, 2), events.event("run_stopped")])
    assert summary.tokens == sum(by_step[:2]) + summary.steps[JOB][2].tokens < sum(by_step)
    seconds = sum(step.batch_seconds for step in summary.steps[JOB])
    told_ = f"{summary.tokens:,} in training, {summary.tokens / seconds:,.0f} a second"
    assert dict(summary_table(summary))["tokens sampled"] == told_


def test_tokens_a_second_are_those_of_the_last_minutes_and_at_the_end_of_all_batches() -> None:
    events = Events(**UNDER_WAY)
    summary = told(events, ("phase", {"name": "training"}))
    began = summary.last_event
    assert began is not None and "tokens sampled" not in dict(summary_table(summary, began + 1))
    key = {"phase": "run-1", "job": JOB, "group": 99, "attempt": 0, "reward": 1.0, "outcome": "resolved"}
    for second in (10, 20):
        summary.update([{"time": began + second, "event": "episode", **key, "sampled_tokens": 3000}])
    assert dict(summary_table(summary, began + 20))["tokens sampled"] == "300 a second, of graded attempts"
    assert summary.rate.a_second(began + 315) == pytest.approx(10), "one is older than five minutes"
    before = summary.tokens
    summary.update([{"time": began + 30, "event": "run_done"}])
    seconds = sum(step.batch_seconds for step in summary.steps[JOB])
    row = dict(summary_table(summary))["tokens sampled"]
    assert row == f"{before:,} in training, {before / seconds:,.0f} a second" and before > 6000


def test_logs_that_tell_no_tokens_have_no_rate() -> None:
    old = [{k: v for k, v in event.items() if k != "sampled_tokens"} for event in Events(steps=2)]
    summary = RunSummary()
    summary.update(old)
    assert "tokens sampled" not in dict(summary_table(summary)) and summary.odd_events == 0


def test_how_far_a_batch_is_filled() -> None:
    summary = RunSummary()
    summary.update(
        [
            {"event": "run_start", "time": 1.0, "steps": 3, "clients": 1, "groups_per_batch": 8},
            {"event": "phase", "name": "training"},
            {"event": "episode", "phase": "run-1", "job": JOB, "reward": 1.0, "outcome": "resolved"},
            *[{"event": "group", "job": JOB, "fate": fate} for fate in ("kept", "kept", "uniform")],
        ]
    )
    told = f"{JOB} batch 1 of 3: 2 of 8 groups kept, 1 uniform, 1 attempt graded, 1 resolved"
    assert progress_line(summary) == dict(summary_table(summary))["status"] == told
    summary.update([{"event": "training_start", "job": JOB, "step": 0}])
    assert progress_line(summary) == f"{JOB} batch 1 of 3: training on 2 groups; 1 attempt graded, 1 resolved"


def test_how_far_the_batches_of_several_clients_are_filled() -> None:
    summary, group = RunSummary(), {"event": "group", "fate": "kept"}
    summary.update(
        [
            {"event": "run_start", "time": 1.0, "steps": 3, "clients": 3, "groups_per_batch": 32},
            {"event": "phase", "name": "training"},
            *[{**group, "job": JOB}, {**group, "job": "train-job1"}, {**group, "job": "train-job2"}],
            {"event": "training_start", "job": "train-job1", "step": 0},
            {"event": "job_failed", "job": "train-job2", "reason": "PolicyError: gone"},
        ]
    )
    row = dict(summary_table(summary))["next batches"]
    assert row == "groups kept of 32: job0 1, job1 training"
