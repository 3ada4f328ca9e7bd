"""The run folder: valid JSON always, readable while it grows and after a crash."""

import json
import threading

from swegym_tutorial.events import EventReader, RunFolder, write_atomically


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
