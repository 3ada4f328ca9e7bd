"""Whole runs on this machine: the real server, the real SDK, the bundled policy, real sandboxes and tests."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from swegym_tutorial import TrainingConfig, TrainingRun, cli
from swegym_tutorial.arguments import make_parser
from swegym_tutorial.batches import task_at
from swegym_tutorial.bundled import POLICY
from swegym_tutorial.calls import PolicyError
from swegym_tutorial.checkpoints import CheckpointError, read_checkpoint
from swegym_tutorial.clients import ClientsFailed
from swegym_tutorial.connect import RunError, anywhere, saved_config
from swegym_tutorial.events import EventReader, FolderInUse, RunFolder, read_episode
from swegym_tutorial.faults import TooManyFaults
from swegym_tutorial.grading import Outcome
from swegym_tutorial.sandbox import BackendClosed, SandboxBackend, SandboxError, how_to_end
from swegym_tutorial.sandbox.local import LocalBackend
from swegym_tutorial.selection import held_out_tasks
from swegym_tutorial.tasks import BUNDLED, load_tasks
from swegym_tutorial.terminal import summarise
from swegym_tutorial.timeline import Kind, read_spans
from swegym_tutorial.trials import evaluate_policy

sys.path.append(str(Path(__file__).parent / "benchmarks"))  # last: it has names that tests have too

import replay

ROOT = Path(__file__).parent.parent
SMALL = {
    "steps": 2,
    "groups_per_batch": 4,
    "max_groups_per_batch": 4,
    "group_size": 4,
    "evaluation_tasks": 8,
    "evaluation_attempts": 1,
}
WHOLE = {**SMALL, "group_size": 8}  # so that all usual outcomes come about
LONG = {**SMALL, "steps": 50}  # not done before a test has had its turn


def events(folder: Path, *names: str) -> list[dict]:
    return [e for e in EventReader(folder).read() if e["event"] in names]


@pytest.fixture(autouse=True, scope="module")
def children_before() -> Iterator[None]:
    """Children of these tests' own process, which fixtures of other tests may have started."""
    _BEFORE.update(family(os.getpid()))
    yield
    _BEFORE.clear()


_BEFORE: set[psutil.Process] = set()


def new_children() -> list[psutil.Process]:
    return [p for p in family(os.getpid()) if p not in _BEFORE and not is_zombie(p)]


def children_left() -> list[psutil.Process]:
    """The new ones that do not end: a watchdog that was let go may come to its end a little later."""
    deadline = time.monotonic() + 60
    while (left := new_children()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def is_zombie(process: psutil.Process) -> bool:
    """Whether it is gone, but for its parent's taking note."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a short run with evaluations, made once."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run = TrainingRun(TrainingConfig.laptop(**WHOLE), folder, evaluate=True)
    run.start()
    run.wait()
    return folder


@pytest.mark.slow
def test_a_run_leaves_every_file_and_nothing_else(whole):
    names = {path.name for path in whole.iterdir()}
    assert names >= {
        "config.json",
        "events.jsonl",
        "episodes",
        "train-job0-checkpoint.json",
        "reward_time.png",
    }
    assert TrainingConfig(**json.loads((whole / "config.json").read_text())).steps == 2
    assert (whole / "reward_time.png").read_bytes().startswith(b"\x89PNG")
    steps = events(whole, "step_done")
    assert [step["step"] for step in steps] == [0, 1]
    checkpoint = json.loads((whole / "train-job0-checkpoint.json").read_text())
    assert checkpoint["step"] == 1 and checkpoint["checkpoint"].startswith("tinker://")
    assert children_left() == []


@pytest.mark.slow
def test_every_attempt_is_recorded_with_its_turns_patch_and_tests(whole):
    graded = [e for e in events(whole, "episode") if e["phase"].startswith("run-")]
    assert len(graded) >= 64
    for event in graded:
        folder = (
            whole / "episodes" / event["phase"] / event["job"] / f"g{event['group']:06d}-a{event['attempt']}"
        )
        episode = read_episode(folder)
        assert (
            episode["verdict"]["reward"] == event["reward"] and episode["instance_id"] == event["instance_id"]
        )
        assert len(episode["tokens"]) == len(episode["mask"]) == len(episode["logprobs"])
        assert (folder / "trajectory.npz").exists() and (folder / "prediction.patch").exists()
        assert not (folder / "ungraded.npz").exists()
        tests = folder / event["instance_id"].lower()
        assert json.loads((tests / "report.json").read_text())["outcome"] == event["outcome"]
        assert (tests / "test_output.txt").exists()
    assert {e["outcome"] for e in graded} >= {Outcome.RESOLVED, Outcome.EMPTY_PATCH}


@pytest.mark.slow
def test_the_events_tell_the_whole_story(whole):
    summary = summarise(whole)
    assert summary.status == "done" and len(summary.steps["train-job0"]) == 2
    assert [(e.label, e.split, e.attempts, e.lost) for e in summary.evaluations] == [
        (label, split, attempts, 0)
        for label in ("before", "after")
        for split, attempts in (("held-out", 8), ("held-out-phrasings", 8), ("held-out-families", 8))
    ]
    graded = events(whole, "episode")
    assert {"look", "act", "line", "check"} <= {name for event in graded for name in event["habits"]}
    counted = [step.habits["act"][1] for step in summary.steps["train-job0"]]
    assert min(counted) > 0 and sum(counted) <= sum(event["phase"].startswith("run-") for event in graded)
    names = {e["event"] for e in EventReader(whole).read()}
    assert names >= {
        "rollout_start", "sample", "tool", "rollout_ready", "grading_start", "episode", "group", "step_done", "evaluation",
    }  # fmt: skip


@pytest.mark.slow
def test_the_sampled_logprobs_are_what_the_server_computes_for_the_same_policy(whole):
    # The base policy sampled the first batch: a fresh server must give the same log-probabilities.
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from swegym_tutorial.bundled import POLICY

    model = AutoModelForCausalLM.from_pretrained(POLICY).eval()
    first = [
        e
        for e in events(whole, "rollout_ready")
        if e["policy_version"] == 0 and e["phase"].startswith("run-")
    ][:4]
    for event in first:
        episode = read_episode(
            whole / "episodes" / event["phase"] / event["job"] / f"g{event['group']:06d}-a{event['attempt']}"
        )
        tokens = torch.tensor([episode["tokens"]])
        with torch.no_grad():
            logits = model(tokens).logits[0, :-1].log_softmax(-1)
        own = logits.gather(1, tokens[0, 1:, None])[:, 0].numpy()
        mask = np.array(episode["mask"][1:], bool)
        np.testing.assert_allclose(np.array(episode["logprobs"][1:])[mask], own[mask], atol=2e-3)


@pytest.mark.slow
def test_a_finished_run_can_be_evaluated_and_extended(whole, tmp_path):
    result = evaluate_policy(whole, attempts=1)
    assert result.attempts == 8 and 0 <= result.rate <= 1
    before = (whole / "events.jsonl").read_text()
    run = TrainingRun(TrainingConfig.laptop(**{**WHOLE, "steps": 3}), whole, resume=True)
    run.start()
    run.wait()
    assert (whole / "events.jsonl").read_text().startswith(before)
    assert [s["step"] for s in events(whole, "step_done")] == [0, 1, 2]
    assert events(whole, "resumed")[0]["step"] == 1


@pytest.mark.slow
def test_an_evaluation_measures_the_tasks_that_its_run_measured(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    config = replace(saved_config(folder), evaluation_tasks=2, seed=4242)
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    split = "held-out-phrasings"
    result = evaluate_policy(folder, split=split, attempts=1, seed=7)
    assert set(result.rewards) == {task.instance_id for task in held_out_tasks(config, split)}
    assert result.split == split and len(result.rewards) == 2


@pytest.mark.slow
def test_two_clients_train_side_by_side_with_a_kl_term(tmp_path):
    config = TrainingConfig.laptop(
        **{**SMALL, "steps": 1, "clients": 2, "kl_coef": 0.05, "rollout_workers": 8}
    )
    run = TrainingRun(config, tmp_path / "two")
    run.start()
    run.wait()
    summary = summarise(tmp_path / "two")
    assert sorted(summary.steps) == ["train-job0", "train-job1"]
    assert (tmp_path / "two" / "train-job1-checkpoint.json").exists()
    read = read_spans(tmp_path / "two")
    assert set(summary.steps) == {span.job for span in read.of(Kind.PUBLISHING)}
    kept = sum(step.groups["kept"] for steps in summary.steps.values() for step in steps)
    assert len(read.of(Kind.REFERENCE)) == kept and all(s.fate == "kept" for s in read.of(Kind.REFERENCE))
    assert summary.graded <= len(read.of(Kind.GRADING)) <= len(read.of(Kind.ROLLOUT))
    for job, (step,) in summary.steps.items():
        mine = [span for span in read.of(Kind.TRAINING) if span.job == job]
        trained = max(span.end for span in mine) - min(span.start for span in mine)
        assert 0 < trained < step.batch_seconds and all(span.step == 1 and span.ended for span in mine)
        sampling = sum(span.seconds for span in read.of(Kind.SAMPLING) if span.job == job and span.fate)
        assert sampling == pytest.approx(step.work_seconds["sampling"], rel=0.02, abs=0.2)
    assert summary.tokens > 0 and summary.sandboxes.total() == 0 and 0 < read.idle_share < 1


def test_a_used_folder_is_refused(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(RunError, match="holds an earlier run"):
        TrainingRun(TrainingConfig.laptop(), tmp_path)


def test_a_folder_whose_run_was_killed_while_it_began_is_as_good_as_new(tmp_path):
    (tmp_path / "events.jsonl").touch()
    (tmp_path / ".config.json.4711").touch()
    for resume in (False, True):
        TrainingRun(TrainingConfig.laptop(), tmp_path, resume=resume)


def test_the_full_run_needs_its_server_named(tmp_path, monkeypatch):
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    with pytest.raises(RunError, match="not set: TINKER_BASE_URL"):
        TrainingRun(TrainingConfig.spindle(sandbox="local"), tmp_path / "run", tasks=[])


def test_a_model_that_is_not_there_is_refused_and_never_replaced(tmp_path):
    with pytest.raises(RunError, match="no model folder"):
        TrainingRun(TrainingConfig.laptop(base_model=str(tmp_path / "typo")), tmp_path / "run")


def test_a_run_is_resumed_with_what_it_began_with_or_refused(tmp_path):
    first = TrainingConfig.laptop(seed=7, lora_rank=8)
    (tmp_path / "config.json").write_text(json.dumps(first.to_json()))
    TrainingRun(replace(first, steps=99), tmp_path, resume=True)
    with pytest.raises(RunError, match="seed was 7, not 0, lora_rank was 8, not 16"):
        TrainingRun(TrainingConfig.laptop(), tmp_path, resume=True)
    half = partial(min, 0.5)
    (tmp_path / "events.jsonl").write_text('{"event": "run_start", "time": 1.0, "reward": "partial"}\n')
    TrainingRun(first, tmp_path, resume=True, reward=half)
    with pytest.raises(RunError, match=r"with the reward partial and would go on with the plain reward"):
        TrainingRun(first, tmp_path, resume=True)
    (tmp_path / "config.json").write_text('{"steps": 3, "color": "red"}')
    with pytest.raises(RunError, match=r"config.json cannot be read.*color"):
        TrainingRun(first, tmp_path, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost, told", [("train", "none of the 2 tasks"), ("held-out", "none of the 2 held-out")]
)
def test_a_run_without_a_task_that_can_be_opened_says_so(tmp_path, lost, told):
    rows = [json.loads(line) for line in BUNDLED.read_text(encoding="utf-8").splitlines()]
    chosen = [r for split in ("train", "held-out") for r in [r for r in rows if r["split"] == split][:2]]
    for row in chosen:
        if row["split"] == lost:
            del row["files"]
            row["image"] = "no/image:1"
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    config = TrainingConfig.laptop(**SMALL, tasks=str(tmp_path / "own.jsonl"))
    run = TrainingRun(config, tmp_path / "run", evaluate=True).start()
    with pytest.raises(RunError, match=f"{told}.*can be opened: .*no/image:1"):
        run.wait()
    (left_out,) = events(tmp_path / "run", "tasks_left_out")
    assert set(left_out["tasks"]) == {r["instance"]["instance_id"] for r in chosen if r["split"] == lost}


@pytest.mark.slow
def test_a_run_that_lacks_one_held_out_split_says_so_at_once_and_measures_the_others(tmp_path):
    rows = [json.loads(line) for line in BUNDLED.read_text(encoding="utf-8").splitlines()[:6]]
    splits = ("train", "train", "held-out", "held-out-a", "held-out-b", "held-out2")
    chosen = [{**row, "split": split} for row, split in zip(rows, splits, strict=True)]
    del chosen[3]["files"]
    chosen[3]["image"] = "no/image:1"
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    config = TrainingConfig.laptop(**EXACT, steps=1, tasks=str(tmp_path / "own.jsonl"), evaluation_attempts=1)
    run = TrainingRun(config, tmp_path / "run", evaluate=True).start()
    run.wait()
    measured = [
        ("before", "held-out"),
        ("before", "held-out-b"),
        ("after", "held-out"),
        ("after", "held-out-b"),
    ]
    assert [(e["label"], e["split"]) for e in events(tmp_path / "run", "evaluation")] == measured
    assert [(e.label, e.split) for e in run.evaluations] == measured
    names = [e.get("text") or e["event"] for e in events(tmp_path / "run", "note", "rollout_start")]
    before = names[: names.index("rollout_start")]
    (lost,) = [n for n, text in enumerate(before) if "held-out-a is not measured" in text]
    assert "no/image:1" in before[lost]
    assert [text for text in before if "of the split held-out2 are neither trained on nor measured" in text]


def test_a_run_is_resumed_from_any_folder(tmp_path, monkeypatch):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    (home / "own.jsonl").write_text(BUNDLED.read_text(encoding="utf-8"), encoding="utf-8")
    shutil.copytree(POLICY, home / "policy")
    monkeypatch.chdir(home)
    for tasks in ("own.jsonl", f"own.jsonl:{load_tasks()[0].repo}", "bundled"):
        given = TrainingConfig.laptop(tasks=tasks, base_model="policy", tokenizer="policy")
        config = TrainingRun(given, tmp_path / "new").config
        assert config.base_model == config.tokenizer == str(home / "policy")
        assert config.tasks == tasks.replace("own", f"{home}/own")
        (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
        monkeypatch.chdir(elsewhere)
        TrainingRun(saved_config(tmp_path), tmp_path, resume=True)
        monkeypatch.chdir(home)
        TrainingRun(given, tmp_path, resume=True)  # named as the first time
    assert anywhere(TrainingConfig.spindle()) == TrainingConfig.spindle()


@pytest.mark.parametrize("text", ["", '{"step": 3', '{"step": 3}', "[]"])
def test_a_checkpoint_that_cannot_be_read_is_named(text, tmp_path):
    path = tmp_path / "train-job0-checkpoint.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"train-job0-checkpoint\.json"):
        read_checkpoint(path)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_its_reason(tmp_path):
    threads = threading.enumerate()
    run = TrainingRun(TrainingConfig.laptop(**LONG), tmp_path / "run")
    run.start()
    wait_for(run.folder.path, "tool")

    class Full:
        closed = False

        def write(self, data):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    run.folder._file = Full()
    assert run.join(120)
    with pytest.raises(OSError, match="No space left"):
        run.wait()
    assert children_left() == []
    for thread in set(threading.enumerate()) - set(threads):
        if thread.name == "episode-disk":
            thread.join(60)
            assert not thread.is_alive()


def at_event(run: TrainingRun, name: str, act: Callable[[], None]) -> None:
    """Have something done the first time that a run logs this event, before it goes on."""
    log, todo = run.folder.log, [act]

    def logging(event: str, **fields: Any) -> None:
        log(event, **fields)
        if event == name and todo:
            todo.pop()()

    run.folder.log = logging  # type: ignore[method-assign]


def kill_server() -> None:
    for process in new_children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "swegym_tutorial.server" in cmdline(process):
                process.kill()


@pytest.mark.slow
def test_a_local_server_that_dies_is_started_again_and_no_batch_is_lost(tmp_path):
    run = TrainingRun(TrainingConfig.laptop(**SMALL), tmp_path / "run")
    at_event(run, "step_done", kill_server)
    run.start()
    run.wait()
    assert [s["step"] for s in events(run.folder.path, "step_done")] == [0, 1]
    (note,) = [e["text"] for e in events(run.folder.path, "note") if "server" in e["text"]]
    assert "started again" in note and "status -9" in note
    (recovered,) = events(run.folder.path, "recovered")
    assert recovered["checkpoint"].endswith("step00000")
    assert not events(run.folder.path, "attempt_fault") and children_left() == []


@pytest.mark.slow
def test_a_local_server_that_dies_too_often_ends_the_run_with_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr("swegym_tutorial.connect.RESTARTS", 0)
    run = TrainingRun(TrainingConfig.laptop(), tmp_path / "run")
    run.start()
    wait_for(run.folder.path, "tool")
    kill_server()
    assert run.join(120)
    with pytest.raises(RunError, match=r"server ended with status -9.*server\.log"):
        run.wait()
    assert summarise(run.folder.path).status == "failed" and children_left() == []


def test_two_runs_never_write_to_one_folder(tmp_path):
    one, two = RunFolder(tmp_path), RunFolder(tmp_path)
    one.open()
    with pytest.raises(FolderInUse, match="another run is writing"):
        two.open()
    one.close()
    two.open()
    two.close()


@pytest.mark.slow
def test_an_error_is_raised_by_wait_and_nothing_is_left(tmp_path):
    run = TrainingRun(TrainingConfig.laptop(lora_rank=100_000), tmp_path / "run")
    run.start()
    with pytest.raises(PolicyError, match="rank"):
        run.wait()
    assert summarise(tmp_path / "run").status == "failed"
    assert children_left() == []


STOPPED_IN = {
    "starting": ("run_start", {}),
    "checking": ("phase", {"name": "checking the training server"}),
    "evaluating": ("evaluation_start", {}),
    "filling": ("rollout_start", {"job": "train-job0"}),
    "training": ("training_start", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", STOPPED_IN)
def test_stop_gives_control_back_in_any_phase_and_ends_everything(phase, tmp_path):
    event, fields = STOPPED_IN[phase]
    config = TrainingConfig.laptop(**LONG)
    before = set(threading.enumerate())
    run = TrainingRun(config, tmp_path / "run", evaluate=phase == "evaluating")
    run.start()
    wait_for(run.folder.path, event, **fields)
    began = time.monotonic()
    run.stop()
    assert run.join(25)  # two on a machine of one's own, and 30 where it waited for its sandboxes
    print(f"stopped while {phase} in {time.monotonic() - began:.2f} s")
    run.wait()
    assert run.closed(90)
    assert summarise(run.folder.path).status == "stopped"
    assert children_left() == []
    ours = ("train-job", "training-run", "evaluation", "policy-call", "server-watch", "local-server-watch")
    # A session that is begun just then and long after, on a very busy machine, keeps the SDK's thread for its patience.
    deadline = time.monotonic() + 600
    while left := [t.name for t in set(threading.enumerate()) - before if t.name.startswith(ours)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.slow
def test_hours_that_are_over_before_training_end_the_run(tmp_path):
    run = TrainingRun(TrainingConfig.laptop(hours=1 / 3600), tmp_path / "run").start()
    with pytest.raises(RunError, match="over before its training could begin"):
        run.wait()
    assert run.closed(90) and children_left() == []


@pytest.mark.slow
def test_case_45_an_interrupt_of_wait_stops_the_run(tmp_path):
    # jupyter/help#318, for a script: tests/test_leaks.py does it in a kernel
    run = TrainingRun(TrainingConfig.laptop(**LONG), tmp_path / "run").start()
    wait_for(run.folder.path, "tool")
    waits, wait = threading.Event(), run._done.wait

    def waiting(timeout: float | None = None) -> bool:
        waits.set()
        return wait(timeout)

    run._done.wait = waiting  # type: ignore[method-assign]
    interrupter = threading.Thread(target=lambda: waits.wait(60) and os.kill(os.getpid(), signal.SIGINT))
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        run.wait()
    interrupter.join()
    assert run.join(60) and run.closed(90) and children_left() == []
    assert summarise(run.folder.path).status == "stopped"


@pytest.mark.slow
def test_pause_lets_attempts_end_and_starts_none(tmp_path):
    run = TrainingRun(TrainingConfig.laptop(**LONG), tmp_path / "run")
    run.start()
    wait_for(run.folder.path, "episode")
    run.pause()

    def count() -> tuple[int, int]:
        """How many attempts have begun, and how many of them are in flight."""
        names = [e["event"] for e in events(run.folder.path, "rollout_start", "episode")]
        return names.count("rollout_start"), names.count("rollout_start") - names.count("episode")

    def wait_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, count()
            time.sleep(0.2)

    wait_until(lambda: count()[1] == 0)
    begun, _ = count()
    time.sleep(1.5)
    assert count() == (begun, 0) and run.running
    run.resume()
    wait_until(lambda: count()[0] > begun)
    run.stop()
    run.wait()
    assert run.closed(90)


class NoRoom:
    """Sandboxes of which none can be opened."""

    name = "local"

    def open(self, task):
        raise SandboxError("no room at the service")

    def missing(self, tasks):
        return {}

    def close(self):
        self.closed = True


def lacking(name: str) -> NoRoom:
    """A backend without one of its methods."""
    sandboxes = NoRoom()
    setattr(sandboxes, name, None)
    return sandboxes


def closed_backend() -> LocalBackend:
    sandboxes = LocalBackend()
    sandboxes.close()
    return sandboxes


@pytest.mark.parametrize(
    "part, given, told",
    [
        ("reward", lambda: 0.5, "reward=0.5 is no function: it is called with the task, the attempt"),
        ("reward", lambda: "half", "reward='half' is no function"),
        ("reward", lambda: lambda task, rollout: 1, "the reward <lambda> must take three arguments"),
        ("reward", lambda: lambda task, rollout, verdict, more: 1, "must take three arguments.*'more'"),
        ("reward", lambda: lambda *, task, rollout, verdict: 1, "must take three arguments"),
        ("sandboxes", lambda: "local", r"sandboxes='local' is a text.*sandbox='local'"),
        ("sandboxes", lambda: NoRoom, r"sandboxes=NoRoom is a class: give an object of it, NoRoom\("),
        ("sandboxes", lambda: object(), "sandboxes=object has no method open, missing, close"),
        *(
            ("sandboxes", partial(lacking, n), f"NoRoom has no method {n}:")
            for n in ("open", "missing", "close")
        ),
        ("sandboxes", closed_backend, "sandboxes=LocalBackend: the backend is closed: make a new one"),
    ],
)
def test_a_part_that_a_run_cannot_use_is_refused_before_anything_starts(part, given, told, tmp_path):
    with pytest.raises(RunError, match=told):
        TrainingRun(TrainingConfig.laptop(), tmp_path / "run", **{part: given()})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("reward", [partial(min, 0.5), lambda *of: 1, lambda a, b, c, d=2: 1, max])
def test_a_reward_that_can_be_called_with_three_arguments_is_taken(reward, tmp_path):
    TrainingRun(TrainingConfig.laptop(), tmp_path / "run", reward=reward)


def test_what_ends_sandboxes_is_told_of_those_that_it_can_end():
    sandboxes = LocalBackend()
    assert "sandboxes reap" in how_to_end(sandboxes)
    sandboxes.close()
    assert how_to_end(NoRoom()) == how_to_end(Explicit()) == how_to_end(None) == ""


class Explicit(NoRoom, SandboxBackend):
    """An own backend that names the protocol."""


@dataclass(slots=True)
class Own:
    """Sandboxes as a user would write them: no hash, no weak references, nothing that tells that it is closed."""

    inner: LocalBackend
    name: str = "own"

    def open(self, task):
        return self.inner.open(task)

    def missing(self, tasks):
        return self.inner.missing(tasks)

    def close(self):
        self.inner.close()


@pytest.mark.slow
def test_a_run_trains_in_own_sandboxes_without_a_wrong_task_and_closes_them(tmp_path, monkeypatch):
    monkeypatch.setenv("SWEGYM_TUTORIAL_CACHE", str(tmp_path / "cache"))
    config = TrainingConfig.laptop(**{**SMALL, "steps": 1, "groups_per_batch": 2, "max_groups_per_batch": 2})
    tasks = load_tasks()[:3]
    wrong = replace(tasks[0], instance_id="me__wrong-1", base_commit="deadbeef")
    own = Own(LocalBackend())
    TrainingRun(config, tmp_path / "first", tasks=[*tasks, wrong], sandboxes=own).start().wait()
    (step,) = events(tmp_path / "first", "step_done")
    assert step["attempts"] and step["lost"] == 0
    (left_out,) = events(tmp_path / "first", "tasks_left_out")
    assert "not base_commit deadbeef" in left_out["tasks"].pop(wrong.instance_id) and not left_out["tasks"]
    again = TrainingRun(config, tmp_path / "again", tasks=tasks, sandboxes=own).start()
    with pytest.raises(BackendClosed, match="a run closes the one that it is given"):
        again.wait()
    assert not events(tmp_path / "again", "attempt_fault")


@pytest.mark.slow
def test_case_37_a_run_whose_sandboxes_all_fail_ends_and_names_the_cause(tmp_path):
    # open-instruct#1887: nothing is trained on what infrastructure has done.
    config = TrainingConfig.laptop(**SMALL, attempt_retries=0, fault_minutes=0.01)
    sandboxes = NoRoom()
    run = TrainingRun(config, tmp_path / "run", sandboxes=sandboxes).start()
    with pytest.raises(
        TooManyFaults, match=r"of the last \d+ attempts.*\d+ x SandboxError: no room at the service"
    ):
        run.wait()
    assert sandboxes.closed and not events(run.folder.path, "step_done")


# -- Going on: in each case with the folder of a short run, in the deterministic mode ------------------

EXACT = {
    "groups_per_batch": 2,
    "max_groups_per_batch": 2,
    "group_size": 4,
    "max_staleness": 0,
    "rollout_workers": 1,
    "grading_workers": 1,
    "inflight_groups": 1,
    "tool_timeout": 60.0,  # so that no busy moment of the machine decides what an attempt is told
}


def go_on(folder: Path, steps: int, **options) -> None:
    run = TrainingRun(TrainingConfig.laptop(**EXACT, steps=steps), folder, resume=True, **options)
    run.start()
    run.wait()


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "three"
    run = TrainingRun(TrainingConfig.laptop(**EXACT, steps=3), folder)
    run.start()
    run.wait()
    return folder


@pytest.fixture
def copied(three_steps, tmp_path) -> Path:
    shutil.copytree(three_steps, tmp_path / "copy")
    return tmp_path / "copy"


def told(folder: Path) -> list[tuple]:
    """What each step came to, less the times and the addresses of the server."""
    return [
        (s["step"], s["policy_version"], s["reward_mean"], s["trained_groups"], s["groups"], s["metrics"])
        for s in events(folder, "step_done")
    ]


@pytest.mark.slow
def test_case_24_a_step_that_only_its_checkpoint_tells_of_is_logged_and_not_repeated(three_steps, copied):
    # tinker-cookbook#941: a process that was killed between the checkpoint and the log
    lines = (copied / "events.jsonl").read_text().splitlines(keepends=True)
    last = max(n for n, line in enumerate(lines) if '"event": "step_done"' in line)
    (copied / "events.jsonl").write_text("".join(lines[:last]) + lines[last][:40])
    go_on(copied, steps=4)
    assert told(copied)[:3] == told(three_steps)
    assert [s["step"] for s in events(copied, "step_done")] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_run_can_go_back_to_an_earlier_step_and_comes_to_the_same(three_steps, copied):
    with pytest.raises(RunError, match="no checkpoint of step 7: it has those of steps 3, 2, 1, 0"):
        TrainingRun(TrainingConfig.laptop(**EXACT, steps=3), copied, resume=True, from_step=7)
    go_on(copied, steps=3, from_step=1)
    assert told(copied) == told(three_steps) + told(three_steps)[1:]
    assert [(e["job"], e["step"]) for e in events(copied, "rolled_back")] == [("train-job0", 0)]
    assert len(summarise(copied).steps["train-job0"]) == 3


@pytest.mark.slow
def test_a_runs_updates_can_be_made_again_from_its_folder(three_steps):
    (same,) = replay.replay(three_steps, [], "loop", every=3, attempts=1)
    assert (same.steps, same.norm) == (3, same.norm_told) and same.norm > 0
    assert 0 <= same.resolved <= same.attempts == len(replay.tasks_of("loop")) > 2
    (other,) = replay.replay(three_steps, ["warmup_steps=0"], "loop", every=3, attempts=1)
    assert other.norm_told == same.norm_told != other.norm
    with pytest.raises(SystemExit, match="no held-out task is of a family 'lop'"):
        next(replay.replay(three_steps, [], "lop", every=3, attempts=1))


@pytest.mark.slow
def test_a_resumed_run_measures_the_base_on_the_splits_that_are_left(copied):
    with RunFolder(copied).events.open(
        "a"
    ) as log:  # as a part has written that was killed between two splits
        line = {"time": 1.0, "event": "evaluation", "label": "before", "job": "base", "policy_version": 0}
        for split, attempts in (("held-out", 1), ("held-out-families", 20)):  # of which one is measured now
            counts = {"split": split, "attempts": attempts, "resolved": 0, "lost": 0}
            log.write(json.dumps({**line, **counts}) + "\n")
    config = TrainingConfig.laptop(**EXACT, steps=3, evaluation_tasks=1, evaluation_attempts=1)
    run = TrainingRun(config, copied, resume=True, evaluate=True).start()
    run.wait()
    splits = ["held-out", "held-out-phrasings", "held-out-families"]
    measured = [(e["label"], e["job"], e["split"]) for e in events(copied, "evaluation")]
    assert measured == [
        *(("before", "base", split) for split in ("held-out", "held-out-families", *splits[1:])),
        *(("after", "train-job0", split) for split in splits),
    ]
    assert [(e.label, e.split) for e in run.evaluations] == [(of[0], of[2]) for of in measured[2:]]
    begun = [(e["phase"], e["group"]) for e in events(copied, "rollout_start")]
    evaluated = [each for each in begun if each[0].startswith("evaluation")]
    assert evaluated == [("evaluation-before", n) for n in (1, 2)] + [
        ("evaluation-after", n) for n in (0, 1, 2)
    ]


@pytest.mark.slow
def test_a_checkpoint_that_the_server_lost_is_named_and_the_older_ones_are_offered(copied):
    saved = read_checkpoint(copied / "train-job0-checkpoint.json")
    name = saved["checkpoint"].rpartition("/")[2]
    (lost,) = copied.glob(f"server/*/weights/{name}.safetensors")
    lost.unlink()
    with pytest.raises(
        CheckpointError, match=r"step 3: .*does not exist.*steps 2, 1, 0 too: .*--from-step N"
    ):
        go_on(copied, steps=4)
    go_on(copied, steps=4, from_step=2)
    assert [s["step"] for s in events(copied, "step_done")] == [0, 1, 2, 2, 3]


@pytest.mark.slow
def test_going_back_to_a_checkpoint_that_is_gone_too_costs_nothing(copied):
    saved = read_checkpoint(copied / "train-job0-checkpoint.json")
    name = saved["earlier"][1]["checkpoint"].rpartition("/")[2]
    (lost,) = copied.glob(f"server/*/weights/{name}.safetensors")
    lost.unlink()
    with pytest.raises(CheckpointError, match="does not exist"):
        go_on(copied, steps=4, from_step=1)
    assert read_checkpoint(copied / "train-job0-checkpoint.json") == saved
    go_on(copied, steps=4, from_step=3)
    assert [s["step"] for s in events(copied, "step_done")] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_run_goes_on_with_the_tasks_it_began_with(tmp_path):
    folder, tasks = tmp_path / "run", load_tasks()[:3]
    TrainingRun(TrainingConfig.laptop(**EXACT, steps=1), folder, tasks=tasks).start().wait()
    go_on(folder, steps=2)  # all bundled tasks are there: the three are taken
    assert {g["instance_id"] for g in events(folder, "group")} <= {task.instance_id for task in tasks}
    other = [*tasks[:2], replace(tasks[2], problem_statement="Another issue.")]
    for given, why in ((other, "has changed since"), (tasks[:2], "is not among them now")):
        with pytest.raises(RunError, match=f"{tasks[2].instance_id} {why}"):
            TrainingRun(TrainingConfig.laptop(**EXACT, steps=3), folder, tasks=given, resume=True)


@pytest.mark.slow
def test_a_task_that_cannot_be_opened_any_more_shifts_no_other(tmp_path):
    class Lacking(LocalBackend):
        """Local sandboxes that lack a task."""

        lacks: str = ""

        def missing(self, tasks):
            return {task.instance_id: "no image" for task in tasks if task.instance_id == self.lacks}

    folder, tasks = tmp_path / "run", load_tasks()[:4]
    settings = {**EXACT, "max_groups_per_batch": None, "groups_per_batch": 1}
    TrainingRun(TrainingConfig.laptop(**settings, steps=1), folder, tasks=tasks).start().wait()
    sandboxes = Lacking()
    done = {g["group"] for g in events(folder, "group", "group_failed")}
    sandboxes.lacks = task_at(tasks, 0, 0, max(done) + 1).instance_id
    config = TrainingConfig.laptop(**settings, steps=3)
    TrainingRun(config, folder, tasks=tasks, resume=True, sandboxes=sandboxes).start().wait()
    for group in events(folder, "group", "group_failed"):
        assert group["instance_id"] == task_at(tasks, 0, 0, group["group"]).instance_id
    (failed,) = {g["instance_id"] for g in events(folder, "group_failed")}
    assert failed == sandboxes.lacks


class SlowToClose(NoRoom):
    """Sandboxes whose end takes long, and fails."""

    def __init__(self) -> None:
        self.closing, self.over = threading.Event(), threading.Event()

    def close(self):
        self.closing.set()
        self.over.wait(120)
        raise SandboxError("the service does not answer")


@pytest.mark.slow
def test_a_stop_while_sandboxes_are_closed_is_quick_and_what_is_left_is_told(tmp_path, caplog):
    config = TrainingConfig.laptop(**SMALL, attempt_retries=0, fault_minutes=0.01)
    sandboxes = SlowToClose()
    run = TrainingRun(config, tmp_path / "run", sandboxes=sandboxes).start()
    assert sandboxes.closing.wait(120)
    began = time.monotonic()
    run.stop()
    with pytest.raises(TooManyFaults):
        run.wait()
    assert time.monotonic() - began < 25 and not run.closed(0)  # without the stop it would take 30
    sandboxes.over.set()
    assert run.closed(60) and run.left == "not all sandboxes could be ended: the service does not answer"
    assert (
        run.left in caplog.text and "sandboxes reap" not in caplog.text
    )  # own ones, of which it knows nothing


def test_waiting_for_a_run_that_was_not_started_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="call start"):
        TrainingRun(TrainingConfig.laptop(), tmp_path / "run").wait()


@pytest.mark.slow
def test_a_script_that_ends_without_waiting_ends_its_run(tmp_path):
    script = (
        "import sys, time; from swegym_tutorial import TrainingConfig, TrainingRun; "
        "TrainingRun(TrainingConfig.laptop(), sys.argv[1]).start(); time.sleep(4)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run")], env=env, timeout=300, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert summarise(tmp_path / "run").status == "stopped"


def test_what_an_ending_interpreter_refuses_is_no_failure_of_the_run(tmp_path, monkeypatch):
    """It starts no threads and ends no imports that would register for its end: a run that was starting hears that."""
    run = TrainingRun(TrainingConfig.laptop(), tmp_path / "run")

    def refused(closing):
        assert run._stop.wait(10)
        raise RuntimeError("can't register atexit after shutdown")

    monkeypatch.setattr(run, "_run", refused)
    run.start()
    run._at_exit()
    assert run.error is None and summarise(tmp_path / "run").status == "stopped"


@pytest.mark.slow
def test_other_settings_are_taken_over_and_told(copied):
    config = TrainingConfig.laptop(**{**EXACT, "group_size": 4}, steps=4, learning_rate=5e-4)
    TrainingRun(config, copied, resume=True).start().wait()
    (told,) = events(copied, "settings_changed")
    assert told["changed"] == {
        "steps": [3, 4],
        "learning_rate": [TrainingConfig.laptop().learning_rate, 5e-4],
    }
    assert saved_config(copied).learning_rate == 5e-4
    assert events(copied, "step_done")[-1]["metrics"]["learning_rate"] == config.learning_rate_at(3) < 5e-4


@pytest.mark.slow
def test_one_client_that_cannot_go_on_leaves_the_other_alone(tmp_path):
    folder = tmp_path / "two"
    settings = {**SMALL, "clients": 2, "steps": 1}
    TrainingRun(TrainingConfig.laptop(**settings), folder).start().wait()
    path = folder / "train-job1-checkpoint.json"
    path.write_text(path.read_text().replace("step00000", "step99999"))
    run = TrainingRun(TrainingConfig.laptop(**{**settings, "steps": 2}), folder, resume=True).start()
    with pytest.raises(ClientsFailed, match=r"1 of 2 clients failed.*train-job1: .*step99999"):
        run.wait()
    assert [s["step"] for s in events(folder, "step_done") if s["job"] == "train-job0"] == [0, 1]
    assert [e["job"] for e in events(folder, "job_failed")] == ["train-job1"]


# -- The command, and what is left of it after it was interrupted or killed -------------------------


def start_command(folder: Path, temp: Path, *arguments: str) -> subprocess.Popen[str]:
    temp.mkdir()
    env = {**os.environ, "TMPDIR": str(temp), "PYTHONPATH": str(ROOT)}
    env.pop("TINKER_BASE_URL", None)
    command = [sys.executable, "-m", "swegym_tutorial.cli", "train", "--output", str(folder), *arguments]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for(folder: Path, event: str, timeout: float = 300, **fields: str) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if any(all(e.get(k) == v for k, v in fields.items()) for e in events(folder, event)):
            return
        time.sleep(0.05)
    raise AssertionError(f"no {event} {fields} in {timeout} s")


def gone_within(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [p for p in alive if not is_zombie(p)]


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def is_watchdog(process: psutil.Process) -> bool:
    """Whether it is the child that deletes the sandboxes' folder, which may take longer."""
    return any("watchdog" in word for word in cmdline(process))


def sandbox_folders(temp: Path) -> list[Path]:
    return [path for path in temp.iterdir() if path.name.startswith("swegym-")]


def sandbox_folders_left(temp: Path) -> list[Path]:
    """Those that are there after the patience of a watchdog."""
    deadline = time.monotonic() + GONE
    while (left := sandbox_folders(temp)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


GONE = 60.0  # seconds in which all that a command started must be gone; five on a machine of one's own
PHASES = {
    "while the server starts": ("phase", {"name": "starting the training server and the sandboxes"}),
    "while evaluating": ("evaluation_start", {}),
    "in the first batch": ("rollout_start", {"job": "train-job0"}),
    "after a step": ("step_done", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_in_any_phase_leaves_nothing(phase, tmp_path):
    event, fields = PHASES[phase]
    arguments = ["--evaluate", "--set", "evaluation_attempts=1"] if "evaluating" in phase else []
    process = start_command(tmp_path / "run", tmp_path / "tmp", *arguments)
    wait_for(tmp_path / "run", event, **fields)
    time.sleep(0.3)
    processes = family(process.pid)
    process.send_signal(signal.SIGINT)
    left = gone_within([p for p in processes if not is_watchdog(p)], GONE)
    _, errors = process.communicate(timeout=GONE)
    assert process.returncode == 130 and "stopped" in errors and "Traceback" not in errors
    assert left == [] and gone_within(processes, GONE) == []
    assert sandbox_folders_left(tmp_path / "tmp") == []
    assert events(tmp_path / "run", "run_stopped")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C twice"])
def test_other_ways_to_end_the_command_leave_nothing(how, tmp_path):
    process = start_command(tmp_path / "run", tmp_path / "tmp")
    wait_for(tmp_path / "run", "tool")
    processes = family(process.pid)
    if how == "SIGTERM":
        process.terminate()
    else:
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=GONE)
    assert process.returncode == 130 and "Traceback" not in errors
    assert gone_within(processes, GONE) == []
    assert sandbox_folders_left(tmp_path / "tmp") == []


@pytest.mark.slow
def test_kill_9_of_the_driver_leaves_nothing(tmp_path):
    process = start_command(tmp_path / "run", tmp_path / "tmp")
    wait_for(tmp_path / "run", "tool")
    processes = family(process.pid)
    assert sandbox_folders(tmp_path / "tmp")
    assert "its process is gone" not in run_cli("show", str(tmp_path / "run")).stdout
    process.kill()
    process.communicate(timeout=GONE)
    shown = run_cli("show", str(tmp_path / "run")).stdout
    assert (
        f"its process is gone; go on with: swegym-tutorial train --resume --output {tmp_path / 'run'}"
        in shown
    )
    assert gone_within([p for p in processes if not is_watchdog(p)], GONE) == []
    assert sandbox_folders_left(tmp_path / "tmp") == []
    assert gone_within(processes, GONE) == []


@pytest.mark.slow
def test_the_command_prints_a_line_a_step_where_there_is_no_terminal(tmp_path):
    temp = tmp_path / "tmp"
    arguments = ["--steps", "1", "--groups-per-batch", "2", "--seed", "5"]
    process = start_command(tmp_path / "run", temp, *arguments)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert (
        "train-job0 step 1: mean reward" in output and "tinker://" in output and "reward_time.png" in output
    )
    assert "\x1b[" not in output
    shown = subprocess.run(
        [sys.executable, "-m", "swegym_tutorial.cli", "show", str(tmp_path / "run")],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert shown.returncode == 0 and "train-job0" in shown.stdout and "done" in shown.stdout


def run_cli(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as cwd:
        return subprocess.run(
            [sys.executable, "-m", "swegym_tutorial.cli", *arguments],
            capture_output=True,
            text=True,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        )


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["train", "--steps", "0"], "must be positive"),
        (["train", "--hours", "-1"], "must be positive"),
        (["train", "--set", "nonsense=1"], "names none of"),
        (["train", "--set", "learning_rte=1"], "'learning_rte': did you mean learning_rate?"),
        (["train", "--set", "steps"], "FIELD=VALUE is wanted, as in steps=10, not 'steps'"),
        (["train", "--preset", "laptop", "--set", "clip_low=2"], "clip_low"),
        (["train", "--preset", "cloud"], "invalid choice"),
        (["train", "--resume"], "--output"),
        (["train", "--hours", "nan"], "hours"),
        (["train", "--preset", "laptop", "--set", "sandbox=vmware"], "vmware"),
        (["train", "--preset", "laptop", "--base-model", "missing"], "no model folder"),
        (["serve", "--port", "99999"], "65535"),
        (["train", "--preset", "laptop", "--output", os.devnull], f"and {os.devnull} is none"),
        (["show", "."], "no run folder"),
        (["evaluate"], "--base"),
        (["evaluate", "--base", "some"], "only one is measured at a time"),
        (["evaluate", "some"], "there is no run in some: it has no config.json"),
        (["serve", "--model", "."], "no model folder"),
        ([], "COMMAND"),
    ],
)
def test_usage_errors_exit_2_with_one_clear_message(arguments, told):
    done = run_cli(*arguments)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr


PINNED = TrainingConfig.spindle().tokenizer_revision


@pytest.mark.parametrize(
    "arguments, tokenizer, revision",
    [
        ([], "Qwen/Qwen3.5-9B", PINNED),
        (["--base-model", "qwen35-9b-lora-128k"], "Qwen/Qwen3.5-9B", PINNED),
        (["--base-model", "other"], None, None),
        (["--set", "base_model=other"], None, None),
        (["--base-model", "other", "--tokenizer", "org/other"], "org/other", None),
        (["--base-model", "other", "--tokenizer", "Qwen/Qwen3.5-9B"], "Qwen/Qwen3.5-9B", PINNED),
        (["--tokenizer", "org/other"], "org/other", None),
        (["--set", "tokenizer=org/other", "--set", "tokenizer_revision=main"], "org/other", "main"),
    ],
)
def test_another_model_brings_its_own_tokenizer(arguments, tokenizer, revision):
    parser = make_parser()
    config = cli._config(parser.parse_args(["train", "--preset", "spindle", *arguments]), parser)
    assert (config.tokenizer, config.tokenizer_revision) == (tokenizer, revision)


def test_what_a_user_can_mend_exits_1_without_a_traceback():
    done = run_cli("train", "--preset", "laptop", "--tasks", "missing.jsonl")
    assert done.returncode == 1 and "missing.jsonl" in done.stderr and "Traceback" not in done.stderr
    done = run_cli("tasks", "show", "nobody__nothing-1")
    assert done.returncode == 1 and "nobody__nothing-1" in done.stderr and "Traceback" not in done.stderr


def test_tasks_are_listed_and_shown():
    listed = run_cli("tasks", "list")
    assert listed.returncode == 0 and len(listed.stdout.splitlines()) == 120
    name = listed.stdout.split()[1]
    shown = run_cli("tasks", "show", name)
    assert all(word in shown.stdout for word in (name, "Issue", "Gold patch", "FAIL_TO_PASS", "pytest"))


def test_output_that_nobody_reads_to_its_end_is_no_error():
    command = f"{sys.executable} -m swegym_tutorial.cli tasks list | head -n 1"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env)
    assert done.stdout.startswith("train  ") and done.stderr == ""


def test_a_large_held_out_split_is_sampled_by_the_seed():
    config = replace(TrainingConfig.laptop(), evaluation_tasks=5)
    chosen, names = held_out_tasks(config), [task.instance_id for task in load_tasks(split="held-out")]
    assert len(chosen) == 5 and chosen == held_out_tasks(config)
    assert [names.index(task.instance_id) for task in chosen] == sorted(
        names.index(t.instance_id) for t in chosen
    )
    assert chosen != held_out_tasks(replace(config, seed=1))
    assert len(held_out_tasks(TrainingConfig.laptop())) == len(names)
