"""A training step of the full run's preset where SWE-Gym's tasks run: images with /testbed, on Docker and on Modal.

Everything is the full run's but the sizes, and the model: the bundled policy under the name that Spindle gives to
Qwen3.5-9B.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from swegym_tutorial import TrainingConfig, TrainingRun, load_tasks
from swegym_tutorial.bundled import POLICY
from swegym_tutorial.events import EventReader
from swegym_tutorial.sandbox import SandboxUnavailable, local
from swegym_tutorial.server.process import LocalServer
from swegym_tutorial.tasks import GIT_ENV, Task, materialise

from .podman import IMAGE, Engine

if TYPE_CHECKING:
    from modal_server import ModalServer

NAME = "qwen35-9b-lora-128k"
TAG = "localhost/swegym-like:1"
ACTIVATE = "export PATH=/opt/miniconda3/envs/$1/bin:$PATH CONDA_DEFAULT_ENV=$1\n"
PYTHON = '#!/bin/sh\n[ "$CONDA_DEFAULT_ENV" = testbed ] && exec python "$@"\n'
SMALL = {
    "group_size": 4,
    "context_tokens": 1024,
    "turn_tokens": 80,
    "max_turns": 6,
    "tool_timeout": 60,
    "observation_chars": 1500,
    "grading_timeout": 120,
    "rollout_workers": 4,
    "grading_workers": 2,
    "inflight_groups": 2,
    "sandbox_memory_mb": 1024,
    "system_prompt": TrainingConfig.laptop().system_prompt,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with LocalServer({NAME: POLICY}, tmp_path_factory.mktemp("state"), threads=1) as started:
        yield started


@dataclass(frozen=True)
class Image:
    """What an image in SWE-Gym's form has in its root, and the file of the task that is solved there."""

    root: Path
    tasks: Path


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """/testbed at a later commit that holds the answer, and an environment that must be activated."""
    folder = tmp_path_factory.mktemp("image")
    task, root = load_tasks()[0], folder / "root"
    materialise(task, root / "testbed")
    later = "git apply - && git commit -qam 'The answer' && git tag v2 && git switch -q -c main"
    subprocess.run(
        ["sh", "-c", later], input=task.patch.encode(), cwd=root / "testbed", env=GIT_ENV, check=True
    )
    for name, text in {"bin/activate": ACTIVATE, "envs/testbed/bin/env-python": PYTHON}.items():
        path = root / "opt/miniconda3" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    (folder / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY root /\n")
    tasks = folder / "tasks.jsonl"
    tasks.write_text(json.dumps(row(task)) + "\n")
    return Image(root, tasks)


def row(task: Task) -> dict[str, Any]:
    """The task as a file of tasks in images has it."""
    names = ["instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch"]
    instance = {name: getattr(task, name) for name in names}
    tests = {"FAIL_TO_PASS": json.dumps(task.fail_to_pass), "PASS_TO_PASS": list(task.pass_to_pass)}
    return {
        **instance,
        **tests,
        "image": TAG,
        "setup": "source /opt/miniconda3/bin/activate testbed",
        "test_command": task.test_command.replace("python", "env-python", 1),
    }


def train(
    server: LocalServer, image: Image, kind: str, output: Path, **settings: str
) -> list[dict[str, Any]]:
    """One step by the command, as a user gives it; returns the run's events."""
    command = [sys.executable, "-m", "swegym_tutorial.cli", "train", "--preset", "spindle", "--sandbox", kind]
    command += ["--tokenizer", str(POLICY), "--tasks", str(image.tasks), "--output", str(output)]
    command += ["--clients", "1", "--steps", "1", "--groups-per-batch", "1"]
    command += [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")]
    environment = {
        **os.environ,
        "TINKER_BASE_URL": server.url,
        "TINKER_API_KEY": server.key,
        "OMP_WAIT_POLICY": "passive",
        **settings,
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train-job0 step 1: mean reward" in done.stdout
    return list(EventReader(output).read())


def check(events: list[dict[str, Any]]) -> None:
    """The step was a real one: graded attempts of both kinds, in the task's environment, and no faults."""
    assert not [event["reason"] for event in events if event["event"] == "attempt_fault"]
    (step,) = [event for event in events if event["event"] == "step_done"]
    assert step["checkpoint"].startswith("tinker://") and step["groups"]["kept"] == 1 and step["lost"] == 0
    rewards = [event["reward"] for event in events if event["event"] == "episode"]
    assert {0.0, 1.0} <= set(rewards)  # 1: the tests ran, which need the activated environment
    assert any(event["event"] == "tool" and event["exit_code"] == 0 for event in events)


@pytest.mark.slow
def test_a_step_on_docker(server: LocalServer, image: Image, engine: Engine, tmp_path: Path) -> None:
    engine.podman("build", "-q", "--network=none", "-t", TAG, str(image.tasks.parent))
    before = engine.containers()
    check(train(server, image, "docker", tmp_path / "run", **engine.settings))
    assert engine.containers() <= before


@pytest.mark.slow
def test_a_step_on_modal(
    server: LocalServer, image: Image, modal_server: ModalServer, tmp_path: Path
) -> None:
    modal_server.contents[TAG] = image.root
    check(train(server, image, "modal", tmp_path / "run", **modal_server.settings))
    assert not modal_server.running
    asked = modal_server.asked[-1]
    assert (asked.milli_cpu, asked.memory_mb, asked.lifetime, asked.network) == (2000, 1024, 7200, "BLOCKED")


@pytest.mark.slow
def test_the_laptop_preset_runs_on_docker_where_bubblewrap_cannot_work(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(**limits: int) -> None:
        raise SandboxUnavailable("the local sandbox cannot work here: this is no Linux.")

    monkeypatch.setattr(local, "LocalBackend", unavailable)
    for name, value in engine.settings.items():
        monkeypatch.setenv(name, value)
    config = replace(
        TrainingConfig.laptop(),
        steps=1,
        groups_per_batch=1,
        max_groups_per_batch=1,
        group_size=4,
        inflight_groups=2,
        rollout_workers=4,
        tool_timeout=60.0,
    )
    run = TrainingRun(config, tmp_path / "run", tasks=load_tasks()[:1]).start()
    run.wait()
    events = list(EventReader(tmp_path / "run").read())
    assert any(e["event"] == "note" and "sandboxes run in Docker" in e["text"] for e in events)
    assert any(e["event"] == "step_done" for e in events)
    assert not [e["reason"] for e in events if e["event"] == "attempt_fault"]
