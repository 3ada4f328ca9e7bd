"""The dashboard in real kernels without a browser, and as text outside of notebooks."""

from __future__ import annotations

import asyncio
import base64
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from synthetic import Events, Replay, write_run

from swegym_tutorial.dashboard import Dashboard, in_notebook, table_html
from swegym_tutorial.events import EventReader, RunFolder, dumps
from swegym_tutorial.plots import png_bytes, reward_time_figure
from swegym_tutorial.terminal import summarise
from swegym_tutorial.words import alt_text

pytestmark = pytest.mark.slow  # most of these start a kernel

HERE = Path(__file__).parent
START = """
import sys, time
sys.path.insert(0, {tests!r})
from synthetic import Replay
from swegym_tutorial import Dashboard
run = Replay({folder!r}, steps=6, seed=2, pause_after=2)
"""
# What a reader sees between the second and the third step, and then at the end.
WATCH = """
while "2 of 6" not in str(dashboard):
    time.sleep(0.05)
run.go_on.set()
await dashboard
assert dashboard.error is None, dashboard.error
"""


class Recorder(NotebookClient):
    """Runs a notebook and keeps all that its kernel sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sent: list[dict[str, Any]] = []

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        self.sent.append({"type": msg["msg_type"], **msg["content"]})
        return super().process_message(msg, cell, cell_index)

    def shown(self, mime: str) -> list[str]:
        """What was shown as this MIME type, first and changed in place, in order."""
        datas = [m["data"] for m in self.sent if m["type"] in ("display_data", "update_display_data")]
        return [data[mime] for data in datas if mime in data]


def run_cells(*cells: Any, client: type[Recorder] = Recorder) -> tuple[Recorder, list[Any]]:
    """Run cells in a fresh kernel; returns the client and all outputs as they would be saved."""
    made = [nbformat.v4.new_code_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    book = nbformat.v4.new_notebook(cells=made)
    book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    ran = client(book, timeout=300, startup_timeout=300)
    ran.execute(env=environment, cwd=str(HERE.parent))
    return ran, [output for cell in book.cells for output in cell.outputs]


def start(folder: Path, before: str = "") -> str:
    return START.format(tests=str(HERE), folder=str(folder)) + before


def pictures(outputs: list[Any]) -> list[Any]:
    return [output for output in outputs if "image/png" in output.get("data", {})]


# Output lost from threads, jupyter-widgets/ipywidgets#4020: the state that a thread painted last is what stays.
@pytest.mark.slow
def test_case_40_the_final_state_stays_in_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    client, outputs = run_cells(start(folder, "dashboard = Dashboard(run.start())"), WATCH)
    summary = summarise(folder)
    (picture,) = pictures(outputs)
    assert base64.b64decode(picture.data["image/png"]) == png_bytes(
        reward_time_figure(summary), alt_text(summary)
    )
    assert picture.metadata["image/png"]["alt"] == picture.data["text/plain"] == alt_text(summary)
    (table,) = [output.data for output in outputs if "text/html" in output.get("data", {})]
    assert "done after" in table["text/html"] and "6 of 6" in table["text/html"]
    assert "6 of 6" in table["text/plain"]
    # It was live before: the second step was painted while the run waited there.
    assert any("2 of 6" in html for html in client.shown("text/html"))
    painted = client.shown("image/png")
    assert len(painted) >= 2 and len(set(painted)) == len(painted), "the same picture was sent twice"


# Version skew, jupyter-widgets/ipywidgets#3823: without widgets, or with some that don't fit, the rest works.
@pytest.mark.slow
@pytest.mark.parametrize("module", ["None", "__import__('types').ModuleType('ipywidgets')"])
def test_case_41_without_widgets_picture_and_text_remain(tmp_path: Path, module: str) -> None:
    block = f"sys.modules['ipywidgets'] = {module}\ndashboard = Dashboard(run.start())"
    client, outputs = run_cells(start(tmp_path / "run", block), WATCH)
    assert len(pictures(outputs)) == 1
    text = client.shown("text/plain")[-1]
    assert "6 of 6" in text and "no buttons here" in text and "pause(), resume(), stop()" in text
    assert not client.shown("application/vnd.jupyter.widget-view+json")


# Third-party widgets break on Colab, googlecolab/colabtools#5425: core widgets, PNG, HTML and text only.
@pytest.mark.slow
def test_case_42_and_43_core_widgets_and_none_of_them_left(tmp_path: Path) -> None:
    client, outputs = run_cells(start(tmp_path / "run", "dashboard = Dashboard(run.start())"), WATCH)
    states = [m["data"]["state"] for m in client.sent if m["type"] == "comm_open"]
    assert {state["_model_name"] for state in states} >= {"ButtonModel", "HBoxModel"}
    assert {s["_model_module"] for s in states} == {"@jupyter-widgets/base", "@jupyter-widgets/controls"}
    # GitHub shows no notebook with widget metadata: what stays needs none.
    left = [set(output.get("data", {})) for output in outputs]
    assert left == [{"image/png", "text/plain"}, {"text/html", "text/plain"}, {"text/plain"}]
    assert outputs[-1].data == {"text/plain": ""}


@pytest.mark.slow
def test_case_43_without_buttons_there_is_one_picture_and_one_table(tmp_path: Path) -> None:
    client, outputs = run_cells(
        start(tmp_path / "run", "dashboard = Dashboard(run.start(), buttons=False)\ndashboard"), WATCH
    )
    assert [set(o.get("data", {})) for o in outputs] == [
        {"image/png", "text/plain"},
        {"text/html", "text/plain"},
    ]
    assert not [m for m in client.sent if m["type"].startswith("comm_")]


class Presser(Recorder):
    """A reader who presses buttons while a cell waits: each when the table says what it waits for."""

    presses = (("Pause", "2 of 6"), ("Resume", ">paused; "), ("Stop", ">train-job0 batch 3"))

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        done = super().process_message(msg, cell, cell_index)
        html = msg["content"].get("data", {}).get("text/html", "")
        if self.presses and self.presses[0][1] in html:
            (name, _), *self.presses = self.presses  # type: ignore[assignment]
            (comm,) = [
                m["comm_id"]
                for m in self.sent
                if m["type"] == "comm_open" and m["data"]["state"].get("description") == name
            ]
            content = {"comm_id": comm, "data": {"method": "custom", "content": {"event": "click"}}}
            self.kc.shell_channel.send(self.kc.session.msg("comm_msg", content))
        return done


# Buttons are dead while a cell runs, jupyter-widgets/ipywidgets#3468: `start()` returns at once, and while a cell
# awaits the dashboard presses are heard.
@pytest.mark.slow
def test_case_47_buttons_act_while_a_cell_waits(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _, outputs = run_cells(
        start(folder, "dashboard = Dashboard(run.start())"),
        "await dashboard\nprint(dashboard)",
        client=Presser,
    )
    assert outputs[-1].text.startswith("status             stopped after")
    asked = [event for event in events_in(folder) if event in ("paused", "unpaused", "run_stopped")]
    assert asked == ["paused", "unpaused", "run_stopped"]


class Interrupter(Recorder):
    """A reader who interrupts the waiting cell, which says when it waits."""

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        if "it waits" in msg["content"].get("text", ""):
            os.kill(self.km.provisioner.process.pid, signal.SIGINT)
        return super().process_message(msg, cell, cell_index)


# An interrupt leaves the notebook usable, jupyter/help#318: the prompt is back, and nothing of the run goes on.
@pytest.mark.slow
def test_case_45_an_interrupted_wait_stops_the_run_and_leaves_its_last_state(tmp_path: Path) -> None:
    # What is called soon is called once the cell gives control away, which it does where it awaits.
    wait = 'import asyncio\nasyncio.get_running_loop().call_soon(print, "it waits")\nawait dashboard'
    waiting = nbformat.v4.new_code_cell(wait, metadata={"tags": ["raises-exception"]})
    _, outputs = run_cells(
        start(tmp_path / "run", "dashboard = Dashboard(run.start())"),
        'while "2 of 6" not in str(dashboard):\n    time.sleep(0.05)',
        waiting,
        "run.join(60)\nprint(run.running)\nawait dashboard\nprint(dashboard)",
        client=Interrupter,
    )
    (error,) = [output.ename for output in outputs if output.output_type == "error"]
    assert error in ("KeyboardInterrupt", "CancelledError")
    printed = "".join(output.get("text", "") for output in outputs)
    assert printed.startswith("it waits\nFalse\nstatus             stopped after")


@pytest.mark.slow
def test_case_47_button_click_and_method_do_the_same(tmp_path: Path) -> None:
    record = """
import ipywidgets
buttons, Button = {}, ipywidgets.Button
def recorded(**options):
    return buttons.setdefault(options["description"], Button(**options))
ipywidgets.Button = recorded
dashboard = Dashboard(run.start())
"""
    press = """
buttons["Pause"].click(), buttons["Resume"].click()
dashboard.pause(), dashboard.resume()
buttons["Stop"].click()
await dashboard
print([button.disabled for button in buttons.values()], dashboard)
"""
    folder = tmp_path / "run"
    _, outputs = run_cells(start(folder, record), press)
    assert outputs[-1].text.startswith("[True, True, True] status             stopped after")
    asked = [event for event in events_in(folder) if event in ("paused", "unpaused", "run_stopped")]
    assert asked == ["paused", "unpaused"] * 2 + ["run_stopped"]


@pytest.mark.slow
def test_an_error_of_the_painter_s_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    """Whatever goes wrong while painting ends the painting alone."""
    broken = "import swegym_tutorial.plots\nswegym_tutorial.plots.reward_time_figure = lambda summary: {}['step']\n"
    go_on = """
while dashboard.error is None:
    time.sleep(0.05)
run.go_on.set()
run.wait()
dashboard.close()
print(dashboard)
"""
    make = "dashboard = Dashboard(run)\n" + broken + "run.start()\n"
    _, outputs = run_cells(start(tmp_path / "run", make), go_on)
    assert "stopped painting: KeyError: 'step'. The run goes on." in outputs[-1].text
    assert events_in(tmp_path / "run")[-1] == "run_done"


def events_in(folder: Path) -> list[str]:
    return [event["event"] for event in EventReader(folder).read()]


# -- Outside of notebooks --------------------------------------------------------------------------


def test_this_is_no_notebook() -> None:
    assert not in_notebook()


def test_a_finished_run_is_shown_at_once_and_needs_no_thread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = set(threading.enumerate())
    dashboard = Dashboard(write_run(tmp_path / "run", steps=3))
    assert set(threading.enumerate()) <= threads
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == [f"train-job0 step {n}" for n in (1, 2, 3)]
    assert lines[-1].startswith("done after") and str(dashboard) == lines[-1]
    dashboard.close()


def test_a_run_of_another_process_is_followed_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    dashboard = Dashboard(folder.path)  # before there is a log
    assert str(dashboard) == f"there is no log here yet: looking for events in {folder.events}"
    folder.open()
    for event in Events(steps=2, evaluations=()):
        folder.log(event.pop("event"), **{k: v for k, v in event.items() if k != "time"})
    folder.close()
    wait_until(lambda: "done after" in str(dashboard))
    printed = capsys.readouterr().out
    assert printed.count("train-job0 step 1:") == printed.count("train-job0 step 2:") == 1
    with pytest.raises(RuntimeError, match="in the process that runs it"):
        dashboard.stop()


def test_each_split_and_the_habits_are_told_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    splits = ("held-out", "held-out-phrasings")
    Dashboard(write_run(tmp_path / "run", steps=2, splits=splits, habits=True))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[-4:-1]] == [*splits, "habits"]
    assert lines[-1].startswith("done after")


def test_a_run_whose_process_is_gone_is_not_said_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = write_run(tmp_path / "run 1", steps=2, planned=9, evaluations=(), end="")
    threads = set(threading.enumerate())
    Dashboard(killed)
    assert set(threading.enumerate()) <= threads, "there is nothing more to come"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("its process is gone; it was: train-job0 batch 3 of 9")
    assert lines[-1] == f"go on with: swegym-tutorial train --resume --output '{killed}'"


def test_a_run_that_is_killed_while_it_is_watched_is_told_as_gone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open()
    for event in Events(steps=1, planned=9, evaluations=(), end=""):
        folder.log(event.pop("event"), **{k: v for k, v in event.items() if k != "time"})
    dashboard = Dashboard(folder.path)
    time.sleep(1.5)  # it looks once more, and finds the process alive
    assert "gone" not in str(dashboard)
    folder.close()  # as the end of its process does
    asyncio.run(asyncio.wait_for(_await(dashboard), 60))
    assert str(dashboard).startswith("go on with: swegym-tutorial train --resume")


async def _await(dashboard: Dashboard) -> None:
    await dashboard


@pytest.mark.slow
def test_the_table_of_a_notebook_tells_waits_clients_and_what_is_gone(tmp_path: Path) -> None:
    events = Events(steps=2, planned=9, clients=3, evaluations=(), end="")
    lines = [
        *events,
        events.event("job_failed", job="train-job2", reason="PolicyError: <gone>"),
        events.event("waiting", what="sampling", seconds=100.0, reason="HTTP 503"),
    ]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(dumps(line) + "\n" for line in lines))
    look = f"from swegym_tutorial import Dashboard\nDashboard({str(folder)!r})"
    _, outputs = run_cells(look)
    (table,) = [output.data for output in outputs if "text/html" in output.get("data", {})]
    for told in (
        "its process is gone; it was: 2 of 3 clients in training, 1 failed",
        "had waited 1 min 40 s for the server (sampling): HTTP 503",
        "job0, job1 gone; train-job2 failed: PolicyError: &lt;gone&gt;",
        "go on with: swegym-tutorial train --resume --output",
    ):
        assert told in table["text/html"]
    assert len(pictures(outputs)) == 1


def resumed(tmp_path: Path) -> RunFolder:
    """The folder of a run that was stopped, opened by a process that has not yet begun to go on."""
    folder = RunFolder(write_run(tmp_path / "run", steps=2, planned=3, evaluations=(), end="run_stopped"))
    folder.open()
    return folder


@pytest.mark.parametrize("early", [(), ("paused", "unpaused")])
def test_a_run_that_is_just_being_resumed_is_followed(tmp_path: Path, early: tuple[str, ...]) -> None:
    folder = resumed(tmp_path)
    dashboard = Dashboard(folder.path)
    for name in early:
        folder.log(name)
    time.sleep(1.5)  # it looks once more
    folder.log("run_start", steps=3, clients=1, resumed=True)
    for event in Events(steps=3, evaluations=()).batch("train-job0", 2):
        folder.log(event.pop("event"), **{k: v for k, v in event.items() if k != "time"})
    folder.log("run_done")
    folder.close()
    asyncio.run(asyncio.wait_for(_await(dashboard), 60))
    assert str(dashboard).startswith("done after") and dashboard._summary.steps["train-job0"][-1].step == 2


def test_a_run_that_has_ended_is_left_though_its_folder_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where a file system has no locks, and every folder seems to be written to."""
    monkeypatch.setattr("swegym_tutorial.dashboard.CLOSING", 0.5)
    monkeypatch.setattr("swegym_tutorial.dashboard.OPENED", 300.0)
    folder = resumed(tmp_path)
    dashboard = Dashboard(folder.path)
    wait_until(lambda: str(dashboard).startswith("a process has the folder open"))
    time.sleep(1.5)  # it looks once more, and says it no second time
    monkeypatch.setattr("swegym_tutorial.dashboard.OPENED", 1.0)
    asyncio.run(asyncio.wait_for(_await(dashboard), 60))
    printed = capsys.readouterr().out
    assert printed.count("a process has the folder open, and may go on with the run") == 1
    assert str(dashboard).startswith("stopped after")
    folder.close()


def test_a_dashboard_that_has_ended_is_not_kept_in_memory(tmp_path: Path) -> None:
    run = Replay(tmp_path / "run", steps=2, pause_after=1).start()
    dashboard = Dashboard(run)
    painter, kept = dashboard._painter, weakref.ref(dashboard)
    assert painter is not None and painter.is_alive()
    run.go_on.set()
    painter.join(60)
    del dashboard
    gc.collect()
    assert kept() is None


@pytest.mark.slow
def test_a_notebook_says_what_is_looked_for_until_there_is_a_log(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "events.jsonl").touch()
    look = f"from swegym_tutorial import Dashboard\ndashboard = Dashboard({str(folder)!r})"
    write = f"""
import time
from synthetic import Events
from swegym_tutorial.events import RunFolder
folder = RunFolder({str(folder)!r})
folder.open()
for event in Events(steps=1, evaluations=()):
    folder.log(event.pop("event"), **{{k: v for k, v in event.items() if k != "time"}})
folder.close()
await dashboard
"""
    client, outputs = run_cells(look, write)
    assert any("the log is empty yet: looking for events in" in html for html in client.shown("text/html"))
    (table,) = [output.data for output in outputs if "text/html" in output.get("data", {})]
    assert "done after" in table["text/html"] and "looking for" not in table["text/html"]


def test_methods_pause_resume_and_stop_a_live_run(tmp_path: Path) -> None:
    run = Replay(tmp_path / "run", steps=2, pause_after=1).start()
    dashboard = Dashboard(run)
    dashboard.pause()
    dashboard.resume()
    dashboard.stop()
    run.wait()
    dashboard.close()
    dashboard.close()
    assert str(dashboard).startswith("stopped after")


class Failing(Replay):
    """A run that ends with an error, as TrainingRun tells it."""

    def wait(self) -> None:
        super().wait()
        raise ConnectionError("the server is gone")


def test_awaiting_raises_what_the_run_raised(tmp_path: Path) -> None:
    async def wait() -> None:
        await Dashboard(Failing(tmp_path / "run", steps=1, end="run_failed").start())

    with pytest.raises(ConnectionError, match="the server is gone"):
        asyncio.run(wait())


def test_awaiting_a_finished_folder_returns_at_once(tmp_path: Path) -> None:
    async def wait() -> None:
        await Dashboard(write_run(tmp_path / "run", steps=1, end="run_failed"))

    asyncio.run(wait())


def test_closing_leaves_the_run_alone(tmp_path: Path) -> None:
    run = Replay(tmp_path / "run", steps=2, pause_after=1).start()
    dashboard = Dashboard(run)
    dashboard.close()
    assert run.running
    run.go_on.set()
    run.wait()
    assert summarise(tmp_path / "run").status == "done"


def test_a_log_with_a_cut_last_line_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    with (folder / "events.jsonl").open("a") as log:
        log.write(dumps({"event": "step_done"})[:-5])
    Dashboard(folder)
    assert "train-job0 step 2:" in capsys.readouterr().out


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no run folder"):
        Dashboard(tmp_path / "nowhere")


def test_without_ipython_there_is_a_line_a_step(tmp_path: Path) -> None:
    """A plain script that waits for the run only: its last lines come before the process ends."""
    script = """
import sys
sys.modules["IPython"] = None
from synthetic import Replay
from swegym_tutorial import Dashboard
run = Replay(sys.argv[1], steps=3).start()
Dashboard(run)
run.wait()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("train-job0 step ") for line in lines) == 3
    assert lines[-1].startswith("done after")


def test_the_table_has_no_colours_of_its_own_and_escapes() -> None:
    html = table_html([("status", "failed: <b> & co")])
    assert "color" not in html and "background" not in html
    assert "failed: &lt;b&gt; &amp; co" in html


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
