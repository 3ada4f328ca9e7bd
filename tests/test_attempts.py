"""One attempt's border: what is retried, what is lost, and what is recorded of it."""

import re
import time
import weakref
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from conftest import FINAL, Script, tool_call

from swegym_tutorial import TrainingConfig, answers
from swegym_tutorial.attempts import AttemptRunner, Identity, Workers, sampling_seed
from swegym_tutorial.calls import PolicyError
from swegym_tutorial.events import EventReader, RunFolder, read_episode
from swegym_tutorial.grading import Grader, Outcome
from swegym_tutorial.halt import Halt, Stopped
from swegym_tutorial.rollout import Rollout
from swegym_tutorial.sandbox import BackendClosed, SandboxError
from swegym_tutorial.sandbox.local import LocalBackend


class Flaky:
    """Sandboxes of which the first `faults` cannot be opened."""

    name = "flaky"

    def __init__(self, sandboxes, faults: int) -> None:
        self.sandboxes, self.faults = sandboxes, faults

    def open(self, task):
        if self.faults > 0:
            self.faults -= 1
            raise SandboxError("no room for a sandbox")
        return self.sandboxes.open(task)

    def close(self):
        pass


class Own:
    """A backend as a user would write it, around another one."""

    sandboxes: Any

    def open(self, task):
        return self.sandboxes.open(task)

    def close(self):
        pass


@dataclass
class Plain(Own):  # no hash
    sandboxes: Any
    name: str = "own"


@dataclass(slots=True, eq=False)
class Slotted:  # no weak reference
    sandboxes: Any
    name: str = "own"
    open, close = Own.open, Own.close


@pytest.fixture
def made(tmp_path, chat, sandboxes, task):
    def make(faults: int = 0, retries: int = 1, reward=None, kind=None):
        config = replace(TrainingConfig.laptop(), attempt_retries=retries)
        folder, halt = RunFolder(tmp_path), Halt()
        folder.open()
        flaky = kind(sandboxes) if kind else Flaky(sandboxes, faults)
        runner = AttemptRunner(chat, flaky, Grader(flaky, config), folder, config, reward=reward)
        return runner, folder, halt

    return make


def identity(task, phase: str = "run-1", attempt: int = 0) -> Identity:
    return Identity(phase, "train-job0", 3, attempt, task.instance_id, 0)


def test_a_fault_is_tried_again_and_leaves_no_trace_in_the_reward(made, chat, task):
    runner, folder, halt = made(faults=1)
    rollout = runner.rollout(task, Script(chat, FINAL), identity(task), halt)
    episode = runner.grade(task, rollout, identity(task), halt)
    assert episode.verdict.outcome is Outcome.EMPTY_PATCH and episode.reward == 0.0
    events = EventReader(folder.path).read()
    assert [e["reason"] for e in events if e["event"] == "attempt_fault"] == [
        "SandboxError: no room for a sandbox"
    ]
    saved = read_episode(folder.episode("run-1", "train-job0", 3, 0))
    assert saved["verdict"]["outcome"] == "empty_patch" and saved["tokens"] == rollout.tokens.tolist()


@pytest.mark.parametrize("kind", [Plain, Slotted])
def test_any_kind_of_object_can_be_a_backend(kind, made, chat, task, monkeypatch):
    searches = []
    search = answers.answers_in
    monkeypatch.setattr(answers, "answers_in", lambda *args: searches.append(1) or search(*args))
    runner, _, halt = made(kind=kind)
    for attempt in range(2):
        key = identity(task, attempt=attempt)
        mended = tool_call(f"git apply <<'END'\n{task.patch}\nEND")
        rollout = runner.rollout(task, Script(chat, mended, FINAL), key, halt)
        assert runner.grade(task, rollout, key, halt).reward == 1
    assert len(searches) == 1  # once a task and backend


def test_case_37_an_attempt_that_faults_took_has_no_reward_and_is_counted(made, chat, task):
    # rllm#710, open-instruct#1887: an infrastructure fault is never a reward of 0.
    runner, folder, halt = made(faults=5)
    assert runner.rollout(task, Script(chat, FINAL), identity(task), halt) is None
    (lost,) = [e for e in EventReader(folder.path).read() if e["event"] == "episode"]
    assert lost["reward"] is None and lost["outcome"] == "infrastructure" and "no room" in lost["reason"]


def test_a_backend_that_is_closed_is_not_tried_again(made, chat, task):
    def closed(sandboxes):
        backend = LocalBackend()
        backend.close()
        return Plain(backend)

    runner, folder, halt = made(kind=closed, retries=3)
    with pytest.raises(BackendClosed, match="the backend is closed: make a new one; a run closes"):
        runner.rollout(task, Script(chat, FINAL), identity(task), halt)
    assert not [e for e in EventReader(folder.path).read() if e["event"] == "attempt_fault"]
    halt.set()  # while a run ends, it closes its backend itself
    with pytest.raises(Stopped):
        runner.rollout(task, Script(chat, FINAL), identity(task), halt)


def test_a_fault_of_the_policy_is_one_too(made, task):
    class Silent:
        def sample(self, prompt, max_tokens, seed):
            raise PolicyError("the server does not answer")

    runner, folder, halt = made(faults=0, retries=0)
    assert runner.rollout(task, Silent(), identity(task), halt) is None
    assert [e for e in EventReader(folder.path).read() if e["event"] == "attempt_fault"]


def test_what_fails_while_the_run_stops_is_no_fault(made, chat, task):
    runner, folder, halt = made(faults=5)
    halt.set()
    with pytest.raises(Stopped):
        runner.rollout(task, Script(chat, FINAL), identity(task), halt)
    assert not [e for e in EventReader(folder.path).read() if e["event"] in ("attempt_fault", "episode")]


def test_sampling_seeds_depend_on_seed_group_and_attempt_alone(task):
    assert sampling_seed(1, identity(task, "run-1")) == sampling_seed(1, identity(task, "run-2"))
    assert sampling_seed(1, identity(task)) != sampling_seed(2, identity(task))
    assert sampling_seed(1, identity(task)) != sampling_seed(1, identity(task, attempt=1))
    before, after = (sampling_seed(1, identity(task, f"evaluation-{label}")) for label in ("before", "after"))
    assert before == after != sampling_seed(1, identity(task))


def half_for_an_answer(task, rollout, verdict) -> float:
    """An own reward, which also tells what it was given."""
    assert rollout.task_id == task.instance_id
    return verdict.reward if verdict.reward else 0.5 * (rollout.ending == "final")


def test_an_own_reward_is_earned_in_training_and_not_in_evaluations(made, chat, task):
    runner, folder, halt = made(faults=0, reward=half_for_an_answer)
    earned = {}
    for phase in ("run-1", "evaluation-before"):
        rollout = runner.rollout(task, Script(chat, FINAL), identity(task, phase), halt)
        episode = runner.grade(task, rollout, identity(task, phase), halt)
        assert episode.verdict.outcome is Outcome.EMPTY_PATCH
        earned[phase] = episode.reward
        saved = read_episode(folder.episode(phase, "train-job0", 3, 0))
        assert saved["verdict"]["reward"] == episode.reward
    assert earned == {"run-1": 0.5, "evaluation-before": 0.0}
    logged = {e["phase"]: e["reward"] for e in EventReader(folder.path).read() if e["event"] == "episode"}
    assert logged == earned


def test_an_own_reward_is_never_asked_about_an_infrastructure_fault(made, chat, task):
    def asked(task, rollout, verdict):
        raise AssertionError("there is nothing to reward")

    runner, _, halt = made(faults=1, retries=0, reward=asked)
    assert runner.rollout(task, Script(chat, FINAL), identity(task), halt) is None
    rollout = Rollout(
        task.instance_id, *(np.zeros(0, kind) for kind in (np.int32, bool, np.float32)), (), "final", b"+", 0
    )
    runner._sandboxes.faults = 1
    assert runner.grade(task, rollout, identity(task), halt) is None


@pytest.mark.parametrize("value", [1.5, -0.1, float("nan"), None, "1", [0.5], np.array([0, 1])])
def test_an_own_reward_outside_of_0_to_1_is_an_error_that_names_it(value, made, chat, task):
    def generous(task, rollout, verdict):
        return value

    runner, _, halt = made(faults=0, reward=generous)
    rollout = runner.rollout(task, Script(chat, FINAL), identity(task), halt)
    with pytest.raises(
        ValueError, match=rf"generous, .*{task.instance_id}, gave {re.escape(repr(value))}: a"
    ):
        runner.grade(task, rollout, identity(task), halt)


@pytest.mark.parametrize("value", [True, np.float32(0.25), np.int64(1), 0])
def test_an_own_reward_is_any_kind_of_number(value, made, chat, task):
    runner, _, halt = made(faults=0, reward=lambda task, rollout, verdict: value)
    rollout = runner.rollout(task, Script(chat, FINAL), identity(task), halt)
    episode = runner.grade(task, rollout, identity(task), halt)
    assert type(episode.reward) is float and episode.reward == value


def test_an_own_reward_that_fails_is_named_with_its_reason(made, chat, task):
    def broken(task, rollout):
        return 1.0

    runner, _, halt = made(faults=0, reward=broken)
    rollout = runner.rollout(task, Script(chat, FINAL), identity(task), halt)
    with pytest.raises(ValueError, match=r"broken, .* failed with TypeError: .*positional"):
        runner.grade(task, rollout, identity(task), halt)


def test_of_a_graded_attempt_neither_patch_nor_what_the_tests_told_stays_in_memory(made, chat, task):
    runner, folder, halt = made(faults=0)
    mended = tool_call(f"git apply <<'END'\n{task.patch}\nEND")
    rollout = runner.rollout(task, Script(chat, mended, FINAL), identity(task), halt)
    assert rollout.read is None and rollout.patch
    episode = runner.grade(task, rollout, identity(task), halt)
    assert episode.reward == 1 and episode.rollout.tokens is rollout.tokens
    assert (episode.rollout.patch, episode.verdict.tests, episode.verdict.log) == (b"", {}, "")
    place = folder.episode("run-1", "train-job0", 3, 0)
    assert read_episode(place)["verdict"]["tests"] and (place / "prediction.patch").read_bytes()
    assert next(place.glob("*/test_output.txt")).read_text().strip()


def test_sampled_tokens_are_those_of_the_turns_and_stay_counted(made, chat, task):
    runner, _, halt = made(faults=0)
    rollout = runner.rollout(task, Script(chat, tool_call("ls"), FINAL), identity(task), halt)
    assert rollout.sampled_tokens == rollout.mask.sum() == rollout.bare().sampled_tokens > 0
    by_hand = replace(rollout, turns=())
    assert by_hand.sampled_tokens == rollout.sampled_tokens


def test_an_idle_worker_holds_nothing_of_its_last_call():
    class Attempt:
        pass

    workers, attempt = Workers(1, "idle"), Attempt()
    held = weakref.ref(attempt)
    workers.submit(lambda attempt=attempt: None)
    del attempt
    deadline = time.monotonic() + 30
    while held() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held() is None
    workers.close()
    assert workers.join(30)
