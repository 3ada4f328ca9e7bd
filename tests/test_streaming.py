"""Minibatches that are trained on while their batch still fills: the job and the real policy client, a server that notes."""

from __future__ import annotations

import json
import math
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from swegym_tutorial import TrainingConfig, load_tasks
from swegym_tutorial.batches import NoLearningSignal
from swegym_tutorial.calls import PolicyError
from swegym_tutorial.events import EventReader, RunFolder
from swegym_tutorial.grading import Episode, Outcome, Verdict
from swegym_tutorial.halt import Halt, Stopped
from swegym_tutorial.job import TrainingJob
from swegym_tutorial.minibatch import split_evenly
from swegym_tutorial.policy import PolicyClient
from swegym_tutorial.rollout import Ending, RecordingLost, Rollout
from swegym_tutorial.watch import Watch

CONFIG = TrainingConfig.laptop(
    steps=2, groups_per_batch=5, max_groups_per_batch=None, minibatch_groups=2, rollout_workers=4
)
SIZES = [len(places) for places in split_evenly(range(5), 2)]


class Attempts:
    """Attempts whose tokens name their group. `solved` and `seconds` are asked of its number."""

    paused = False

    def __init__(self, solved: Any = lambda group: 4, seconds: Any = lambda group: 0.005) -> None:
        self.solved, self.seconds = solved, seconds

    def rollout(self, task: Any, sampler: Any, identity: Any, halt: Any) -> Rollout:
        time.sleep(self.seconds(identity.group))
        mask = np.array([False, True, True])
        tokens = np.array([1, 2, identity.group], np.int32)
        logprobs = -mask.astype(np.float32)
        return Rollout(task.instance_id, tokens, mask, logprobs, (), Ending.FINAL, b"x", 0.1)

    def grade(self, task: Any, rollout: Rollout, identity: Any, halt: Any) -> Episode:
        solved = identity.attempt < self.solved(identity.group)
        return Episode(rollout, Verdict(Outcome.RESOLVED if solved else Outcome.UNRESOLVED, seconds=0.01))


class Server:
    """What a PolicyClient takes for its service: notes each call; `fails` says what answer comes instead."""

    def __init__(self, config: TrainingConfig, fails: Any = lambda number, call: None) -> None:
        self.config, self.fails = config, fails
        self.calls: list[tuple[str, Any]] = []
        self.sessions = self.closed = self.minibatches_done = 0
        self.log: list[dict[str, Any]] = []
        self.ails: str | None = None
        self.watch = Watch(self.tell, lambda: self.ails, slow=0.2, look_every=0.05, ask_every=0.0)

    def tell(self, event: str, **fields: Any) -> None:
        self.log.append({"event": event, **fields})

    def recovered(self, job: int, checkpoint: str | None, reason: str, seconds: float) -> None:
        self.tell("recovered", checkpoint=checkpoint, reason=reason)

    def minibatch_done(self, job: int, step: int, submitted: float) -> None:
        self.minibatches_done += 1

    def session(self) -> Any:
        self.sessions += 1
        return SimpleNamespace(adapter=lambda job, halt: self, close=self._close)

    def _close(self) -> None:
        self.closed += 1

    def sampler(self, path: str, halt: Any = None) -> Any:
        return SimpleNamespace(path=path)

    def _answer(self, call: str, what: Any, **answer: Any) -> Future[Any]:
        self.calls.append((call, what))
        future: Future[Any] = Future()
        error = self.fails(sum(name == call for name, _ in self.calls), call)
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(SimpleNamespace(**answer))
        return future

    def forward_backward(self, data: Any, loss: str, loss_fn_config: Any = None) -> Future[Any]:
        groups = [int(each.loss_fn_inputs["target_tokens"].to_numpy()[-1]) for each in data]
        return self._answer("forward_backward", list(dict.fromkeys(groups)), metrics={})

    def optim_step(self, adam: Any) -> Future[Any]:
        return self._answer("optim_step", None, metrics={})

    def save_state(self, name: str) -> Future[Any]:
        return self._answer("save", name, path=f"tinker://m/weights/{name}")

    def save_weights_for_sampler(self, name: str) -> Future[Any]:
        return self._answer("publish", name, path=f"tinker://m/sampler_weights/{name}")

    def load_state_with_optimizer(self, path: str) -> Future[Any]:
        return self._answer("load", path)

    def trained(self) -> list[list[int]]:
        """Return the groups of each minibatch, in order."""
        return [groups for call, groups in self.calls if call == "forward_backward"]


@pytest.fixture
def begin(tmp_path):
    """Make a job with its server; each that is made is ended."""
    made = []

    def make(config=CONFIG, attempts=None, fails=lambda number, call: None):
        folder, stop = RunFolder(tmp_path), Halt()
        folder.open()
        server = Server(config, fails)
        client = PolicyClient(server, 0, stop)
        job = TrainingJob(0, config, load_tasks(), server, client, attempts or Attempts(), folder, stop)
        made.append(SimpleNamespace(job=job, server=server, folder=folder, stop=stop))
        return made[-1]

    yield make
    for each in made:
        each.stop.set()
        each.server.watch.close()
        assert each.job.join(60)
        each.folder.close()


def run(setup, seconds=60.0):
    return setup.job.run("phase", time.time() + seconds)


def events(setup, *names):
    return [e for e in EventReader(setup.folder.path).read() if e["event"] in names]


def nothing_was_made_of_the_batch(setup):
    """The checkpoint is the start's, and nothing else was saved or published; the adapter is gone."""
    calls = [call for call, _ in setup.server.calls]
    assert "forward_backward" in calls
    assert [name for call, name in setup.server.calls if call in ("save", "publish")] == [
        "phase-train-job0-start"
    ] * 2
    assert calls.index("forward_backward") > calls.index("publish")
    assert json.loads(setup.folder.checkpoint(0).read_text())["step"] == -1
    assert setup.server.sessions == setup.server.closed == 1
    assert events(setup, "step_done") == [] == setup.server.log


def test_minibatches_are_those_of_the_whole_batch_in_its_order(begin):
    setup = begin(attempts=Attempts(solved=lambda group: 4 if group % 3 else 0))
    run(setup)
    steps, trained = events(setup, "step_done"), setup.server.trained()
    assert [len(groups) for groups in trained] == 2 * SIZES
    assert setup.server.minibatches_done == len(trained), "each is told of"
    for step, n in zip(steps, (0, 3), strict=True):
        assert [*chain(*trained[n : n + 3])] == step["trained_groups"]
    kept = [event["group"] for event in events(setup, "group") if event["fate"] == "kept"]
    assert kept == [*chain(*trained)]


def test_a_minibatch_goes_out_before_the_batch_is_full_and_the_log_tells_when_it_was(begin):
    done = threading.Event()
    setup = begin(replace(CONFIG, steps=1), Attempts(seconds=lambda group: 0 if group < 3 else done.wait(30)))
    thread = threading.Thread(target=run, args=(setup,))
    thread.start()
    wait_until(lambda: len(setup.server.trained()) >= 2)
    assert [len(groups) for groups in setup.server.trained()] == SIZES[:2]
    assert events(setup, "training_start") == []
    time.sleep(0.3)
    done.set()
    thread.join(60)
    (step,) = events(setup, "step_done")
    assert [event["groups"] for event in events(setup, "training_start")] == [step["trained_groups"]]
    parts = [step[f"{part}_seconds"] for part in ("fill", "train", "publish")]
    assert sum(parts) == pytest.approx(step["batch_seconds"], abs=0.003) and min(parts) >= 0
    assert step["trainer_seconds"] > step["train_seconds"] and step["fill_seconds"] >= 0.3


@pytest.mark.parametrize("change", [{"max_groups_per_batch": 5}, {"max_staleness": 0}])
def test_with_a_limit_or_without_staleness_a_batch_is_full_before_it_is_trained_on(begin, change):
    order = []

    def noting(number, call):
        if call == "forward_backward":
            order.append(len(events(setup, "training_start")))

    setup = begin(replace(CONFIG, **change), fails=noting)
    run(setup)
    assert order == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_try_that_fails_in_mid_batch_is_made_again_with_all_its_groups(begin, at):
    lost = {("forward_backward", 3 + at): ConnectionError("the line is cut")}  # of the second batch
    setup = begin(attempts=Attempts(), fails=lambda number, call: lost.get((call, number)))
    run(setup)
    steps, trained = events(setup, "step_done"), setup.server.trained()
    assert [step["step"] for step in steps] == [0, 1]
    assert trained[-3] == trained[3] and [*chain(*trained[-3:])] == steps[1]["trained_groups"]
    loaded = [path for call, path in setup.server.calls if call == "load"]
    assert loaded == [steps[0]["checkpoint"]] and setup.server.sessions == 2
    assert len(events(setup, "training_start")) == 2
    groups = [event["group"] for event in events(setup, "group")]
    assert len(groups) == len(set(groups))
    (recovered,) = [event for event in setup.server.log if event["event"] == "recovered"]
    assert "the line is cut" in recovered["reason"]


def test_a_stop_in_mid_batch_saves_and_publishes_nothing(begin):
    setup = begin(attempts=Attempts(seconds=lambda group: 0 if group < 3 else 0 * setup.stop.wait(60)))
    threading.Thread(target=stop_when_trained, args=(setup,)).start()
    with pytest.raises(Stopped):
        run(setup)
    nothing_was_made_of_the_batch(setup)


def stop_when_trained(setup):
    wait_until(setup.server.trained)
    setup.stop.set()


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_end_of_the_hours_in_mid_batch_saves_and_publishes_nothing(begin, monkeypatch):
    def now():
        return 200.0 if setup.server.trained() else 100.0

    setup = begin(attempts=Attempts(seconds=lambda group: 0 if group < 3 else 0 * setup.stop.wait(60)))
    monkeypatch.setattr("swegym_tutorial.job.time", SimpleNamespace(time=now, monotonic=time.monotonic))
    assert setup.job.run("phase", 150.0).path == "tinker://m/sampler_weights/phase-train-job0-start"
    nothing_was_made_of_the_batch(setup)
    assert [event["step"] for event in events(setup, "out_of_time")] == [0]


def test_case_33_a_missing_signal_in_mid_batch_ends_the_run_as_ever(begin):
    # DAPO#22, #28
    fruitless = Attempts(solved=lambda group: 4 if group < 3 else 0)
    setup = begin(replace(CONFIG, max_fruitless_groups=6), fruitless)
    with pytest.raises(NoLearningSignal, match="6 groups in a row"):
        run(setup)
    nothing_was_made_of_the_batch(setup)


@pytest.mark.parametrize("error", [KeyError("a fault of ours"), PolicyError("not the trainer's")])
def test_a_workers_error_in_mid_batch_is_raised_as_it_is_and_training_not_tried_again(begin, error):
    def solved(group):
        if group == 4:
            wait_until(setup.server.trained)
            raise error
        return 4

    setup = begin(attempts=Attempts(solved=solved))
    with pytest.raises(type(error)) as caught:
        run(setup)
    assert caught.value is error
    nothing_was_made_of_the_batch(setup)


def test_filling_is_not_told_as_waiting_for_the_server(begin):
    done = threading.Event()
    setup = begin(
        replace(CONFIG, steps=1), Attempts(seconds=lambda group: 0 if group < 3 else 0 * done.wait(60))
    )
    calls = setup.server.watch._calls
    thread = threading.Thread(target=run, args=(setup,))
    thread.start()
    wait_until(setup.server.trained)
    wait_until(lambda: calls and all(call.since == math.inf for call in list(calls.values())))
    setup.server.ails = "it is asked though nobody waits for it"
    time.sleep(0.8)  # four times what is slow
    setup.server.ails = None
    done.set()
    thread.join(60)
    assert setup.server.log == [] and len(events(setup, "step_done")) == 1


class OnDisk(Attempts):
    """Attempts that are read back, where `lost` does not say of their group that they cannot be."""

    def __init__(self, lost: Any) -> None:
        super().__init__()
        self.lost = lost

    def rollout(self, task: Any, sampler: Any, identity: Any, halt: Any) -> Rollout:
        made = super().rollout(task, sampler, identity, halt)

        def read() -> Rollout:
            if self.lost(identity.group):
                raise RecordingLost("a disk fault", {"job": identity.job, "group": identity.group})
            return made

        return replace(made.bare(), read=read)


@pytest.mark.parametrize("change", [{}, {"max_staleness": 0}])
@pytest.mark.parametrize("lost", [lambda group: group in (0, 1, 2), lambda group: True])
def test_what_cannot_be_read_back_is_not_trained_on_and_an_empty_minibatch_not_sent(begin, lost, change):
    setup = begin(replace(CONFIG, **change), OnDisk(lost))
    run(setup)
    steps, trained = events(setup, "step_done"), setup.server.trained()
    assert [step["step"] for step in steps] == [0, 1]
    groups = [event["group"] for event in events(setup, "group")]
    assert [*chain(*(step["trained_groups"] for step in steps))] == [n for n in groups if not lost(n)]
    assert [*chain(*trained)] == [n for n in groups if not lost(n)] and [] not in trained
    updates = [call for call, _ in setup.server.calls if call == "optim_step"]
    assert sum(step["minibatches"] for step in steps) == len(trained) == len(updates)
    for step in steps:
        assert step["groups"]["kept"] == len(step["trained_groups"]) and sum(step["groups"].values()) == 5
        assert step["lost"] == 8 * step["groups"]["failed"] == 40 - step["attempts"]
        assert step["reward_mean"] == step["reward_mean_kept"] == (0.5 if step["attempts"] else 0.0)
    assert len([call for call, _ in setup.server.calls if call == "publish"]) == 3
