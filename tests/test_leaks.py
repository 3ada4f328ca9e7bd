"""Nothing of a run outlives it: in a notebook's kernel that is interrupted or restarted, and in one process, run after run."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from swegym_tutorial import TrainingConfig, TrainingRun
from swegym_tutorial.events import EventReader

if "notebook" not in os.environ.get("SWEGYM_TUTORIAL_REQUIRE", "").split(","):
    pytest.importorskip("jupyter_client", reason="a kernel needs jupyter_client, which comes with jupyterlab")

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parents[1]
PATIENCE = 90.0  # seconds in which all of a run must be gone
BEGIN = 300.0  # seconds in which a busy machine gets anywhere with a run
pytestmark = pytest.mark.slow

SET_UP = """
from pathlib import Path
from swegym_tutorial import Dashboard, TrainingConfig, TrainingRun
def start(folder, **settings):
    config = TrainingConfig.laptop(groups_per_batch=2, max_groups_per_batch=2, evaluation_attempts=1)
    return TrainingRun(config, folder, **settings).start()
"""
# Makes a file once the cell is in the midst of its waiting: an interrupt that comes before that stops no run.
WAITING = """
import os, sys, threading, time
def is_waiting(main):
    frame, above = sys._current_frames()[main], None
    while frame is not None:
        code = frame.f_code
        if code.co_name == "select":  # of the event loop, which has the thread while a cell awaits
            return True
        if code is TrainingRun.wait.__code__ and above is not None:
            return True
        frame, above = frame.f_back, frame
    return False
def look(main=threading.get_ident(), file=os.environ["TMPDIR"] + "/waiting"):
    time.sleep(0.3)
    while not is_waiting(main):
        time.sleep(0.1)
    open(file, "w").close()
threading.Thread(target=look, daemon=True).start()
"""


class Kernel:
    """A real kernel whose temporary files lie in a folder of its own."""

    def __init__(self, temp: Path) -> None:
        self.temp = temp
        temp.mkdir()
        self._env = {
            **os.environ,
            "TMPDIR": str(temp),
            "PYTHONPATH": str(ROOT),
            "IPYTHONDIR": str(temp / "ipython"),
        }
        self._env.pop("TINKER_BASE_URL", None)
        self.manager = KernelManager(kernel_name="python3")
        self.manager.kernel_spec.argv[0] = sys.executable
        self.manager.start_kernel(env=self._env)
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=300)

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.process.pid)

    def run(self, code: str) -> dict:
        """Run a cell to its end; return the reply. Its error is the reply's."""
        return self.reply(self.begin(code))

    def begin(self, code: str) -> str:
        """Ask for a cell to be run; return its id. Should it end in an error, what is asked for next is run all the same."""
        return self.client.execute(code, stop_on_error=False)

    def reply(self, cell: str, timeout: float = 120) -> dict:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                message = self.client.get_shell_msg(timeout=1)
                if message["parent_header"].get("msg_id") == cell:
                    return message["content"]
        raise AssertionError(f"the cell did not end within {timeout} s")

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def folders(self) -> list[Path]:
        return [path for path in self.temp.iterdir() if path.name.startswith("swegym-")]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    made = Kernel(tmp_path / "tmp")
    try:
        yield made
    finally:
        made.close()


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def has(folder: Path, event: str, **fields: object) -> bool:
    return any(
        each["event"] == event and all(each.get(name) == value for name, value in fields.items())
        for each in EventReader(folder).read()
    )


def alive(processes: list[psutil.Process]) -> list[list[str]]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.cmdline())
    return found


# Case 18 (tinker-cookbook#943): a kernel that is restarted, by its button or because it hangs.


@pytest.mark.parametrize("now", [False, True], ids=["restarted", "killed and restarted"])
def test_case_18_a_restarted_kernel_leaves_nothing_of_its_run(
    kernel: Kernel, tmp_path: Path, now: bool
) -> None:
    folder = tmp_path / "run"
    assert kernel.run(f"{SET_UP}\nrun = start({str(folder)!r})")["status"] == "ok"
    assert wait_until(lambda: has(folder, "tool"), BEGIN)
    processes, old = kernel.family(), psutil.Process(kernel.pid)
    assert len(processes) >= 2 and kernel.folders()
    kernel.manager.restart_kernel(now=now)
    assert wait_until(lambda: not alive([old, *processes])), alive([old, *processes])
    assert wait_until(lambda: not kernel.folders()), kernel.folders()


# Case 45 (jupyter/help#318): a cell that waits for a run is interrupted, in each phase. Case 47 (ipywidgets#3468):
# start() returns at once, and a dashboard that is waited for can be left and its run stopped.


@dataclass(frozen=True)
class Phase:
    event: str  # that tells of its beginning
    fields: dict[str, object]
    wait: str = "run.wait()"  # code that waits for the run; interrupted, it stops it


PHASES = {
    "starting": Phase("phase", {"name": "starting the training server and the sandboxes"}),
    "evaluating": Phase("evaluation_start", {}),
    "in the first batch": Phase("tool", {"job": "train-job0"}, "await Dashboard(run)"),
    "after a step": Phase("step_done", {}),
}
INTERRUPTED = ("KeyboardInterrupt", "CancelledError")  # the second in a cell that awaits
OURS = ("train-job", "training-run", "evaluation", "policy", "closing", "hours", "reaping")
LEFT = f"[t.name for t in __import__('threading').enumerate() if t.name.startswith({OURS!r})]"


def test_case_45_an_interrupted_cell_gives_the_prompt_back_and_runs_again(
    kernel: Kernel, tmp_path: Path
) -> None:
    kernel.run(SET_UP)
    before = kernel.family()
    for name, phase in PHASES.items():
        folder = tmp_path / name.replace(" ", "-")
        begun = kernel.run(f"run = start({str(folder)!r}, evaluate={name == 'evaluating'})")
        assert begun["status"] == "ok", (name, begun)
        cell = kernel.begin(f"{WAITING}\n{phase.wait}")
        assert wait_until(lambda: has(folder, phase.event, **phase.fields), BEGIN), name  # noqa: B023 (called at once)
        assert wait_until(lambda: (kernel.temp / "waiting").exists(), 60), name
        (kernel.temp / "waiting").unlink()
        start = time.monotonic()
        kernel.manager.interrupt_kernel()
        reply = kernel.reply(cell)
        assert time.monotonic() - start < 30, name
        assert reply["status"] == "error" and reply["ename"] in INTERRUPTED, (name, reply)
        assert kernel.run("assert run.join(60)")["status"] == "ok", name
        assert has(folder, "run_stopped"), name
        assert wait_until(lambda: not set(kernel.family()) - set(before)), (name, alive(kernel.family()))
        assert wait_until(lambda: not kernel.folders()), (name, kernel.folders())
        assert wait_until(lambda: kernel.run(f"assert not {LEFT}, {LEFT}")["status"] == "ok"), (
            name,
            kernel.run(LEFT),
        )


# In one process, run after run


def test_runs_one_after_another_leave_no_thread_process_or_open_file(tmp_path: Path) -> None:
    """From the first run on the SDK keeps one loop thread with its sockets, and from the first figure on matplotlib its fonts."""
    run_one(TrainingConfig.laptop(lora_rank=100_000), tmp_path / "first")
    before = state()
    small = {"steps": 1, "groups_per_batch": 2, "max_groups_per_batch": 2}
    run_one(TrainingConfig.laptop(**small), tmp_path / "done")
    run_one(TrainingConfig.laptop(), tmp_path / "stopped", stop_at="tool")
    run_one(TrainingConfig.laptop(lora_rank=100_000), tmp_path / "failed")
    assert has(tmp_path / "done", "run_done") and has(tmp_path / "stopped", "run_stopped")
    assert has(tmp_path / "failed", "run_failed")
    assert wait_until(lambda: not more_than(before, state())), more_than(before, state())


def run_one(config: TrainingConfig, folder: Path, stop_at: str = "") -> None:
    run = TrainingRun(config, folder).start()
    if stop_at:
        assert wait_until(lambda: has(folder, stop_at), BEGIN)
        run.stop()
    assert run.join(600)


def state() -> Counter[str]:
    """What this process holds: threads, children and open files, each by what it is."""
    gc.collect()
    threads = (thread.name for thread in threading.enumerate())
    held = Counter(f"thread {name}" for name in threads if not name.startswith("asyncio_"))  # the SDK's pool
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            held[f"process {child.pid} {' '.join(child.cmdline())}"] += 1
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}").split(":")[0]
            held[f"file {target}"] += not target.endswith(".ttf")
    return held


def more_than(before: Counter[str], after: Counter[str]) -> Counter[str]:
    return after - before
