"""The commands that list and end sandboxes, of every kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from swegym_tutorial.sandbox import backend
from swegym_tutorial.tasks import Task

from .conftest import SERVICES


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swegym_tutorial.cli", "sandboxes", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=120,
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
    assert done.returncode == 0 and done.stdout.endswith("0 sandboxes\n"), done.stdout
    assert "docker: not asked: " in done.stderr and "modal: not asked: " in done.stderr
    alone = command("list", "--sandbox", "docker", **nowhere)
    assert alone.returncode == 1 and "Traceback" not in alone.stderr
