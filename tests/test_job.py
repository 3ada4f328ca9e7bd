"""The loop's rules, with attempts and a server that answer at once: what is trained on, when, and under which policy."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from swegym_tutorial import TrainingConfig, load_tasks
from swegym_tutorial.attempts import Workers
from swegym_tutorial.batches import NoLearningSignal, task_at
from swegym_tutorial.calls import PolicyError
from swegym_tutorial.events import EventReader, RunFolder
from swegym_tutorial.grading import Episode, Outcome, Verdict
from swegym_tutorial.halt import Halt, Stopped
from swegym_tutorial.job import TrainingJob
from swegym_tutorial.policy import Update
from swegym_tutorial.rollout import Ending, RecordingLost, Rollout


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


class Service:
    """Names policies by their paths; as a reference, says -2 for each token."""

    def sampler(self, path, halt=None):
        return SimpleNamespace(path=path)

    def __init__(self):
        self.asked = []

    def base_sampler(self, halt=None):
        self.asked.append("base")

        def logprobs(tokens, answered):
            answered()

            def result():
                return np.full((tokens.whole().tokens if isinstance(tokens, Rollout) else tokens).shape, -2.0)

            return SimpleNamespace(result=result)

        return SimpleNamespace(path="base", logprobs=logprobs)


def job(tmp_path, config, attempts, client=None, *, index=0):
    folder = RunFolder(tmp_path)
    folder.open()
    stop = Halt()
    client = client or Client()
    service = Service()
    made = TrainingJob(index, config, load_tasks(), service, client, attempts, folder, stop)
    return SimpleNamespace(
        job=made, service=service, folder=folder, stop=stop, client=client, attempts=attempts
    )


def events(setup, *names):
    return [e for e in EventReader(setup.folder.path).read() if e["event"] in names]


FAST = TrainingConfig.laptop(steps=6, rollout_workers=4)
SOON = 60.0


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
    assert not setup.service.asked and not events(setup, "reference")


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

    setup = job(tmp_path, FAST, Attempts(), Failing())
    with pytest.raises(PolicyError):
        setup.job.run("phase", time.time() + SOON)
    time.sleep(0.3)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("train-job0")]


def test_stopping_while_a_batch_fills_is_quick(tmp_path):
    setup = job(tmp_path, FAST, Attempts(seconds=lambda task: 0.2))
    threading.Timer(0.3, setup.stop.set).start()
    began = time.monotonic()
    with pytest.raises(Stopped):
        setup.job.run("phase", time.time() + SOON)
    assert time.monotonic() - began < 10 and events(setup, "step_done") == []


def test_time_that_is_over_ends_the_job_with_what_it_has(tmp_path):
    setup = job(tmp_path, replace(FAST, steps=10_000), Attempts())
    setup.job.run("phase", time.time() + 1.5)
    done = events(setup, "step_done")
    assert 0 < len(done) < 10_000 and events(setup, "out_of_time")[0]["step"] == len(done)


def test_pausing_starts_no_more_groups(tmp_path):
    setup = job(tmp_path, replace(FAST, steps=1000), Attempts(seconds=lambda task: 0.002))

    def until_stopped():
        with pytest.raises(Stopped):
            setup.job.run("phase", time.time() + SOON)

    thread = threading.Thread(target=until_stopped)
    thread.start()
    time.sleep(0.5)
    setup.attempts.paused = True
    time.sleep(0.7)
    count = len(setup.attempts.samplers)
    time.sleep(0.5)
    assert len(setup.attempts.samplers) == count > 0
    setup.attempts.paused = False
    time.sleep(0.6)
    assert len(setup.attempts.samplers) > count
    setup.stop.set()
    thread.join(10)
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
    deadline = time.monotonic() + 10
    while len(done) < 50 and time.monotonic() < deadline:
        time.sleep(0.01)
    workers.close()
    assert workers.join(5)
    assert sorted(done) == list(range(50))
    assert not [t for t in threading.enumerate() if t.name.startswith("some-worker")]


@pytest.mark.parametrize("gone", [{3}, set(range(8))])
def test_attempts_that_cannot_be_read_back_are_not_trained_on_and_end_no_run(tmp_path, gone):
    class OnDisk(Attempts):
        def rollout(self, task, sampler, identity, halt):
            made = super().rollout(task, sampler, identity, halt)

            def read():
                if identity.attempt in gone:
                    raise RecordingLost(
                        "a disk fault", {"phase": identity.phase, "attempt": identity.attempt}
                    )
                return made

            return replace(made.bare(), read=read)

    setup = job(tmp_path, replace(FAST, steps=2, kl_coef=0.1), OnDisk())
    setup.job.run("phase", time.time() + SOON)
    steps = events(setup, "step_done")
    kept = [step["groups"]["kept"] for step in steps]
    assert [step["lost"] for step in steps] == [count * len(gone) for count in kept] and min(kept) > 0
    assert [sum(sizes) for sizes in setup.client.batches] == [count * (8 - len(gone)) for count in kept]
    faults = events(setup, "attempt_fault")
    assert Counter(event["attempt"] for event in faults) == dict.fromkeys(gone, sum(kept))
    assert all(event["reason"] == "RecordingLost: a disk fault" for event in faults)
    assert all(0 <= step["reward_mean_kept"] <= 1 for step in steps)
