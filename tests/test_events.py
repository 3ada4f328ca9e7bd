"""The run folder: valid JSON always, readable while it grows and after a crash."""

from __future__ import annotations

import fcntl
import json
import random
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swegym_tutorial import episode_disk, events
from swegym_tutorial.events import (
    EventReader,
    FolderInUse,
    RunFolder,
    dumps,
    mark_unfinished,
    read_episode,
    scan,
    write_atomically,
)
from swegym_tutorial.grading import Outcome, Verdict
from swegym_tutorial.rollout import Ending, Rollout


def test_events_are_one_valid_json_object_a_line(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.open()
    folder.log(
        "step_done", reward_mean=float("nan"), metrics={"loss": float("inf"), "ok": [1, 2.5]}, text="a\nb ü"
    )
    folder.close()
    (line,) = folder.events.read_text(encoding="utf-8").splitlines()
    event = json.loads(line, parse_constant=lambda name: 1 / 0)
    assert event["reward_mean"] is None and event["metrics"] == {"loss": None, "ok": [1, 2.5]}
    assert event["text"] == "a\nb ü" and event["event"] == "step_done" and event["time"] > 0


def test_many_threads_write_whole_lines(tmp_path):
    folder = RunFolder(tmp_path)
    folder.open()
    threads = [
        threading.Thread(target=lambda n=n: [folder.log("e", n=n, i=i) for i in range(200)]) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    folder.close()
    events = EventReader(tmp_path).read()
    assert len(events) == 1600
    assert all([e["i"] for e in events if e["n"] == n] == list(range(200)) for n in range(8))


def test_a_reader_gets_each_event_once_and_leaves_a_cut_line(tmp_path):
    path = tmp_path / "events.jsonl"
    reader = EventReader(tmp_path)
    assert reader.read() == []
    path.write_text('{"event": "a"}\n{"event": "b"')
    assert [e["event"] for e in reader.read()] == ["a"]
    assert reader.read() == []
    with path.open("a") as file:
        file.write('}\n[1]\nnonsense\n{"event": "c"}\n')
    assert [e["event"] for e in reader.read()] == ["b", "c"]
    assert reader.bad_lines == 2


def test_a_log_that_was_cut_goes_on_on_a_new_line(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"event": "a"}\n{"event": "b", "te')
    folder = RunFolder(tmp_path)
    folder.open()
    folder.log("c")
    folder.close()
    reader = EventReader(tmp_path)
    assert [e["event"] for e in reader.read()] == ["a", "c"]
    assert reader.bad_lines == 1


def test_logging_after_the_end_is_harmless(tmp_path):
    folder = RunFolder(tmp_path)
    folder.open()
    folder.close()
    folder.log("late")
    assert EventReader(tmp_path).read() == []


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "checkpoint.json"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert path.read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.json"]


def test_what_a_killed_process_was_writing_is_gone_at_the_next_start(tmp_path: Path) -> None:
    (tmp_path / ".train-job0-checkpoint.json.123").write_text("{")
    (tmp_path / "config.json").write_text("{}")
    folder = RunFolder(tmp_path)
    folder.open()
    folder.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "events.jsonl"]


def test_who_looks_at_a_folder_does_not_keep_a_run_from_opening_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.open()
    assert folder.written()
    with pytest.raises(FolderInUse):
        RunFolder(tmp_path).open()
    folder.close()
    assert not folder.written()
    monkeypatch.setattr(events, "OPENING", 60.0)  # a look lasts as long as the machine is busy
    with folder.events.open("rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.1, looking.close).start()
        again = RunFolder(tmp_path)
        again.open()
    assert folder.written()
    again.close()


# -- Long logs -------------------------------------------------------------------------------------

NAMES = ("rollout_start", "sample", "episode", "group")


@pytest.mark.parametrize("block", [1, 7, 64, 100_000])
def test_a_scan_finds_what_reading_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(events, "READ", block)
    chance = random.Random(block)
    lines = [
        dumps(
            {"time": n, "event": chance.choice(NAMES), "text": '"event": "group" ü\n' * chance.randrange(3)}
        )
        for n in range(200)
    ]
    lines[3:3] = ['{"event": "group", "cut', "", "[1]", '{"event":"group","compact":1}', '["event", "group"]']
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + '\n{"event": "group"}', encoding="utf-8")
    read = EventReader(tmp_path).read()
    for names in (("group",), ("sample", "episode"), NAMES, (), ("none",)):
        assert list(scan(tmp_path, names)) == [event for event in read if event["event"] in names]
    assert list(scan(tmp_path / "elsewhere", NAMES)) == []


def test_a_stream_that_was_left_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("".join(f'{{"event": "e", "n": {n}}}\n' for n in range(5)))
    reader = EventReader(tmp_path)
    assert next(reader.stream())["n"] == 0
    assert [event["n"] for event in reader.stream()] == [1, 2, 3, 4]
    assert reader.read() == []


def test_events_that_are_skipped_tell_the_time_of_the_last_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.open()
    reader = EventReader(tmp_path, skip=["tool", "sample"])
    for name in ("run_start", "tool", "sample", "tools", "tool", "sample"):
        folder.log(name, text='"event": "tool"')
    assert [event["event"] for event in reader.read()] == ["run_start", "tools", "sample"]
    folder.log("tool")
    folder.log("group", of={"event": "tool"})
    assert [event["event"] for event in reader.read()] == ["group"] and reader.read() == []
    folder.close()


def test_a_long_log_is_read_in_little_memory(tmp_path: Path) -> None:
    with (tmp_path / "events.jsonl").open("w") as log:
        for n in range(60_000):
            log.write(dumps({"time": n, "event": "e" if n else "first", "text": "x" * 200}) + "\n")
    tracemalloc.start()
    try:
        assert sum(1 for _ in EventReader(tmp_path).stream()) == 60_000
        assert len(list(scan(tmp_path, ["first"]))) == 1
        assert tracemalloc.get_traced_memory()[1] < 8_000_000, "the log has 14 MB"
    finally:
        tracemalloc.stop()


def test_a_line_without_an_end_takes_no_more_memory_than_the_longest_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "READ", 1000)
    monkeypatch.setattr(events, "LONGEST_LINE", 10_000)
    (tmp_path / "events.jsonl").write_text('{"event": "a"}\n' + "x" * 45_000 + '\n{"event": "b"}\n')
    reader = EventReader(tmp_path)
    assert [event["event"] for event in reader.read()] == ["a", "b"] and reader.bad_lines >= 1
    assert [event["event"] for event in scan(tmp_path, "ab")] == ["a", "b"]


def test_attempts_that_began_and_did_not_end_are_found(tmp_path: Path) -> None:
    def key(group: int, attempt: int, phase: str = "run-1") -> dict[str, Any]:
        return {
            "phase": phase, "job": "train-job0", "group": group, "attempt": attempt,
            "instance_id": "a__a-1", "policy_version": 2,
        }  # fmt: skip

    assert mark_unfinished(tmp_path) == []
    folder = RunFolder(tmp_path)
    folder.open()
    for each in (key(0, 0), key(0, 1), key(1, 0), key(1, 1), key(1, 1, "evaluation-before")):
        folder.log("rollout_start", **each)
    folder.log("rollout_ready", **key(1, 0))
    folder.log("episode", **key(0, 1), reward=1.0, outcome="resolved")
    folder.log("episode", **key(1, 1), reward=None, outcome="infrastructure")
    open_ones = [key(0, 0), key(1, 0), key(1, 1, "evaluation-before")]
    assert mark_unfinished(tmp_path) == open_ones
    for each in open_ones[:2]:
        folder.log("attempt_unfinished", **each)
    assert mark_unfinished(tmp_path) == open_ones[2:]
    folder.log("rollout_start", **key(0, 0, "run-2"))
    folder.close()
    assert mark_unfinished(tmp_path) == [*open_ones[2:], key(0, 0, "run-2")]


# -- The disk of recorded attempts -----------------------------------------------------------------


def attempt(folder: RunFolder, group: int, phase: str = "run-1", graded: bool | None = True) -> Path:
    """Record an attempt of some 48 KB. graded: None leaves it before its end, False loses it to a fault."""
    path = folder.episode(phase, "train-job0", group, 0)
    none = np.zeros(0)
    patch = random.Random(group).randbytes(20_000)
    rollout = Rollout("A__a-1", none, none, none, (), Ending.FINAL, patch, 0.0)
    folder.save_rollout(path, rollout)
    if graded:
        folder.save_episode(path, rollout, Verdict(Outcome.RESOLVED, log="x" * 5000))
    if graded is not None:
        folder.log("episode", phase=phase, job="train-job0", group=group, attempt=0, reward=1.0)
    return path


def settled(folder: RunFolder) -> int:
    """Wait until nothing more has to be deleted; returns the bytes that are accounted for."""
    disk = folder._disk
    assert disk is not None and disk.settled(30)
    return disk.total


def taken(path: Path) -> int:
    """The bytes of all attempts by a walk."""
    files = [p for p in path.glob("episodes/*/*/*/**/*") if p.is_file()]
    folders = len(list(path.glob("episodes/*/*/*")))
    return sum(episode_disk.on_disk(p.stat().st_size) for p in files) + folders * episode_disk.FOLDERS


def groups(path: Path) -> list[str]:
    return sorted(f"{p.parent.parent.name}/{p.name}" for p in path.glob("episodes/*/*/*"))


def test_the_oldest_attempts_are_deleted_beyond_the_limit(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, episodes_gb=500e-6)
    folder.open()
    evaluated = attempt(folder, 0, "evaluation-before")
    writing = attempt(folder, 0, graded=None)
    for group in range(1, 31):
        attempt(folder, group)
        settled(folder)
    total = settled(folder)
    assert total == taken(tmp_path) and 300_000 < total <= 500_000
    left = [p.name for p in writing.parent.iterdir()]
    assert evaluated.exists() and writing.exists(), "an evaluation goes last, what is written stays"
    assert sorted(left)[1:] == [f"g{n:06d}-a0" for n in range(32 - len(left), 31)], "the newest stay"
    assert read_episode(folder.episode("run-1", "train-job0", 30, 0))["verdict"]["outcome"] == "resolved"
    folder.close()
    told = list(scan(tmp_path, ["episodes_deleted"]))
    assert sum(event["count"] for event in told) == 31 - len(left)
    assert all(event["bytes"] > 40_000 for event in told)


def test_a_lost_attempt_may_be_deleted_and_evaluations_go_when_nothing_else_is_left(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, episodes_gb=100e-6)
    folder.open()
    lost = attempt(folder, 0, graded=False)
    first, second, third = (attempt(folder, n, "evaluation-after") for n in range(3))
    settled(folder)
    assert not lost.exists() and not first.exists()
    assert second.exists() + third.exists() >= 1
    folder.close()


def test_attempts_of_an_earlier_part_are_counted_when_the_folder_is_opened(tmp_path: Path) -> None:
    before = RunFolder(tmp_path)
    before.open()
    for group in (3, 1, 2):  # in the order of their ends, not of their names
        attempt(before, group)
        time.sleep(0.02)
    unfinished = attempt(before, 4, graded=None)
    evaluated = attempt(before, 0, "evaluation-before")
    before.close()
    (tmp_path / "episodes" / ".run-1+train-job0+g000000-a0" / "deep").mkdir(parents=True)
    folder = RunFolder(tmp_path, episodes_gb=1.0)
    folder.open()
    assert settled(folder) == taken(tmp_path) > 150_000
    assert not (tmp_path / "episodes" / ".run-1+train-job0+g000000-a0").exists(), "a deletion that was cut"
    attempt(folder, 0, "evaluation-before")  # made anew in its place: not counted twice
    assert settled(folder) == taken(tmp_path)
    folder.close()
    smaller = RunFolder(tmp_path, episodes_gb=160e-6)
    smaller.open()
    settled(smaller)
    assert groups(tmp_path)[:2] == ["evaluation-before/g000000-a0", "run-1/g000002-a0"]
    assert unfinished.exists() and evaluated.exists()
    smaller.close()


def test_many_threads_record_while_attempts_are_deleted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, episodes_gb=400e-6)
    folder.open()
    errors: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for group in range(n * 100, n * 100 + 12):
                attempt(folder, group)
                attempt(folder, group % 3 + 3 * n, "evaluation-before")
        except BaseException as error:
            errors.append(error)

    disk = folder._disk
    assert disk is not None
    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert settled(folder) == taken(tmp_path) <= 400_000
    folder.close()
    disk._thread.join(60)
    assert not disk._thread.is_alive()


def test_a_full_disk_does_not_end_the_deleting(tmp_path: Path) -> None:
    def full(event: str, **fields: Any) -> None:
        raise OSError(28, "No space left on device")

    disk = episode_disk.EpisodeDisk(tmp_path, 40_000, full)
    disk.start()
    for group in range(6):
        path = tmp_path / "run-1" / "train-job0" / f"g{group:06d}-a0"
        disk.begin(path)
        path.mkdir(parents=True)
        (path / "x").write_bytes(b"x" * 9000)
        disk.wrote(path, 9000)
        disk.finish(path)
        assert disk.settled(30)
    assert disk.total <= 40_000 and 0 < len(list(tmp_path.glob("*/*/*"))) < 4
    disk.close()


def test_without_a_limit_nothing_is_deleted_or_counted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.open()
    paths = [attempt(folder, group) for group in range(3)]
    folder.close()
    assert all(path.exists() for path in paths) and folder._disk is None


def test_a_line_for_which_the_disk_had_no_room_spoils_no_other(tmp_path):
    class Small:
        """A disk that takes half a line, then nothing, then all."""

        def __init__(self, file) -> None:
            self.file, self.room, self.closed = file, [40, 0], False

        def write(self, data: bytes) -> int:
            if not self.room:
                return self.file.write(data)
            if (room := self.room.pop(0)) == 0:
                raise OSError(28, "No space left on device")
            return self.file.write(data[:room])

        def close(self) -> None:
            self.file.close()

    folder = RunFolder(tmp_path)
    folder.open()
    folder.log("first")
    folder._file = Small(folder._file)
    with pytest.raises(OSError, match="No space left"):
        folder.log("lost", text="x" * 100)
    folder.log("third")
    folder.close()
    assert [event["event"] for event in EventReader(tmp_path).read()] == ["first", "third"]


def test_text_that_is_no_unicode_is_logged_as_it_is(tmp_path):
    folder = RunFolder(tmp_path)
    folder.open()
    folder.log("attempt_fault", reason="no such file: \udcff.py")
    folder.close()
    (event,) = EventReader(tmp_path).read()
    assert event["reason"] == "no such file: \udcff.py"


def test_a_folder_stays_where_it_is_when_the_process_goes_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder("run")
    folder.open()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder.log("here")
    assert folder.checkpoint(0).parent == tmp_path / "run"
    folder.close()
