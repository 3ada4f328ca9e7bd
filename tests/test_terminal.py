"""A run in a terminal: the table of one and of many clients, what is waited for, and what `show` tells."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from synthetic import Events, Replay, write_concurrent_run, write_run

from swegym_tutorial import cli
from swegym_tutorial.events import RunFolder, dumps
from swegym_tutorial.lines import client_state, fault_lines, progress_line, resume_lines, so_far_line
from swegym_tutorial.summary import RunSummary
from swegym_tutorial.terminal import WAITING_TOLD_EVERY, PlainLines, resume_points, summarise, table, watch
from swegym_tutorial.timeline import timeline


def rendered(summary: RunSummary, rows: int | None = None) -> list[str]:
    console = Console(width=200, color_system=None)
    with console.capture() as got:
        console.print(table(summary, rows))
    return [line.rstrip() for line in got.get().splitlines()]


def fed(events: Events, *more: dict[str, Any]) -> RunSummary:
    summary = RunSummary()
    summary.update(events)
    summary.update(more)
    return summary


def eight() -> tuple[RunSummary, Events]:
    """Eight clients in all the states that one can have while the run goes on."""
    events = Events(3, steps=4, planned=100, clients=8, evaluations=(), end="", slowness=300.0)
    busy = {"fate": "kept", "instance_id": "x", "policy_version": 4, "rewards": [1.0, 0.0], "lost": 0}
    summary = fed(events)
    summary.update(
        [
            events.event("group", job="train-job0", group=99, **busy),
            events.event("group", job="train-job0", group=100, **{**busy, "fate": "stale"}),
            events.event("training_start", job="train-job2", step=4, groups=[1, 2]),
            events.event(
                "job_failed", job="train-job3", reason="PolicyError: save: the disk of the server is full"
            ),
            events.event("job_done", job="train-job4", step=4),
            events.event("out_of_time", job="train-job5", step=4, hours=24),
            events.event("job_done", job="train-job5", step=4),
            events.event("waiting", what="sampling", seconds=130.0, reason="HTTP 503", job="train-job7"),
        ]
    )
    return summary, events


# -- Many clients ----------------------------------------------------------------------------------


def test_case_19_eight_clients_have_a_row_each_and_their_sums() -> None:
    summary, events = eight()
    states = [client_state(summary, f"train-job{n}", events.now + 60) for n in range(8)]
    kept = summary.steps["train-job0"][-1].groups["kept"]
    assert states == [
        f"filling 1/{kept}",
        *[f"filling 0/{summary.steps['train-job1'][-1].groups['kept']}"],
        "training",
        "failed: save: the disk of the server is full",
        "done",
        "out of time",
        f"filling 0/{summary.steps['train-job6'][-1].groups['kept']}",
        "waiting 3 min 10 s",
    ]
    head, *rows = rendered(summary, rows=15)
    assert head.split() == [
        *["job", "step", "mean", "reward", "kept", "uniform", "stale", "failed", "seconds", "state"]
    ]
    assert [row.split()[0] for row in rows[:9]] == [*(f"job{n}" for n in range(8)), "all"]
    assert all(len(row) <= 80 for row in rows[:9])
    job0, total = rows[0].split(), rows[8].split()
    steps = summary.steps["train-job0"]
    assert job0[1] == "4/100" and job0[2] == f"{steps[-1].reward_mean:.3f}"
    assert int(job0[4]) == sum(s.groups["kept"] for s in steps) + 1, "the batch being filled is in it"
    assert job0[6] == "1" and job0[8] == f"{steps[-1].batch_seconds:.0f}"
    assert " failed: save: th" in rows[3] and rows[3].endswith("…")
    assert total[1] == "32/800" and rows[8].endswith("5 of 8 active")
    assert int(total[4]) == sum(int(row.split()[4]) for row in rows[:8])
    assert "train-job3 failed: PolicyError: save: the disk of the server is full" in rows
    assert "in training, 1 failed, 1 done, 1 out of time, " in progress_line(summary)


def test_the_widest_row_fits_in_80_columns() -> None:
    summary = fed(Events(clients=12, steps=1, planned=100, evaluations=(), end=""))
    for steps in summary.steps.values():
        step = steps[0]
        values = {**step.__dict__, "groups": dict.fromkeys(step.groups, 500), "batch_seconds": 99_999.0}
        steps[:] = [type(step)(**{**values, "step": n}) for n in range(100)]
    summary.update([{"event": "job_failed", "job": "train-job11", "time": 1.0, "reason": "x" * 300}])
    assert max(len(row) for row in rendered(summary, rows=15)[:14]) <= 80


def test_clients_that_have_not_begun_have_their_row() -> None:
    summary = fed(Events(steps=0, clients=2, planned=5, evaluations=(), end=""))
    assert [row.split() for row in rendered(summary, rows=15)[1:]] == [
        ["job0", "0/5", "-", "0", "0", "0", "0", "-", "filling", "0"],
        ["job1", "0/5", "-", "0", "0", "0", "0", "-", "filling", "0"],
        ["all", "0/10", "-", "0", "0", "0", "0", "-", "2", "of", "2", "active"],
    ]
    summary.update([{"event": "paused", "time": 2.0}])
    assert client_state(summary, "train-job0") == "paused, 0"
    summary.update([{"event": "run_stopped", "time": 3.0}])
    assert client_state(summary, "train-job0") == "stopped"


def test_of_one_client_each_step_is_a_row() -> None:
    summary = fed(Events(steps=20, planned=20))
    assert [row.split()[1] for row in rendered(summary, rows=15)[1:16]] == [str(n) for n in range(6, 21)]
    last = rendered(summary)
    assert [row.split()[1] for row in last[1:21]] == [str(n) for n in range(1, 21)]
    assert last[21].startswith("train-job0, checkpoint of step 20: tinker://")
    assert max(map(len, last[:21])) <= 80


# -- Waiting ---------------------------------------------------------------------------------------


def test_case_21_reason_and_age_of_a_wait_are_visible_and_grow() -> None:
    # tinker-cookbook#652: a server that pauses for hours makes its client look hung
    events = Events(steps=1, planned=3, evaluations=(), end="")
    summary = fed(events)
    summary.update([events.event("waiting", what="forward_backward", seconds=60.0, reason="HTTP 503\nbusy")])
    told = [progress_line(summary, events.now + later).split(";")[0] for later in (0, 120, 7200)]
    assert told == [
        f"waiting {age} for the server (forward_backward): HTTP 503 busy"
        for age in ("1 min 0 s", "3 min 0 s", "2 h 1 min")
    ]
    assert "train-job0 batch 2 of 3" in progress_line(summary, events.now)
    summary.update([events.event("waiting_over", seconds=70.0)])
    assert progress_line(summary, events.now).startswith("train-job0 batch 2 of 3")


def test_case_21_plain_lines_tell_a_wait_when_it_begins_now_and_then_and_when_it_is_over() -> None:
    # tinker-cookbook#652
    events, plain, summary = Events(steps=0, planned=3, evaluations=(), end=""), PlainLines(), RunSummary()
    summary.update(events)
    assert list(plain.new(summary, events.now)) == []
    began = events.now
    summary.update([events.event("waiting", what="sampling", seconds=20.0, reason="HTTP 503")])
    told = []
    for second in range(0, 601, 10):
        if second == 100:
            summary.update(
                [events.event("waiting", 100.0, what="sampling", seconds=120.0, reason="HTTP 502")]
            )
        told += [(second, line) for line in plain.new(summary, began + second)]
    assert [second for second, _ in told] == [n * WAITING_TOLD_EVERY for n in range(4)]
    assert [line.partition(" for")[0] for _, line in told][:2] == ["waiting 20 s", "waiting 3 min 20 s"]
    assert told[0][1].endswith("HTTP 503") and told[1][1].endswith("HTTP 502")
    summary.update([events.event("waiting_over", seconds=620.0)])
    assert list(plain.new(summary, began + 600)) == ["waited 10 min 20 s for the server, and goes on"]
    assert list(plain.new(summary, began + 700)) == []


def test_plain_lines_tell_each_step_note_pause_and_failed_client_once() -> None:
    events, plain, summary = (
        Events(steps=2, planned=3, clients=2, evaluations=(), end=""),
        PlainLines(),
        RunSummary(),
    )
    summary.update(events)
    lines = list(plain.new(summary))
    assert [line.partition(":")[0] for line in lines] == [
        f"train-job{job} step {step}" for step in (1, 2) for job in (0, 1)
    ]
    summary.update(
        [
            events.event("note", text="a word"),
            events.event("job_failed", job="train-job1", reason="TooManyFaults: 9 of 10"),
            events.event("paused"),
        ]
    )
    assert list(plain.new(summary)) == [
        "a word",
        "train-job1 failed: TooManyFaults: 9 of 10",
        "paused: no group is started",
    ]
    summary.update([events.event("unpaused")])
    assert list(plain.new(summary)) == ["no longer paused: running"] and list(plain.new(summary)) == []


@pytest.mark.parametrize("terminal", [True, False])
def test_a_watched_run_tells_its_clients(tmp_path: Path, terminal: bool) -> None:
    run = Replay(tmp_path / "run", steps=2, clients=2, evaluations=()).start()
    screen = io.StringIO()
    console = Console(width=80, force_terminal=terminal, color_system=None, file=screen)
    assert watch(run, console).status == "done"  # type: ignore[arg-type]
    text = screen.getvalue()
    if terminal:
        assert "job1  2/2" in text and "all   4/4" in text and "\ntrain-job1, checkpoint of step 2: " in text
    else:
        assert text.count("train-job1 step ") == 2 and "0 of 2 clients" not in text


def test_plain_lines_of_a_resumed_run_tell_only_what_is_new(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2, evaluations=(), end="")
    with (folder / "events.jsonl").open("a") as log:
        log.write(dumps({"event": "note", "text": "an old word", "time": 1.0}) + "\n")
        log.write(
            dumps({"event": "job_failed", "job": "train-job0", "reason": "Full: disk", "time": 1.0}) + "\n"
        )
    earlier, plain, summary = summarise(folder), PlainLines(), summarise(folder)
    plain.pass_over(earlier)
    assert list(plain.new(summary)) == [] and len(list(PlainLines().new(summary))) == 4
    events = Events(steps=1, evaluations=(), end="", slowness=2.0)
    summary.update(events)  # step 1 is done again
    (line,) = plain.new(summary)
    assert line.startswith("train-job0 step 1:")
    summary.update(
        [
            events.event("note", text="a new word"),
            events.event("job_failed", job="train-job0", reason="Full: disk"),
        ]
    )
    assert list(plain.new(summary)) == ["a new word", "train-job0 failed: Full: disk"]


def test_a_watched_run_that_goes_on_does_not_tell_its_earlier_parts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2, planned=2, evaluations=())
    earlier, screen = summarise(folder), io.StringIO()
    run = Replay(folder, steps=1, planned=2, evaluations=()).start()
    watch(run, Console(width=80, file=screen), earlier)  # type: ignore[arg-type]
    told = [line.partition(":")[0] for line in screen.getvalue().splitlines() if " step " in line]
    assert told == ["train-job0 step 1"]


def test_who_resumes_a_run_is_told_how_far_it_is_and_when_nothing_is_left() -> None:
    points = {"train-job0": [6, 5, 4], "train-job1": [4, 3, 2]}
    assert so_far_line(points, 6, 1) == "all 6 steps are done; --steps N extends the run"
    assert so_far_line(points, 9, 1) == "so far 6 of 9 steps are done"
    assert so_far_line(points, 6, 2) == "so far 4 to 6 of 6 steps are done"
    assert so_far_line(points, 6, 3) == "so far 0 to 6 of 6 steps are done"
    assert so_far_line(points, 6, 2, back=3) == "so far 3 of 6 steps are done"
    assert so_far_line({}, 6, 1) == so_far_line(points, 6, 1, back=0) == ""


# -- What was lost ---------------------------------------------------------------------------------


def test_case_37_attempts_lost_to_faults_are_counted_where_people_look() -> None:
    # rllm#710, open-instruct#1887: no reward of 0, and not hidden either
    events = Events(steps=1, evaluations=(), end="")
    summary = fed(events)
    graded = summary.graded
    key = {"phase": "run-1", "job": "train-job0", "group": 50}
    lost = {"reward": None, "outcome": "infrastructure", "reason": "SandboxError: died"}
    summary.update([events.event("episode", **key, attempt=n, **lost) for n in range(16)])
    assert graded == 64 and summary.lost == 16 and summary.filling["train-job0"].attempts == 0
    told = "16 attempts lost to infrastructure faults (20.0 % of all)"
    assert fault_lines(summary) == [told] and told in rendered(summary)


# -- show ------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, job: int, step: int, **more: Any) -> None:
    text = dumps({"step": step, "policy_version": step + 1, "checkpoint": f"tinker://{step}", **more})
    (folder / f"train-job{job}-checkpoint.json").write_text(text)


def test_show_lists_what_can_be_resumed_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", steps=3, planned=9, clients=2, evaluations=(), end="")
    write_checkpoint(folder, 0, 2, earlier=[{"step": 1}, {"step": 0}, {"step": -1}])
    write_checkpoint(folder, 1, 2)  # of an older version, without `earlier`
    (folder / "train-job2-checkpoint.json").write_text('{"step": ')
    write_checkpoint(folder, 10, 11, earlier=[{"step": 10}])
    assert resume_points(folder) == {"train-job0": [3, 2, 1, 0], "train-job1": [3], "train-job10": [12, 11]}
    assert cli.main(["show", str(folder), "--png", str(tmp_path / "figure.png")]) == 0
    printed = capsys.readouterr().out
    assert (
        "train-job0: steps 3, 2, 1, 0 can be resumed from (--resume --from-step N, 0 is the start)\n"
        in printed
    )
    assert "train-job1: steps 3 can be resumed from (--resume --from-step N)\n" in printed
    assert "train-job0 step 3:" not in printed and "train-job0: mean reward" in printed
    assert "its process is gone; go on with: swegym-tutorial train --resume" in printed
    assert "gone" in next(line for line in printed.splitlines() if line.startswith("job0"))


@pytest.mark.parametrize(
    "end, phase, told",
    [
        ({"event": "run_done"}, "drawing the figure", "done"),
        ({"event": "run_stopped"}, "training", "stopped while training"),
        ({"event": "run_failed", "reason": "RunError: no disk"}, "training", "failed: RunError: no disk"),
    ],
)
def test_show_tells_how_a_run_ended_and_of_no_work_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: dict[str, Any], phase: str, told: str
) -> None:
    folder = write_run(tmp_path / "run", steps=1, evaluations=(), end="")
    with (folder / "events.jsonl").open("a") as log:
        for event in ({"event": "phase", "name": phase}, end):
            log.write(dumps({"time": 2e9, **event}) + "\n")
    assert cli.main(["show", str(folder), "--png", str(tmp_path / "figure.png")]) == 0
    assert told in capsys.readouterr().out.splitlines()


def test_the_numbers_that_show_prints_are_those_of_the_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3, planned=9, evaluations=(), end="")
    newest = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])
    write_checkpoint(folder, 0, newest["step"])
    summary = RunSummary()
    summary.update([newest])
    (line,) = PlainLines().new(summary)
    (point,) = resume_points(folder)["train-job0"]
    assert line.startswith(f"train-job0 step {point}:")
    assert resume_lines({}) == [] and resume_points(tmp_path / "nowhere") == {}


def test_a_run_that_was_killed_while_it_waited_is_not_said_to_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = Events(steps=1, planned=3, evaluations=(), end="")
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    lines = [*events, events.event("waiting", what="sampling", seconds=40.0, reason="HTTP 503")]
    folder.events.write_text("".join(dumps(line) + "\n" for line in lines))
    assert cli.main(["show", str(folder.path), "--png", str(tmp_path / "figure.png")]) == 0
    assert "had waited 40 s for the server (sampling): HTTP 503" in capsys.readouterr().out


def test_below_the_table_stand_each_held_out_split_and_the_habits() -> None:
    splits = ("held-out", "held-out-families")
    lines = rendered(fed(Events(steps=2, splits=splits, habits=True)))
    told = [line for line in lines if line.startswith(("held-out", "habits: "))]
    assert [line.partition(":")[0] for line in told] == [*splits, "habits"]
    form = r": before 0\.\d{3} \(\d+ of 256 resolved\), after 0\.\d{3} \(\d+ of 256\) \[train-job0\]"
    for split, line in zip(splits, told, strict=False):
        assert re.fullmatch(re.escape(split) + form, line), line
    assert "runs the tests 0." in told[2]
    lines = rendered(fed(Events(steps=1, splits=splits, evaluations=("before",), habits=True)))
    assert [line for line in lines if "after" in line] == []
    assert next(line for line in lines if line.startswith("habits")).count(" to ") == 0


def test_show_draws_the_habits_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    folder, file = write_run(tmp_path / "run", steps=2, habits=True), tmp_path / "habits.png"
    assert cli.main(["show", str(folder), "--habits", str(file)]) == 0
    words, last = capsys.readouterr().out.splitlines()[-2:]
    assert words.startswith("looks before it edits ") and last == f"habits: {file}"
    assert Image.open(file).info["Description"] == words


def test_show_draws_and_prints_nothing_where_it_cannot_draw_what_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = write_run(tmp_path / "older", steps=2)
    drawn = [tmp_path / name for name in ("habits.png", "lanes.png")]
    assert cli.main(["show", str(older), "--habits", str(drawn[0]), "--timeline", str(drawn[1])]) == 1
    told = capsys.readouterr()
    assert "tells of habits" in told.err and told.out == ""
    drawn.append(older / "reward_time.png")
    assert not [path for path in drawn if path.exists()]


def test_show_draws_the_timeline_where_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = write_concurrent_run(tmp_path / "run", steps=2), tmp_path / "timeline.png"
    figures = ["--png", str(tmp_path / "figure.png")]
    assert cli.main(["show", str(folder), *figures]) == 0 and "Timeline of" not in capsys.readouterr().out
    assert cli.main(["show", str(folder), *figures, "--timeline", str(file)]) == 0
    made = timeline(folder)
    assert file.read_bytes() == made.png
    assert capsys.readouterr().out.splitlines()[-2:] == [made.words, f"timeline: {file}"]
    nowhere = tmp_path / "missing" / "timeline.png"
    assert cli.main(["show", str(folder), *figures, "--timeline", str(nowhere)]) == 1
    assert capsys.readouterr().err == f"swegym-tutorial: {nowhere}: No such file or directory\n"
    with pytest.raises(SystemExit):
        cli.main(["show", "--help"])
    assert "--timeline FILE" in capsys.readouterr().out
