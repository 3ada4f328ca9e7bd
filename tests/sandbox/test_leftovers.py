"""What finds and ends sandboxes that were left behind, of every kind: the commands, and the next start."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from swegym_tutorial.sandbox import SandboxError, backend, root
from swegym_tutorial.sandbox.leftovers import find, reap_runs
from swegym_tutorial.sandbox.local import LocalBackend
from swegym_tutorial.tasks import Task

from .conftest import SERVICES

ROOT = Path(__file__).parents[2]


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swegym_tutorial.cli", "sandboxes", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=300,
    )


@pytest.fixture(params=SERVICES)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in request.getfixturevalue(SERVICES[request.param]).settings.items():
        monkeypatch.setenv(name, value)
    return request.param


# Case 18 (tinker-cookbook#943): a run's sandboxes can be listed and ended.
@pytest.mark.slow
def test_case_18_the_sandboxes_of_a_run_are_listed_and_ended(
    kind: str, small_task: Task, tmp_path: Path
) -> None:
    with closing(backend(kind, run=f"one-{kind}")) as one, closing(backend(kind, run=f"two-{kind}")) as two:
        first, second = one.open(small_task), two.open(small_task)
        listed = command("list", "--sandbox", kind).stdout.splitlines()
        runs = [run for line in listed for run in (f"one-{kind}", f"two-{kind}") if run in line.split()]
        assert sorted(runs) == [f"one-{kind}", f"two-{kind}"] and "2 sandboxes" in listed[-1]

        kept = command("reap", "--sandbox", kind).stdout  # these runs are alive, or may be
        assert "0 sandboxes ended\n2 more are of runs that may be alive" in kept
        assert first.exec("true", timeout=60).exit_code == 0

        (tmp_path / "events.jsonl").write_text(
            json.dumps({"event": "run_start", "run": f"one-{kind}"}) + "\n"
        )
        by_folder = command("list", "--run", str(tmp_path), "--sandbox", kind).stdout
        assert f"one-{kind}" in by_folder and f"two-{kind}" not in by_folder

        ended = command("reap", "--run", f"one-{kind}", "--sandbox", kind)
        assert ended.returncode == 0 and ended.stdout.endswith("1 sandbox ended\n")
        assert f"one-{kind}" not in command("list", "--sandbox", kind).stdout
        assert second.exec("true", timeout=60).exit_code == 0
        assert command("reap", "--all", "--sandbox", kind).stdout.endswith("1 sandbox ended\n")


def test_a_kind_that_cannot_be_asked_stops_no_other() -> None:
    nowhere = {"DOCKER_HOST": "unix:///no/such.sock", "MODAL_CONFIG_PATH": "/no/such.toml"}
    done = command("list", **nowhere, MODAL_TOKEN_ID="", MODAL_TOKEN_SECRET="")
    # Other tests' killed runs may have left some on this machine that are about to be ended.
    assert done.returncode == 0 and re.search(r"^\d+ sandbox(es)?\n\Z", done.stdout, re.M), done.stdout
    assert "docker: not asked: " in done.stderr and "modal: not asked: " in done.stderr
    alone = command("list", "--sandbox", "docker", **nowhere)
    assert alone.returncode == 1 and "Traceback" not in alone.stderr


# What earlier, dead parts of a run left is ended at the next start.

DRIVER = """
import sys, time, warnings
from swegym_tutorial import TrainingConfig
from swegym_tutorial.sandbox import backend
from swegym_tutorial.tasks import Task
warnings.simplefilter("ignore")
opened = backend(sys.argv[1], TrainingConfig.laptop(), run=sys.argv[2])
opened.open(Task("t", "r", "", "", "", "", "", (), (), files={"a": "b"}))
print("opened", flush=True)
time.sleep(600)
"""


def kill_a_driver(kind: str, run: str, **env: str) -> None:
    """Start a driver with one sandbox; kill it, and before it the child that would tidy up after it."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, kind, run],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )
    assert driver.stdout is not None and driver.stdout.readline() == "opened\n"
    for child in psutil.Process(driver.pid).children():
        child.kill()
    driver.kill()
    driver.wait()
    driver.stdout.close()


@pytest.mark.parametrize("kind", ["local", "subprocess"])
def test_case_18_the_next_start_ends_what_a_killed_run_left_on_this_machine(
    kind: str, small_task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(root, "places", lambda: [tmp_path])
    (tmp_path / "swegym-data").mkdir()  # somebody else's
    with closing(LocalBackend(tmp_path, run="living")) as living:
        sandbox = living.open(small_task)
        assert reap_runs(kind, ["dead"], told.append) == 0
        kill_a_driver(kind, "dead", TMPDIR=str(tmp_path))
        (left,) = find("local")
        assert left.run == "dead" and len(find("local", "dead")) == 1 and find("local", "living") == []
        assert reap_runs(kind, ["dead"], told.append) == 1
        assert find("local") == [] and not Path(left.name).exists() and told == []
        assert sandbox.exec("true", timeout=60).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["swegym-data"]


@pytest.mark.slow
def test_case_18_the_next_start_ends_what_dead_runs_left_and_nothing_else(
    kind: str, small_task: Task
) -> None:
    told: list[str] = []
    with (
        closing(backend(kind, run=f"earlier-{kind}")) as earlier,
        closing(backend(kind, run=f"living-{kind}")) as living,
    ):
        for _ in range(3):
            earlier.open(small_task)
        sandbox = living.open(small_task)
        reap_runs(kind, [], told.append)  # whatever other tests have left
        assert len(find(kind, f"earlier-{kind}")) == 3
        kill_a_driver(kind, f"killed-{kind}")
        assert reap_runs(kind, [f"earlier-{kind}", "never-was"], told.append) == 1
        assert find(kind, f"killed-{kind}") == [] and told == []
        assert (
            len(find(kind, f"earlier-{kind}")) == 3
        )  # its driver lives: this folder may be a copy of its own
        assert sandbox.exec("true", timeout=60).exit_code == 0


def test_a_service_that_cannot_be_asked_stops_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such.sock")
    assert reap_runs("docker", ["x"], told.append) == 0 and reap_runs("vmware", ["x"], told.append) == 0
    assert "no container engine answers" in told[0] and "vmware" in told[1] and len(told) == 2


def test_a_sandbox_that_cannot_be_ended_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise SandboxError("the disk is stuck")

    told: list[str] = []
    monkeypatch.setattr(root, "places", lambda: [tmp_path])
    kill_a_driver("subprocess", "dead", TMPDIR=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(root, "reap", refuse)
        assert reap_runs("local", ["dead"], told.append) == 0
    assert len(told) == 1 and "the disk is stuck" in told[0] and str(tmp_path) in told[0]
    assert reap_runs("local", ["dead"], told.append) == 1


def test_two_who_look_at_once_both_find_a_dead_drivers_folder(tmp_path: Path) -> None:
    dead = tmp_path / f"{root.PREFIX}dead"
    dead.mkdir()
    (dead / root.DRIVER).write_text("{}")
    with open(dead / root.DRIVER, encoding="utf-8") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert root.leftovers(tmp_path) == [dead]
    with open(dead / root.DRIVER, encoding="utf-8") as driver:
        fcntl.flock(driver, fcntl.LOCK_EX)
        assert root.leftovers(tmp_path) == []
