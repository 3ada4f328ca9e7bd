"""What went on at the same time: right numbers from the log alone, and a figure that shows them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import BEGAN, write_concurrent_run, write_run

from swegym_tutorial.events import RunFolder
from swegym_tutorial.plots import DPI, picture
from swegym_tutorial.timeline import BUSY, Kind, Span, Timeline, read_spans, timeline, total, union
from swegym_tutorial.timeline import clock as timeline_clock
from swegym_tutorial.timeline import log as timeline_log
from swegym_tutorial.timeline.figure import timeline_figure, timeline_words
from swegym_tutorial.timeline.rows import BINS, as_bars, in_flight, lanes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

JOB = "train-job0"
KEY = {"phase": "run-1", "job": JOB, "group": 3, "attempt": 1, "policy_version": 4}
STEP = {"job": JOB, "step": 4, "policy_version": 5, "batch_seconds": 50.0, "publish_seconds": 2.0}
TIMES = {"train_seconds": 8.0, "trainer_seconds": 8.0}


def write_log(folder: Path, *lines: tuple[float, str, dict[str, Any]], clients: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    start = (0.0, "run_start", {"steps": 9, "clients": clients})
    text = [
        json.dumps({"time": 1000.0 + at, "event": name, **fields}) + "\n"
        for at, name, fields in (start, *lines)
    ]
    (folder / "events.jsonl").write_text("".join(text))
    return folder


def shown(read: Timeline, *kinds: str) -> list[tuple[str, float, float]]:
    return [(str(s.kind), round(s.start, 3), round(s.end, 3)) for s in read.of(*(kinds or Kind))]


# -- From lines to spans ---------------------------------------------------------------------------

ATTEMPT = [
    (10.0, "rollout_start", KEY),
    (14.0, "sample", {**KEY, "seconds": 1.0}),  # a turn's lines are written when its commands are over
    (14.0, "tool", {**KEY, "seconds": 0.5}),
    (14.0, "tool", {**KEY, "seconds": 2.0}),
    (17.0, "sample", {**KEY, "seconds": 3.0}),
    (17.0, "rollout_ready", KEY),
    (20.0, "grading_start", KEY),
    (22.0, "episode", {**KEY, "reward": 1.0}),
]


def test_an_attempt_is_its_turns_its_commands_and_its_grading(tmp_path: Path) -> None:
    read = read_spans(write_log(tmp_path / "run", *ATTEMPT, (23.0, "group", {**KEY, "fate": "kept"})))
    assert read.began == 1010.0 and read.seconds == 13.0 and read.jobs == (JOB,)
    assert sorted(shown(read)) == [
        ("grading", 10.0, 12.0), ("rollout", 0.0, 7.0), ("sampling", 0.5, 1.5), ("sampling", 4.0, 7.0),
        ("tools", 1.5, 2.0), ("tools", 2.0, 4.0),
    ]  # fmt: skip
    for span in read.spans:
        assert (span.name, span.group, span.version, span.fate) == ("g000003-a1", 3, 4, "kept") and span.ended


def test_an_attempt_that_faults_took_ends_where_it_was_given_up(tmp_path: Path) -> None:
    lost = [
        ATTEMPT[0],
        (19.0, "episode", {**KEY, "reward": None}),
        (20.0, "group_failed", {**KEY, "fate": "failed"}),
    ]
    (span,) = read_spans(write_log(tmp_path / "run", *lost)).spans
    assert (span.kind, span.start, span.end, span.fate, span.ended) == ("rollout", 0.0, 9.0, "failed", True)


def test_training_is_told_by_its_minibatches_and_the_trainer_is_idle_between_them(tmp_path: Path) -> None:
    minibatch = {"job": JOB, "step": 4, "seconds": 3.0}
    read = read_spans(
        write_log(
            tmp_path / "run",
            (10.0, "rollout_start", KEY),
            (20.0, "minibatch", minibatch),
            (40.0, "minibatch", minibatch),
            (41.0, "training_start", {"job": JOB, "step": 4}),
            (42.0, "minibatch", {**minibatch, "seconds": 4.0}),  # it waited for the one before
            (45.0, "step_done", {**STEP, **TIMES}),
        )
    )
    assert shown(read, *BUSY) == [
        *[
            ("training", 7.0, 10.0),
            ("training", 27.0, 30.0),
            ("training", 30.0, 32.0),
            ("publishing", 33.0, 35.0),
        ]
    ]
    assert {(s.name, s.step, s.version) for s in read.of(*BUSY)} == {("step 5", 5, 5)}
    assert read.idle() == [(0.0, 7.0), (10.0, 27.0), (32.0, 33.0)]
    assert read.idle_share == pytest.approx(25 / 35)
    (step,) = read.steps
    assert (step.job, step.number, step.version, step.end) == (JOB, 5, 5, 35.0)


def test_logs_without_minibatches_tell_when_training_began_and_ended(tmp_path: Path) -> None:
    began = (10.0, "rollout_start", KEY)
    read = read_spans(write_log(tmp_path / "run", began, (45.0, "step_done", {**STEP, **TIMES})))
    assert shown(read, *BUSY) == [("training", 25.0, 33.0), ("publishing", 33.0, 35.0)]
    old = {**STEP, "train_seconds": 6.0}
    read = read_spans(write_log(tmp_path / "run", began, (45.0, "step_done", old)))
    assert shown(read, *BUSY) == [("training", 27.0, 33.0), ("publishing", 33.0, 35.0)]


def test_references_are_those_of_a_group(tmp_path: Path) -> None:
    asked = {"job": JOB, "group": 3, "policy_version": 4, "seconds": 2.5}
    read = read_spans(
        write_log(
            tmp_path / "run", *ATTEMPT, (24.0, "group", {**KEY, "fate": "kept"}), (26.0, "reference", asked)
        )
    )
    (span,) = read.of(Kind.REFERENCE)
    assert (span.start, span.end, span.name, span.fate) == (13.5, 16.0, "g000003", "kept")


def test_evaluations_are_no_part_of_it(tmp_path: Path) -> None:
    evaluated = [(at - 9.0, name, {**fields, "phase": "evaluation-before"}) for at, name, fields in ATTEMPT]
    read = read_spans(write_log(tmp_path / "run", *evaluated))
    assert read.spans == () and read.seconds == 0.0 and read.idle_share == 0.0
    assert "no batch is trained on yet" in timeline_words(read)


def test_cut_and_odd_lines_hide_no_others(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "run", *ATTEMPT)
    whole = read_spans(folder)
    log = folder / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    odd = [
        "[]\n", "{\n", "null\n", '{"event": "rollout_start"}\n', '{"time": "x", "event": "episode", "job": "train-job0"}\n',
        '{"time": 1014, "event": "step_done", "job": "train-job0"}\n',
        '{"time": 1014, "event": "group", "job": "train-job0"}\n', "\xff\n",
        '{"time": 1014, "event": "step_done", "job": ["x"], "step": 0, "policy_version": 1, "batch_seconds": 1}\n',
        '{"time": 1014, "event": "episode", "phase": "run-1", "job": ["x"], "group": 0, "attempt": 0}\n',
        '{"time": 1014, "event": "rolled_back", "job": 5, "step": 0}\n',
        '{"time": 1014, "event": "rollout_start", "job": "train-job0", "group": "x", "attempt": 0, "policy_version": 0}\n',
        '{"time": 1014, "event": "rollout_start", "job": "train-job0", "group": 8, "attempt": 0, "policy_version": "x"}\n',
        '{"time": NaN, "event": "rollout_start", "job": "train-job0", "group": 9, "attempt": 0, "policy_version": 0}\n',
    ]  # fmt: skip
    log.write_text("".join([*lines[:3], *odd, *lines[3:], lines[1][:40]]))
    assert read_spans(folder) == whole


# -- Live, killed and resumed ----------------------------------------------------------------------


def test_what_goes_on_in_a_live_run_reaches_to_now(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open()
    folder.log("run_start", steps=3, clients=1)
    folder.log("rollout_start", **KEY)
    folder.log("training_start", job=JOB, step=0)
    now = json.loads(folder.events.read_text().splitlines()[-1])["time"] + 100
    read = read_spans(folder.path, now=now)
    assert read.live and read.seconds == pytest.approx(100, abs=5)
    assert "train-job0: the trainer is idle" in timeline_words(read)
    assert {(s.kind, s.end, s.ended) for s in read.spans} == {
        ("rollout", read.seconds, False), ("training", read.seconds, False),
    }  # fmt: skip
    time.sleep(0.01)  # a log's times are in milliseconds
    folder.log("step_done", **{**STEP, **TIMES, "step": 0, "policy_version": 1})
    assert "train-job0, step 1 so far: the trainer is idle" in timeline_words(
        read_spans(folder.path, now=now)
    )
    folder.close()  # as when its process is killed
    read = read_spans(folder.path, now=now)
    assert not read.live and read.seconds < 5


def test_the_time_between_the_parts_of_a_resumed_run_is_cut_out(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_concurrent_run(folder, steps=2, end="")
    first = read_spans(folder)
    log = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join(log[: 2 * len(log) // 3]))  # killed
    killed = read_spans(folder)
    assert killed.seconds < first.seconds and any(not span.ended for span in killed.of(Kind.ROLLOUT))
    write_concurrent_run(folder, seed=2, steps=2, began=BEGAN + 7200)
    read = read_spans(folder)
    ((at, seconds),) = read.cuts
    assert at == pytest.approx(killed.seconds) and 6000 < seconds < 7200
    assert read.seconds < killed.seconds + 600
    for span in read.spans:
        assert 0 <= span.start <= span.end <= read.seconds
        assert span.end <= at + 1e-6 or span.start >= at - 1e-6, "none goes on from one part to the next"
    assert [s for s in read.spans if s.end <= at and not s.ended] != []
    assert read.of(Kind.ROLLOUT)[0].fate in ("kept", "uniform")


def shifted(folder: Path, seconds: float, start: float = 0.5, stop: float = 1.0) -> Path:
    """Have the machine's clock set on by so many seconds from a part of a log to another."""
    log = folder / "events.jsonl"
    lines = log.read_text().splitlines()
    for n in range(int(start * len(lines)), int(stop * len(lines))):
        event = json.loads(lines[n])
        lines[n] = json.dumps({**event, "time": round(event["time"] + seconds, 3)})
    log.write_text("".join(line + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("seconds", [-3600.0, -20.0])
def test_a_clock_that_is_set_back_leaves_no_gap(
    tmp_path: Path, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_concurrent_run(tmp_path / "run", steps=4)
    true = read_spans(folder)
    shifted(folder, seconds)
    for read_at_once in (1 << 20, 1 << 10):
        monkeypatch.setattr(timeline_clock, "READ", read_at_once)
        read = read_spans(folder)
        # The seconds between the lines where it was set back are not known, and are few.
        assert read.seconds == pytest.approx(true.seconds, abs=2) and numbers(read) == [1, 2, 3, 4]
        assert len(read.spans) == pytest.approx(len(true.spans), abs=5) and read.cuts == ()
        assert read.idle_share == pytest.approx(true.idle_share, abs=0.02)
        assert [s.end for s in read.steps] == pytest.approx([s.end for s in true.steps], abs=2)
    monkeypatch.setattr(timeline_clock, "NEAR", 1 << 10)
    assert numbers(read_spans(folder, first=3)) == [3, 4] and numbers(read_spans(folder, last=2)) == [1, 2]


def test_a_part_that_begins_before_the_one_before_it_follows_it(tmp_path: Path) -> None:
    folder = write_concurrent_run(tmp_path / "run", steps=2, end="run_stopped")
    first = read_spans(folder)
    write_concurrent_run(folder, seed=2, steps=2, began=BEGAN - 3600)
    read = read_spans(folder)
    ((at, seconds),) = read.cuts
    assert at == pytest.approx(first.seconds) and 0 <= seconds < 5 and read.seconds < 3 * first.seconds
    drawn(read)


def test_a_live_run_reaches_to_its_last_line_where_the_reader_s_clock_is_behind(tmp_path: Path) -> None:
    folder = RunFolder(write_concurrent_run(tmp_path / "run", steps=2, end=""))
    folder.open()
    before = read_spans(folder.path, now=BEGAN - 30)
    assert before.live and numbers(before) == [1, 2] and before.seconds > 20
    shifted(folder.path, -3600)
    last = json.loads(folder.events.read_text().splitlines()[-1])["time"]
    after = read_spans(folder.path, now=last + 5)
    assert after.seconds == pytest.approx(before.seconds + 5, abs=2)
    folder.close()


# -- A run that went back --------------------------------------------------------------------------


def goes_back(folder: Path, made: int, step: int, again: int, jobs: int = 1, seconds: float = 100.0) -> Path:
    """Write a run of `made` steps of 10 s that goes back to a step after some time and makes `again` from there."""
    names = [f"train-job{n}" for n in range(jobs)]
    done = {"policy_version": 0, "batch_seconds": 10.0, "publish_seconds": 1.0, **TIMES}
    lines: list[tuple[float, str, dict[str, Any]]] = []

    def make(n: int, end: float) -> None:
        for job in names:
            key = {**KEY, "job": job, "group": len(lines), "policy_version": n - 1}
            lines.append((end - 9.5, "rollout_start", key))
            lines.append((end - 8.5, "rollout_ready", key))
            lines.append((end, "step_done", {**done, "job": job, "step": n - 1, "policy_version": n}))

    for n in range(1, made + 1):
        make(n, 10.0 * n)
    at = 10.0 * made + seconds
    lines.append((at, "run_start", {"steps": made, "clients": jobs, "resumed": True}))
    for job in names:
        lines.append((at + 1, "rolled_back", {"job": job, "step": step - 1}))
        lines.append((at + 1, "resumed", {"job": job, "step": step - 1}))
    for n in range(step + 1, step + again + 1):
        make(n, at + 1 + 10.0 * (n - step))
    return write_log(folder, *sorted(lines, key=lambda line: line[0]), clients=jobs)


@pytest.mark.parametrize("jobs", [1, 2])
def test_steps_that_a_run_went_back_from_are_no_part_of_its_timeline(tmp_path: Path, jobs: int) -> None:
    folder = goes_back(tmp_path / "run", made=12, step=3, again=2, jobs=jobs)
    read = read_spans(folder)
    assert sorted(numbers(read)) == sorted([1, 2, 3, 4, 5] * jobs) and read.steps_done == 5
    assert read.seconds == pytest.approx(49.5) and [s.end for s in read.steps[::jobs]] == pytest.approx(
        [9.5, 19.5, 29.5, 39.5, 49.5]
    )
    assert len(read.of(Kind.ROLLOUT)) == len(read.of(Kind.TRAINING)) == 5 * jobs
    assert read.backs == ((pytest.approx(29.5), 3),) and len(read.cuts) == 1
    assert "steps 1 to 5:" in timeline_words(read) and "The run goes back to step 3;" in timeline_words(read)
    assert any("goes back to step 3" in text.get_text() for text in runs_text(drawn(read)))
    part = read_spans(folder, first=4, last=5)
    assert sorted(set(numbers(part))) == [4, 5] and part.seconds == pytest.approx(20) and part.cuts == ()
    assert part.steps[0].end == pytest.approx(10) and part.backs == ()
    with pytest.raises(ValueError, match="this run has done 5"):
        read_spans(folder, first=9)


def test_a_run_that_went_back_to_the_start_begins_there(tmp_path: Path) -> None:
    read = read_spans(goes_back(tmp_path / "run", made=5, step=0, again=3))
    assert numbers(read) == [1, 2, 3] and read.seconds == pytest.approx(30) and read.cuts == read.backs == ()


def test_a_run_that_went_back_and_has_done_nothing_yet_shows_what_it_kept(tmp_path: Path) -> None:
    read = read_spans(goes_back(tmp_path / "run", made=5, step=2, again=0))
    assert numbers(read) == [1, 2] and read.seconds == pytest.approx(19.5)


# -- The window ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_concurrent_run(tmp_path_factory.mktemp("long"), steps=14, attempt=4.0)


def numbers(read: Timeline) -> list[int]:
    return [step.number for step in read.steps]


def test_of_a_long_run_the_last_ten_steps_are_read_and_of_a_short_one_all(
    long_run: Path, tmp_path: Path
) -> None:
    assert numbers(read_spans(long_run)) == list(range(5, 15))
    assert numbers(read_spans(write_concurrent_run(tmp_path / "short", steps=3))) == [1, 2, 3]


def test_steps_are_chosen_as_people_count_them(long_run: Path) -> None:
    whole = read_spans(long_run, first=1)
    assert numbers(whole) == list(range(1, 15))
    part = read_spans(long_run, first=4, last=6)
    assert numbers(part) == [4, 5, 6] and numbers(read_spans(long_run, last=2)) == [1, 2]
    start, end = whole.steps[2].end, whole.steps[5].end
    assert part.seconds == pytest.approx(end - start, abs=0.01) == part.steps[-1].end
    assert part.began == pytest.approx(whole.began + start, abs=0.01)

    def inside(span: Span) -> float:
        return max(0.0, min(span.end, end) - max(span.start, start))

    for kind in Kind:
        expected = sum(inside(span) for span in whole.of(kind))
        assert sum(span.seconds for span in part.of(kind)) == pytest.approx(expected, abs=0.05), kind
    assert part.idle_share == pytest.approx(
        1 - total((max(a, start), min(b, end)) for a, b in union((s.start, s.end) for s in whole.of(*BUSY)) if a < end and b > start) / (end - start), abs=0.001
    )  # fmt: skip
    assert {s.fate for s in part.of(Kind.ROLLOUT)} == {"kept", "uniform"}, "also of those that ended later"


def test_only_the_window_of_a_long_log_is_read(long_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, taken = {}, {}
    count = timeline_log._Reading.take
    for near in (1 << 40, 1 << 12):
        seen: list[float] = []
        monkeypatch.setattr(timeline_clock, "NEAR", near)
        monkeypatch.setattr(
            timeline_log._Reading, "take", lambda self, event, seen=seen: (seen.append(0), count(self, event))
        )
        read[near], taken[near] = read_spans(long_run, first=13), len(seen)
    assert read[1 << 40] == read[1 << 12] and taken[1 << 12] < taken[1 << 40] / 2


def test_what_is_not_there_is_told(long_run: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no run folder"):
        read_spans(tmp_path)
    with pytest.raises(ValueError, match="no job 'job0'; it has train-job0"):
        read_spans(long_run, "job0")
    for first in (0, 16):
        with pytest.raises(ValueError, match=f"first={first}: .* this run has done 14"):
            read_spans(long_run, first=first)
    with pytest.raises(ValueError, match="last=3: it must not be before the first step, 5"):
        read_spans(long_run, first=5, last=3)
    assert read_spans(long_run, first=15).steps == ()  # the batch that is filled, where the run goes on


def test_one_job_of_several(tmp_path: Path) -> None:
    folder = write_concurrent_run(tmp_path / "run", jobs=3, steps=2)
    every, one = read_spans(folder), read_spans(folder, "train-job1")
    assert every.jobs == ("train-job0", "train-job1", "train-job2") and one.jobs == ("train-job1",)
    assert {span.job for span in one.spans} == {"train-job1"} and {s.job for s in every.spans} == set(
        every.jobs
    )
    assert one.idle_share > every.idle_share, "the one trainer works for all of them"
    assert "its trainer is idle" in timeline_words(one) and "3 clients, steps 1 to 2: the" in timeline_words(
        every
    )


# -- Numbers ---------------------------------------------------------------------------------------

INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda t: (t[0], t[0] + t[1])), max_size=12
)


def made_of(seconds: float, **kinds: list[tuple[float, float]]) -> Timeline:
    spans = [
        Span(Kind(kind), float(a), float(b), JOB, f"{kind} {n}", n, None, 0)
        for kind, intervals in kinds.items()
        for n, (a, b) in enumerate(sorted(intervals))
    ]
    return Timeline((JOB,), 0.0, seconds, tuple(sorted(spans, key=lambda s: s.start)), (), (), False, 0, 1)


@given(INTERVALS, INTERVALS)
def test_sums_are_those_of_counting_second_by_second(
    ones: list[tuple[float, float]], others: list[tuple[float, float]]
) -> None:
    read = made_of(60.0, rollout=ones, training=others)
    at_one = [sum(a <= t < b for a, b in ones) for t in range(60)]
    at_other = [sum(a <= t < b for a, b in others) for t in range(60)]
    mean, most = read.at_once("rollout")
    assert mean == pytest.approx(sum(at_one) / 60) and most == max(at_one)
    assert read.busy("rollout") == sum(n > 0 for n in at_one)
    assert read.overlap("rollout", "training") == sum(
        n > 0 and m > 0 for n, m in zip(at_one, at_other, strict=True)
    )
    assert read.idle_share == pytest.approx(sum(n == 0 for n in at_other) / 60)
    assert total(read.idle()) + read.busy("training") == pytest.approx(60)
    np.testing.assert_allclose(in_flight(read.of("rollout"), np.arange(61.0)), at_one, atol=1e-9)


@given(INTERVALS)
def test_spans_in_one_lane_do_not_overlap_and_no_lane_is_needless(
    intervals: list[tuple[float, float]],
) -> None:
    read = made_of(60.0, rollout=intervals)
    spans = read.of("rollout")
    places = lanes(spans)
    for lane in set(places):
        mine = [span for span, place in zip(spans, places, strict=True) if place == lane]
        assert all(one.end <= other.start for one, other in itertools.pairwise(mine))
    longest = max((s.seconds for s in spans), default=0)
    if longest and all(s.seconds for s in spans):
        assert len(set(places)) == read.at_once("rollout")[1]


# -- The figure ------------------------------------------------------------------------------------


def drawn(read: Timeline) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = timeline_figure(read)
    FigureCanvasAgg(figure).draw()
    return figure


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Timeline]:
    folder = tmp_path_factory.mktemp("runs")
    full = {"workers": 64, "graders": 64, "attempt": 540.0, "grading": 90.0, "training": 400.0}
    write_concurrent_run(folder / "resumed", steps=2, end="")
    made = {
        "short": write_concurrent_run(folder / "short", steps=3),
        "long": write_concurrent_run(folder / "long", steps=12, attempt=3.0),
        "two": write_concurrent_run(folder / "two", jobs=2, steps=3),
        "eight": write_concurrent_run(folder / "eight", jobs=8, steps=2, groups=16, **full),
        "resumed": write_concurrent_run(folder / "resumed", steps=2, began=BEGAN + 9000),
        "nothing": write_run(folder / "nothing", steps=0, evaluations=()),
    }
    return {name: read_spans(path) for name, path in made.items()} | {
        "one of eight": read_spans(made["eight"], "train-job7")
    }


NAMES = ["short", "long", "two", "eight", "resumed", "nothing", "one of eight"]


@pytest.mark.parametrize("name", NAMES)
def test_every_text_is_large_enough_inside_the_picture_and_on_no_other(
    runs: dict[str, Timeline], name: str
) -> None:
    figure = drawn(runs[name])
    width, height = figure.get_size_inches() * DPI
    texts = [text for axes in figure.axes for text in (*axes.texts, axes.xaxis.label) if text.get_text()]
    texts += [label for label in figure.axes[-1].get_xticklabels() if label.get_text()]
    for text in texts:
        assert text.get_fontsize() >= 9, text
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text
    for one, other in itertools.combinations(texts, 2):
        a, b = one.get_window_extent(), other.get_window_extent()
        assert not (min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 3), (
            one,
            other,
        )


def test_more_lanes_than_can_be_told_apart_become_an_area(runs: dict[str, Timeline]) -> None:
    assert as_bars(runs["short"], Kind.ROLLOUT) and as_bars(runs["two"], Kind.ROLLOUT)
    assert not as_bars(runs["eight"], Kind.ROLLOUT) and not as_bars(runs["one of eight"], Kind.ROLLOUT)
    read = runs["eight"]
    top = drawn(read).axes[0].patches[-1].get_data().values
    assert len(top) == BINS and top.mean() == pytest.approx(read.at_once(Kind.ROLLOUT)[0], rel=1e-6)
    assert top.max() == pytest.approx(512) == read.at_once(Kind.ROLLOUT)[1]


def test_bars_stand_where_the_spans_are_and_grey_is_what_was_dropped(runs: dict[str, Timeline]) -> None:
    read = runs["short"]
    (bars,) = drawn(read).axes[0].collections
    spans = read.of(Kind.ROLLOUT)
    boxes = [path.get_extents() for path in bars.get_paths()]
    assert len(boxes) == len(spans) + len(read.of(Kind.SAMPLING))
    np.testing.assert_allclose([(b.x0, b.x1) for b in boxes[: len(spans)]], [(s.start, s.end) for s in spans])
    colors = [tuple(color) for color in bars.get_facecolors()]
    by_color: dict[Any, set[Any]] = {}
    for color, span in zip(colors, spans, strict=False):
        by_color.setdefault(color, set()).add(span.version if span.fate == "kept" else "dropped")
    assert sorted(by_color.values(), key=str) == [{"dropped"}, {0}, {1}, {2}]


def test_the_figure_says_the_idle_share_and_the_steps(runs: dict[str, Timeline]) -> None:
    said = [text.get_text() for text in runs_text(drawn(runs["long"]))]
    share = f"{runs['long'].idle_share:.0%}"
    assert f"train-job0, steps 3 to 12 of 12: the trainer is idle {share} of the time" in said
    assert {f"idle {share}", "Policy", "2", "11"} <= set(said)
    assert any(
        "2 h" in text.get_text() and "without a run" in text.get_text()
        for text in runs_text(drawn(runs["resumed"]))
    )


def runs_text(figure: Figure) -> list[Any]:
    return [text for axes in figure.axes for text in axes.texts]


def test_of_uneven_clients_each_range_is_named_or_the_fastest_s(tmp_path: Path) -> None:
    done = {"policy_version": 0, "batch_seconds": 10.0, "publish_seconds": 1.0, **TIMES}
    lines = [
        (
            12.0 * (step + 1) + number,
            "step_done",
            {**done, "job": f"train-job{number}", "step": step // every},
        )
        for step in range(100)
        for number, every in ((0, 1), (1, 5), (2, 10))
        if step % every == every - 1
    ]
    two = [line for line in lines if line[2]["job"] != "train-job2"]
    read = read_spans(write_log(tmp_path / "two", *two, clients=2))
    assert timeline_words(read).split(". ")[1].startswith("job0 steps 91-100, job1 steps 18-20: the trainer")
    read = read_spans(write_log(tmp_path / "three", *lines, clients=3))
    assert "3 clients, the fastest steps 91-100: the trainer" in timeline_words(read)
    inside(read)
    one = read_spans(write_log(tmp_path / "one", *two[:2], clients=2))
    assert "job0 step 2, job1 no step: the trainer" in timeline_words(one)


@pytest.mark.parametrize("text", ["", "\n", '{"time": 1.0, "event": "note", "text": "x"}\n'])
def test_a_log_in_which_nothing_began_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / "events.jsonl").write_text(text)
    made = timeline(tmp_path)
    assert "No client has begun yet" in made.words
    inside(read_spans(tmp_path))


def inside(read: Timeline) -> None:
    figure = drawn(read)
    width, height = figure.get_size_inches() * DPI
    for text in runs_text(figure):
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text


def test_words_tell_the_same_numbers(runs: dict[str, Timeline]) -> None:
    read = runs["short"]
    mean, most = read.at_once(Kind.ROLLOUT)
    words = timeline_words(read)
    assert f"the trainer is idle {read.idle_share:.0%} of the time" in words
    assert f"Attempts: {mean:.1f} at once on average, {most} at most" in words


def test_the_reader_s_own_style_does_not_reach_in(runs: dict[str, Timeline]) -> None:
    import matplotlib.style

    plain = picture(timeline_figure(runs["two"]), "words").png
    style = [
        "dark_background",
        {"font.size": 20, "lines.linewidth": 9, "axes.grid": True, "hatch.linewidth": 5},
        {"xtick.top": True, "xtick.labeltop": True, "ytick.labelright": True, "xtick.minor.visible": True},
        {"xtick.major.pad": 20, "axes.labelweight": "bold", "figure.constrained_layout.use": True},
    ]
    with matplotlib.style.context(style):
        assert picture(timeline_figure(runs["two"]), "words").png == plain


def test_a_picture_is_made_of_a_folder_and_leaves_pyplot_alone(tmp_path: Path) -> None:
    folder = write_concurrent_run(tmp_path / "run", steps=2)
    made = timeline(folder)
    assert made.words == timeline_words(read_spans(folder)) and made.png.startswith(b"\x89PNG")
    code = (
        "import sys; from swegym_tutorial.timeline import timeline\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"timeline({str(folder)!r}); sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
