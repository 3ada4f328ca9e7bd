"""The loop's rules, with attempts and a server that answer at once: what is trained on, when, and under which policy."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

from swegym_tutorial import TrainingConfig, load_tasks
from swegym_tutorial.attempts import Workers
from swegym_tutorial.batches import Batch, NoLearningSignal, References, task_at
from swegym_tutorial.calls import PolicyError
from swegym_tutorial.events import EventReader, RunFolder
from swegym_tutorial.grading import Episode, Outcome, Verdict
from swegym_tutorial.halt import Halt, Stopped
from swegym_tutorial.job import TrainingJob
from swegym_tutorial.minibatch import Fate, Group
from swegym_tutorial.policy import Update
from swegym_tutorial.rollout import Ending, RecordingLost, Rollout
from swegym_tutorial.sampler import PolicySampler
from swegym_tutorial.session import Line
from swegym_tutorial.watch import Watch


class Attempts:
    """Attempts that take `seconds` and are solved with a task's own probability."""

    def __init__(
        self, rate=lambda task: 0.5, seconds=lambda task: 0.001, lost=lambda identity: False
    ) -> None:
        self.rate, self.seconds, self.lost = rate, seconds, lost
        self.samplers: dict[int, set[str]] = {}
        self.lock = threading.Lock()
        self.paused = False

    def rollout(self, task, sampler, identity, halt):
        with self.lock:
            self.samplers.setdefault(identity.group, set()).add(sampler.path)
        time.sleep(self.seconds(task))
        if self.lost(identity):
            return None
        mask = np.array([False, True, True])
        return Rollout(
            task.instance_id,
            np.array([1, 2, 3], np.int32),
            mask,
            -mask.astype(np.float32),
            (),
            Ending.FINAL,
            b"x",
            0.1,
        )

    def grade(self, task, rollout, identity, halt):
        solved = random.Random(f"{identity.group} {identity.attempt}").random() < self.rate(task)
        return Episode(rollout, Verdict(Outcome.RESOLVED if solved else Outcome.UNRESOLVED, seconds=0.01))


class Client:
    """A trainer that remembers what it was sent."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.batches: list[list[int]] = []  # of each step, the data of its minibatches
        self.loaded: list[str] = []

    def restore(self, checkpoint):
        self.loaded.append(checkpoint)

    def publish(self, name):
        return Update(f"tinker://m/weights/{name}", f"tinker://m/sampler_weights/{name}", 0, {}, 0.0, 0.0)

    def update(self, minibatches, step, name):
        self.batches.append([len(data) for data in minibatches()])
        time.sleep(self.seconds)
        return replace(self.publish(name), minibatches=len(self.batches[-1]), train_seconds=self.seconds)


SERVICES: list[Service] = []  # of the present test


class Base:
    """A session whose base model says -2 for each token; `answer` is asked what comes instead, with the call's number."""

    def __init__(self, answer=lambda number: None) -> None:
        self.answer = answer
        self.up = threading.Event()  # until then nothing is sampled from
        self.up.set()
        self.asked: list[list[int]] = []
        self.lock = threading.Lock()

    def sampler(self, path, halt):
        while not self.up.wait(0.01):
            if halt.is_set():
                raise Stopped
        return self

    def compute_logprobs(self, prompt):
        tokens, future = prompt.to_ints(), Future()
        with self.lock:
            self.asked.append(tokens)
            answer = self.answer(len(self.asked) - 1)
        if isinstance(answer, Future):
            return answer
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer or [None, *[-2.0] * (len(tokens) - 1)])
        return future

    def close(self):
        pass


class Service:
    """Names policies by their paths; its reference is the real one, in a session as above."""

    def __init__(self, base):
        self.base, self.base_samplers, self.log = base, 0, []
        self.watch = Watch(
            lambda event, **fields: self.log.append(event), lambda: None, slow=0.2, look_every=0.05
        )
        self.line = Line(lambda: base, self.watch)
        SERVICES.append(self)

    def sampler(self, path, halt=None):
        return SimpleNamespace(path=path)

    def base_sampler(self, halt=None):
        self.base_samplers += 1
        return PolicySampler(self.line, "base", [], 1.0, halt)


@pytest.fixture(autouse=True)
def _close():
    yield
    while SERVICES:
        SERVICES.pop().watch.close()


def job(tmp_path, config, attempts, client=None, *, index=0, base=None):
    folder = RunFolder(tmp_path)
    folder.open()
    stop = Halt()
    client = client or Client()
    service = Service(base or Base())
    made = TrainingJob(index, config, load_tasks(), service, client, attempts, folder, stop)
    return SimpleNamespace(
        job=made, service=service, folder=folder, stop=stop, client=client, attempts=attempts
    )


def events(setup, *names):
    return [e for e in EventReader(setup.folder.path).read() if e["event"] in names]


FAST = TrainingConfig.laptop(steps=6, rollout_workers=4)
SOON = 60.0


def wait_until(condition):
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_each_step_is_one_publication_with_its_checkpoint(tmp_path):
    setup = job(tmp_path, FAST, Attempts())
    last = setup.job.run("phase", time.time() + SOON)
    steps = events(setup, "step_done")
    assert [s["step"] for s in steps] == list(range(6))
    assert [s["policy_version"] for s in steps] == list(range(1, 7))
    assert last.path == "tinker://m/sampler_weights/phase-train-job0-step00005"
    checkpoint = json.loads((tmp_path / "train-job0-checkpoint.json").read_text())
    assert (
        checkpoint["step"] == 5
        and checkpoint["checkpoint"] == "tinker://m/weights/phase-train-job0-step00005"
    )
    assert checkpoint["sampler"] == last.path and checkpoint["policy_version"] == 6


def test_case_25_a_group_never_mixes_versions_and_new_groups_use_the_new_one(tmp_path):
    # tinker-cookbook#535
    setup = job(tmp_path, FAST, Attempts(seconds=lambda task: 0.005))
    setup.job.run("phase", time.time() + SOON)
    assert all(len(paths) == 1 for paths in setup.attempts.samplers.values())
    for group in events(setup, "group"):
        (path,) = setup.attempts.samplers[group["group"]]
        version = 0 if path.endswith("start") else int(path[-5:]) + 1
        assert version == group["policy_version"]
    assert len({g["policy_version"] for g in events(setup, "group")}) > 3


def test_case_34_no_group_older_than_one_publication_is_trained_on(tmp_path):
    # tinker-cookbook#822, marin#8955: one task in ten takes eight times as long.
    slow = lambda task: 0.08 if task.instance_id.endswith("1") else 0.01  # noqa: E731
    config = replace(FAST, steps=12, rollout_workers=16)
    setup = job(tmp_path, config, Attempts(seconds=slow), Client(seconds=0.01))
    setup.job.run("phase", time.time() + SOON)
    version = 0
    fates: Counter[str] = Counter()
    for event in events(setup, "group", "step_done"):
        if event["event"] == "step_done":
            version = event["policy_version"]
            continue
        fates[event["fate"]] += 1
        if event["fate"] == "kept":
            assert version - event["policy_version"] <= 1
    assert fates["stale"] == 0  # a batch waits for what would be too old for the next one
    groups = events(setup, "group")
    kept = [g for g in groups if g["fate"] == "kept"]
    share = [sum(g["instance_id"].endswith("1") for g in some) / len(some) for some in (groups, kept)]
    assert share[0] > 0 and abs(share[1] - share[0]) < 0.05  # slow tasks are trained on like the others


def test_a_batch_holds_the_mixed_groups_of_those_seen(tmp_path):
    solved = {task.instance_id for task in load_tasks()[::2]}
    setup = job(tmp_path, FAST, Attempts(rate=lambda task: 1.0 if task.instance_id in solved else 0.5))
    setup.job.run("phase", time.time() + SOON)
    for step, sizes in zip(events(setup, "step_done"), setup.client.batches, strict=True):
        assert sum(step["groups"].values()) >= 8 and step["groups"]["kept"] >= 1
        assert sum(sizes) == 8 * step["groups"]["kept"] and max(sizes) <= 8 * FAST.minibatch_groups
        assert step["reward_mean"] > step["reward_mean_kept"]


def test_without_a_limit_a_batch_waits_for_all_its_mixed_groups(tmp_path):
    config = replace(FAST, steps=2, groups_per_batch=5, max_groups_per_batch=None, minibatch_groups=2)
    setup = job(tmp_path, config, Attempts(rate=lambda task: 0.1))
    setup.job.run("phase", time.time() + SOON)
    assert [s["groups"]["kept"] for s in events(setup, "step_done")] == [5, 5]
    assert [sorted(sizes) for sizes in setup.client.batches] == [[8, 16, 16]] * 2


def test_the_kl_term_asks_the_reference_and_reaches_the_data(tmp_path):
    seen = []

    class Listening(Client):
        def update(self, minibatches, step, name):
            seen.extend(minibatches())
            return super().update(minibatches, step, name)

    setup = job(tmp_path, replace(FAST, steps=1, kl_coef=0.5), Attempts(), Listening())
    setup.job.run("phase", time.time() + SOON)
    for data in seen:
        weights = np.array([d.loss_fn_inputs["advantages"].to_numpy() for d in data])
        # Advantages cancel out within a group; what is left is the KL term: -0.5 * (-1 + 2) over all tokens.
        np.testing.assert_allclose(weights.sum(), -0.5, rtol=1e-4)
    kept = [e["group"] for e in events(setup, "group") if e["fate"] == "kept"]
    asked = events(setup, "reference")
    assert set(kept) <= {e["group"] for e in asked} and all(e["seconds"] >= 0 for e in asked)


def test_references_are_asked_for_while_the_trainer_trains(tmp_path):
    early = []

    class Patient(Client):
        def update(self, minibatches, step, name):
            done = super().update(minibatches, step, name)
            kept = [e["group"] for e in events(setup, "group") if e["fate"] == "kept"]
            end = time.monotonic() + SOON
            while not early and time.monotonic() < end:
                early.extend({e["group"] for e in events(setup, "reference")} - set(kept))
                time.sleep(0.01)
            return done

    setup = job(tmp_path, replace(FAST, steps=2, kl_coef=0.5), Attempts(), Patient())
    setup.job.run("phase", time.time() + SOON)
    assert early


def test_a_group_without_a_signal_is_not_asked_about(tmp_path):
    config = replace(FAST, steps=2, kl_coef=0.5)
    setup = job(tmp_path, config, Attempts(rate=lambda task: float(task.instance_id.endswith("1")) or 0.3))
    setup.job.run("phase", time.time() + SOON)
    uniform = {e["group"] for e in events(setup, "group") if e["fate"] == "uniform"}
    assert uniform and not uniform & {e["group"] for e in events(setup, "reference")}


def test_case_27_without_a_kl_term_no_reference_is_asked_for(tmp_path):
    # SkyRL: servers without prompt log-probabilities serve all the same.
    setup = job(tmp_path, replace(FAST, steps=1), Attempts())
    setup.job.run("phase", time.time() + SOON)
    assert not setup.service.base_samplers and not events(setup, "reference")


def test_case_33_a_run_that_learns_nothing_stops_and_says_why(tmp_path):
    # DAPO#22, #28
    config = replace(FAST, max_fruitless_groups=12)
    setup = job(tmp_path, config, Attempts(rate=lambda task: 0.0))
    with pytest.raises(NoLearningSignal, match="12 groups in a row") as caught:
        setup.job.run("phase", time.time() + SOON)
    assert "bundled__" in str(caught.value) and "0.00" in str(caught.value)
    assert "validated" not in str(caught.value)


def test_case_33_tasks_that_nobody_has_validated_are_the_first_to_be_doubted(tmp_path):
    # DAPO#22, #28
    setup = job(tmp_path, replace(FAST, max_fruitless_groups=12), Attempts(rate=lambda task: 0.0))
    names = [task.instance_id for task in load_tasks()]
    unknown = ["me__unused-1", *names]
    setup.folder.log("tasks_trusted", not_valid={}, never_validated=unknown, validate="validate them")
    with pytest.raises(NoLearningSignal) as caught:
        setup.job.run("phase", time.time() + SOON)
    count = len({e["instance_id"] for e in events(setup, "group")})
    told = (
        f"{count} of these {count} tasks were never validated: `validate them` finds those that no patch can"
    )
    assert told in str(caught.value)


def test_case_35_a_lost_attempt_costs_itself_and_not_its_group(tmp_path):
    # AReaL#1419; case 37 (rllm#710): what is lost is in no mean.
    setup = job(tmp_path, replace(FAST, steps=2), Attempts(lost=lambda i: i.attempt >= 6))
    setup.job.run("phase", time.time() + SOON)
    for step in events(setup, "step_done"):
        groups = step["groups"]
        assert groups["failed"] == 0 and step["lost"] == 2 * sum(groups.values())
        assert step["attempts"] == 6 * sum(groups.values())


def test_case_35_a_group_under_the_floor_is_dropped_and_counted(tmp_path):
    lost = lambda i: i.group % 2 == 0 and i.attempt > 0  # noqa: E731
    setup = job(tmp_path, replace(FAST, steps=2), Attempts(lost=lost))
    setup.job.run("phase", time.time() + SOON)
    failed = events(setup, "group_failed")
    assert failed and all(g["group"] % 2 == 0 and g["lost"] == 7 for g in failed)
    assert sum(s["groups"]["failed"] for s in events(setup, "step_done")) == len(failed)


def test_an_error_in_a_worker_is_raised_by_the_job(tmp_path):
    class Wrong(Attempts):
        def grade(self, task, rollout, identity, halt):
            raise KeyError("a fault of ours")

    setup = job(tmp_path, FAST, Wrong())
    with pytest.raises(KeyError, match="a fault of ours"):
        setup.job.run("phase", time.time() + SOON)


def test_an_error_of_the_trainer_ends_the_workers(tmp_path):
    class Failing(Client):
        def update(self, minibatches, step, name):
            raise PolicyError("the server is gone")

    before = threading.enumerate()
    setup = job(tmp_path, FAST, Attempts(), Failing())
    with pytest.raises(PolicyError):
        setup.job.run("phase", time.time() + SOON)
    assert setup.job.join(SOON)
    new = set(threading.enumerate()) - set(before)
    assert not [t.name for t in new if t.name.startswith("train-job0")]


def test_stopping_while_a_batch_fills_is_quick(tmp_path):
    begun, ended = threading.Event(), threading.Event()

    def seconds(task):
        begun.set()
        ended.wait(SOON)
        return 0.0

    setup = job(tmp_path, FAST, Attempts(seconds=seconds))
    threading.Thread(target=lambda: begun.wait(SOON) and setup.stop.set()).start()
    try:
        with pytest.raises(Stopped):
            setup.job.run("phase", time.time() + SOON)
        assert not ended.is_set() and events(setup, "step_done") == []  # no attempt was waited for
    finally:
        ended.set()
    assert setup.job.join(SOON)


def test_time_that_is_over_ends_the_job_with_what_it_has(tmp_path, monkeypatch):
    def now():
        return 100.0 if len(setup.client.batches) < 3 else 200.0  # over while the third batch is published

    setup = job(tmp_path, replace(FAST, steps=10_000), Attempts())
    monkeypatch.setattr("swegym_tutorial.job.time", SimpleNamespace(time=now, monotonic=time.monotonic))
    setup.job.run("phase", 150.0)
    done = events(setup, "step_done")
    assert len(done) >= 3 and events(setup, "out_of_time")[0]["step"] == len(done)
    assert setup.job.join(SOON)


def test_pausing_starts_no_more_groups(tmp_path):
    setup = job(tmp_path, replace(FAST, steps=1000), Attempts(seconds=lambda task: 0.002))

    def until_stopped():
        with pytest.raises(Stopped):
            setup.job.run("phase", time.time() + 10 * SOON)

    def begun():
        return len(setup.attempts.samplers)

    thread = threading.Thread(target=until_stopped)
    thread.start()
    wait_until(begun)
    intake = setup.job._intake
    with intake.change:  # the producer starts a group before this, or not at all
        setup.attempts.paused = True
        count = intake.next_group - len(intake.left)
    wait_until(lambda: begun() == count)
    time.sleep(0.5)
    assert begun() == count == intake.next_group - len(intake.left)
    setup.attempts.paused = False
    wait_until(lambda: begun() > count)
    setup.stop.set()
    thread.join(SOON)
    assert not thread.is_alive()


def test_a_resumed_job_goes_on_from_its_checkpoint_and_repeats_no_group(tmp_path):
    first = job(tmp_path, replace(FAST, steps=3), Attempts())
    first.job.run("one", time.time() + SOON)
    first.folder.close()
    checkpoint = json.loads((tmp_path / "train-job0-checkpoint.json").read_text())
    second = job(tmp_path, FAST, Attempts())
    second.job.run("two", time.time() + SOON)
    assert second.client.loaded == [checkpoint["checkpoint"]]
    steps = events(second, "step_done")
    assert [s["step"] for s in steps] == list(range(6))
    assert [s["policy_version"] for s in steps] == list(range(1, 7))
    trained = [g["group"] for g in events(second, "group") if g["fate"] == "kept"]
    assert len(trained) == len(set(trained))
    started = set(second.attempts.samplers)
    assert set(checkpoint["unfinished_groups"]) <= started
    assert all(n in checkpoint["unfinished_groups"] or n >= checkpoint["next_group"] for n in started)


def test_each_pass_over_the_tasks_is_a_shuffle_of_its_own():
    tasks = load_tasks()
    n = len(tasks)
    first, second = ([task_at(tasks, 7, 0, r * n + i).instance_id for i in range(n)] for r in (0, 1))
    assert sorted(first) == sorted(second) == sorted(t.instance_id for t in tasks)
    assert first != second
    assert first == [task_at(tasks, 7, 0, i).instance_id for i in range(n)]
    assert first != [task_at(tasks, 8, 0, i).instance_id for i in range(n)]
    assert first != [task_at(tasks, 7, 1, i).instance_id for i in range(n)]


def test_workers_run_everything_and_end():
    workers = Workers(3, "some-worker")
    done: list[int] = []
    for i in range(50):
        workers.submit(lambda i=i: done.append(i))
    wait_until(lambda: len(done) == 50)
    workers.close()
    assert workers.join(SOON)
    assert sorted(done) == list(range(50))
    assert not [t for t in threading.enumerate() if t.name.startswith("some-worker")]


# -- Attempts on disk, whose recordings may be lost ------------------------------------------------


class OnDisk(Attempts):
    """Attempts that are read back; `reads` is asked with the identity and how often it was read, True: it is lost."""

    def __init__(self, lost_at) -> None:
        super().__init__()
        self.lost_at, self.reads = lost_at, Counter()

    def rollout(self, task, sampler, identity, halt):
        made = super().rollout(task, sampler, identity, halt)
        return replace(made.bare(), read=lambda: self.read(made, identity))

    def read(self, made, identity):
        with self.lock:
            count = self.reads[identity.group, identity.attempt]
            self.reads[identity.group, identity.attempt] += 1
        if self.lost_at(identity.attempt, count):
            raise RecordingLost("a disk fault", {"job": identity.job, "attempt": identity.attempt})
        return made


@pytest.mark.parametrize("kl_coef, reads", [(0.0, 0), (0.1, 0), (0.1, 1)])
@pytest.mark.parametrize("gone", [{3}, set(range(1, 8)), set(range(8))])
def test_attempts_that_cannot_be_read_back_are_not_trained_on_and_end_no_run(tmp_path, gone, kl_coef, reads):
    # Lost before the reference is asked, or between that and the minibatch.
    attempts = OnDisk(lambda attempt, count: attempt in gone and count >= reads)
    setup = job(tmp_path, replace(FAST, steps=3, kl_coef=kl_coef), attempts)
    setup.job.run("phase", time.time() + SOON)
    groups = {event["group"]: event for event in events(setup, "group")}
    steps, sizes = events(setup, "step_done"), setup.client.batches
    assert len(steps) == 3 and sum(sum(step["groups"].values()) for step in steps) <= len(groups)
    faults = events(setup, "attempt_fault")
    assert set(Counter(event["attempt"] for event in faults)) == gone
    assert all(event["reason"] == "RecordingLost: a disk fault" for event in faults)
    assert sum(step["lost"] for step in steps) == len(faults)
    for step, data in zip(steps, sizes, strict=True):
        left = {
            n: [r for i, r in enumerate(groups[n]["rewards"]) if i not in gone]
            for n in step["trained_groups"]
        }
        assert all(len(set(rewards)) == 2 for rewards in left.values())
        assert step["groups"]["kept"] == len(left) and sum(data) == sum(map(len, left.values()))
        assert 0 not in data and step["minibatches"] == len(data)
        if left:
            np.testing.assert_allclose(step["reward_mean_kept"], np.mean([*chain(*left.values())]))
        assert step["attempts"] + step["lost"] == 8 * sum(step["groups"].values())
    if len(gone) > 1:
        assert sum(step["groups"]["failed"] for step in steps) > 0 and sizes == [[]] * 3
    assert not setup.service.log, "a disk's fault is not told as the server's"
    assert max(attempts.reads.values()) <= 3


def rollout(token=1, read=None):
    mask = np.array([False, True, True])
    arrays = np.array([1, 2, token], np.int32), mask, -mask.astype(np.float32)
    made = Rollout("t", *arrays, (), Ending.FINAL, b"", 0.1)
    return made if read is None else replace(made.bare(), read=read)


def gone():
    raise RecordingLost("a disk fault", {"attempt": 0})


def group(number, rewards, read=lambda n: None):
    """Return a group with these rewards; where `read` gives something, the n-th attempt is read by it."""
    verdicts = [Verdict(Outcome.RESOLVED if reward else Outcome.UNRESOLVED) for reward in rewards]
    return Group(number, "t", 0, tuple(Episode(rollout(n, read(n)), each) for n, each in enumerate(verdicts)))


def unheard(event, **fields):
    pass


UPDATE = Update("checkpoint", "sampler", 1, {}, 0.0, 0.0)


@pytest.mark.parametrize(
    "rewards, lost, least, fate",
    [([1] + [0] * 7, {0}, 2, "uniform"), ([1, 0, 0, 0], {1, 2, 3}, 4, "failed"), ([1, 0], {0, 1}, 2, "failed"),
     ([1, 1, 0, 0], {0}, 4, "failed"), ([1, 1, 0, 0], {0}, 3, "kept")],
)  # fmt: skip
def test_a_group_that_no_rule_would_keep_after_a_loss_is_not_trained_on(rewards, lost, least, fate):
    batch = Batch(0.0, min_group_size=least)
    batch.take(group(0, rewards, lambda n: gone if n in lost else None), Fate.KEPT)
    batch.take(group(1, [1, 0, 0, 0]), Fate.KEPT)
    batch.take(group(2, [1] * 4), Fate.UNIFORM)
    batch.filled = 1.0
    data = batch.minibatch([0, 1], 0.0, unheard)
    left = [reward for n, reward in enumerate(rewards) if n not in lost]
    kept = left if fate == "kept" else []
    assert len(data) == len(kept) + 4
    weights = [d.loss_fn_inputs["advantages"].to_numpy() for d in data[len(kept) :]]
    np.testing.assert_allclose(weights[0], 1.5 / (2 * len(data)), rtol=1e-5)  # nothing else thins them out
    told = batch.result(0, 1, UPDATE, 2.0)
    fates = Counter({"kept": 1, "uniform": 1}) + Counter([fate])
    assert {name: count for name, count in told["groups"].items() if count} == fates
    assert told["trained_groups"] == ([0, 1] if kept else [1])
    assert (told["attempts"], told["lost"]) == (len(left) + 8, len(lost))
    np.testing.assert_allclose(told["reward_mean"], np.mean([*left, 1, 0, 0, 0, 1, 1, 1, 1]))
    np.testing.assert_allclose(told["reward_mean_kept"], np.mean([*kept, 1, 0, 0, 0]))
    assert len(batch.minibatch([0, 1], 0.0, unheard)) == len(data), "and again where training failed"
    assert batch.minibatch([0], 0.0, unheard) == data[: len(kept)] or kept


def test_a_batch_of_which_nothing_is_left_has_a_line():
    batch = Batch(0.0)
    batch.take(group(0, [1, 0], lambda n: gone), Fate.KEPT)
    batch.filled = 1.0
    assert batch.minibatch([0], 0.0, unheard) == []
    told = batch.result(0, 1, replace(UPDATE, minibatches=0), 2.0)
    assert told["reward_mean"] == told["reward_mean_kept"] == 0 and told["trained_groups"] == []
    assert (told["attempts"], told["lost"], told["groups"]["failed"]) == (0, 2, 1)


# -- References ------------------------------------------------------------------------------------

DOWN = [ConnectionError("no answer")] * 1000


def referenced(answers, halt):
    """Return a batch of one group with its references from a server of such answers, and its session."""
    base = Base(lambda number: answers[number] if number < len(answers) else None)
    sampler = Service(base).base_sampler(halt)
    batch, made = Batch(0.0), group(0, [1, 0])
    batch.take(made, Fate.KEPT, [sampler.logprobs(each.rollout) for each in made.episodes])
    return batch, base


def test_a_server_that_one_client_waits_for_holds_up_no_other_client():
    halt, ends = Halt(), []

    def wait():
        try:
            waiting.minibatch([0], 0.1, unheard)
        except Stopped as end:
            ends.append(end)

    waiting, _ = referenced(DOWN, halt)
    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    done = []
    other = threading.Thread(
        target=lambda: done.extend(referenced([], Halt())[0].minibatch([0], 0.1, unheard)), daemon=True
    )
    other.start()
    other.join(SOON)
    assert len(done) == 2 and thread.is_alive()
    halt.set()
    thread.join(SOON)
    assert not thread.is_alive() and ends


def test_errors_of_references_are_raised_by_the_minibatch_and_the_next_try_asks_again():
    # Refused: each of two tries asks twice, and the first answer was there before.
    batch, base = referenced([ValueError("what?"), None, *[ValueError("what?")] * 3], Halt())
    with pytest.raises(PolicyError, match="what"):
        batch.minibatch([0], 0.1, unheard)
    assert len(base.asked) == 5
    assert len(batch.minibatch([0], 0.1, unheard)) == 2 and batch.lost == 0


def test_a_recording_that_is_gone_is_lost_and_not_asked_for_again():
    base, halt, told = Base(), Halt(), []
    sampler = Service(base).base_sampler(halt)
    reads = []

    def read():
        reads.append(1)
        gone()

    reference = sampler.reference(rollout(read=read), lambda: told.append(1))
    reference.begin()
    assert not told
    for _ in range(2):
        with pytest.raises(RecordingLost):
            reference.result()
    assert len(reads) == 3 and not base.asked and told == [1]


def test_references_that_cannot_be_asked_for_keep_no_grader_and_no_group_waiting(tmp_path):
    base = Base()
    base.up.clear()
    config = replace(FAST, steps=2, kl_coef=0.1, grading_workers=1, grading_queue_size=1, rollout_workers=2)
    setup = job(tmp_path, config, Attempts(rate=lambda task: 0.5), base=base)
    thread = threading.Thread(target=lambda: setup.job.run("phase", time.time() + SOON), daemon=True)
    thread.start()
    end = time.monotonic() + SOON / 2
    while len(events(setup, "group")) < 3 and time.monotonic() < end:
        time.sleep(0.02)
    taken = len(events(setup, "group"))
    base.up.set()
    thread.join(SOON)
    assert taken >= 3 and not thread.is_alive() and len(events(setup, "step_done")) == 2
    kept = {event["group"] for event in events(setup, "group") if event["fate"] == "kept"}
    assert kept <= {event["group"] for event in events(setup, "reference")}
    assert setup.job.join(SOON)


def test_a_stop_ends_those_who_ask_for_references(tmp_path):
    base = Base()
    base.up.clear()
    setup = job(tmp_path, replace(FAST, kl_coef=0.1), Attempts(), base=base)
    threading.Timer(0.5, setup.stop.set).start()
    with pytest.raises(Stopped):
        setup.job.run("phase", time.time() + SOON)
    assert setup.job.join(SOON)


def expecting(base, log=unheard):
    return References(Service(base).base_sampler(Halt()), FAST, "train-job0", log)


@pytest.mark.parametrize("taken_first", [True, False])
def test_each_attempt_of_a_group_is_asked_about_once_whoever_comes_first(taken_first):
    base = Base()
    base.up.clear()
    references = expecting(base)
    mixed = group(4, [1, 0, 0, 1])
    references.expect(mixed)
    asker = threading.Thread(target=references.ask, args=(4,))
    if not taken_first:
        asker.start()
    made = references.take(mixed, Fate.KEPT)
    if taken_first:
        asker.start()
    results = []
    taker = threading.Thread(target=lambda: results.extend(each.result() for each in made))
    taker.start()
    time.sleep(0.1)
    base.up.set()
    for thread in (asker, taker):
        thread.join(SOON)
    assert len(results) == 4 and sorted(base.asked) == [[1, 2, n] for n in range(4)]
    references.ask(4)
    assert len(base.asked) == 4 and references.take(mixed, Fate.KEPT) == []


def test_a_group_that_is_too_old_is_not_asked_about_any_more():
    base = Base()
    references = expecting(base)
    references.expect(group(4, [1, 0]))
    references.take(group(4, [1, 0]), Fate.STALE)
    references.ask(4)
    assert base.asked == [] and references._made == references._to_ask == {}


@pytest.mark.parametrize("fault", [ConnectionError("cut"), [None, float("nan"), 0.0], "not asked", "lost"])
def test_the_seconds_of_references_are_told_whatever_becomes_of_one(fault):
    base, told = Base(lambda number: None if isinstance(fault, str) or number != 1 else fault), []
    references = expecting(base, lambda event, **fields: told.append((event, fields)))
    mixed = group(4, [1, 0, 0], lambda n: gone if fault == "lost" and n == 1 else None)
    references.expect(mixed)
    if fault != "not asked":
        references.ask(4)
    assert told == []
    batch = Batch(0.0)
    batch.take(mixed, Fate.KEPT, references.take(mixed, Fate.KEPT))
    assert len(batch.minibatch([0], 0.1, unheard)) == (2 if fault == "lost" else 3)
    ((event, fields),) = told
    assert event == "reference" and fields["group"] == 4 and fields["seconds"] >= 0
