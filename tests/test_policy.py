"""What is said to a training server that fails, forgets, or is gone for a while: the real SDK and the real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from proxy import Proxy, proxy_of, refusing
from served import Served, served

from swegym_tutorial import TrainingConfig
from swegym_tutorial.calls import PolicyError, Trouble, pause
from swegym_tutorial.halt import Halt, Stopped
from swegym_tutorial.minibatch import datum
from swegym_tutorial.policy import CheckpointGone, PolicyClient, PolicyService
from swegym_tutorial.rollout import Ending, RecordingLost, Rollout
from swegym_tutorial.server.store import Address
from swegym_tutorial.watch import Watch

CONFIG = replace(TrainingConfig.laptop(), warmup_steps=0)
TOKENS = list(range(40, 72))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served")) as started:
        yield started


@pytest.fixture
def proxy(server: Served) -> Iterator[Proxy]:
    with proxy_of(server.url) as started:
        yield started


class Log:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def __call__(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def of(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events if each["event"] == event]


def batch() -> list[list[Any]]:
    """Two minibatches of one attempt each."""
    tokens = np.array(TOKENS, np.int32)
    weights = np.linspace(-1, 1, len(tokens)).astype(np.float32)
    logprobs = np.full(len(tokens), -2.0, np.float32)
    return [[datum(tokens, logprobs, weights)], [datum(tokens, logprobs, -2 * weights)]]


def after_two_batches(service: PolicyService, client: PolicyClient, name: str) -> np.ndarray:
    """Train twice; returns the log-probabilities of the tokens under the policy that came of it."""
    client.publish(f"{name}-start")
    for step in range(2):
        update = client.update(batch, step, f"{name}-{step}")
    return service.sampler(update.sampler).logprobs(np.array(TOKENS)).result()


@pytest.fixture(scope="module")
def undisturbed(server: Served) -> np.ndarray:
    with closing(PolicyService(CONFIG, (server.url, server.key), Halt())) as service:
        return after_two_batches(service, service.client(0), "undisturbed")


def once(then: Any, at: int = 1) -> Any:
    """Answer the at-th call by `then`, and let the others through."""
    count = 0

    def handler(body: bytes) -> Any:
        nonlocal count
        count += 1
        return then(body) if count == at else None

    return handler


@pytest.mark.slow
@pytest.mark.parametrize("call, at", [("forward_backward", 4), ("optim_step", 3), ("save_weights", 3)])
def test_a_batch_whose_training_fails_is_trained_again_from_the_last_checkpoint(
    proxy: Proxy, server: Served, undisturbed: np.ndarray, call: str, at: int
) -> None:
    proxy.before[call] = once(refusing("who are you?", 404), at)
    log = Log()
    with closing(PolicyService(CONFIG, (proxy.url, server.key), Halt(), log)) as service:
        values = after_two_batches(service, service.client(0), f"failing-{call}")
    np.testing.assert_array_equal(values, undisturbed)
    (recovered,) = log.of("recovered")
    assert recovered["job"] == "train-job0" and "who are you?" in recovered["reason"]
    assert recovered["checkpoint"].startswith("tinker://")


@pytest.mark.slow
def test_a_call_whose_answer_is_lost_is_applied_once(
    proxy: Proxy, server: Served, undisturbed: np.ndarray
) -> None:
    """The proxy passes each call on and answers 503 the first time: the SDK asks again with the same number."""
    seen: set[bytes] = set()
    lost: list[str] = []

    def losing(path: str) -> Any:
        def handler(answer: bytes) -> Any:
            body = proxy.asked
            if body in seen:
                return answer
            seen.add(body)
            lost.append(path)
            return refusing("lost", 503)(b"")

        return handler

    for path in ("forward_backward", "optim_step", "save_weights", "save_weights_for_sampler"):
        proxy.after[path] = losing(path)
    log = Log()
    with closing(PolicyService(CONFIG, (proxy.url, server.key), Halt(), log)) as service:
        values = after_two_batches(service, service.client(0), "lost")
    np.testing.assert_array_equal(values, undisturbed)
    assert len(lost) == len(seen) >= 14 and not log.of("recovered")


@pytest.mark.slow
def test_a_server_that_restarts_is_waited_for_and_told_of(tmp_path: Path, undisturbed: np.ndarray) -> None:
    log = Log()
    with (
        served(tmp_path / "state") as server,
        closing(PolicyService(CONFIG, (server.url, server.key), Halt(), log)) as service,
    ):
        client = service.client(0)
        client.publish("start")
        first = client.update(batch, 0, "0")
        sampler = service.sampler(first.sampler)
        before = sampler.sample(TOKENS, 8, seed=3)
        server.kill()
        again: list[Any] = []
        asking = threading.Thread(target=lambda: again.append(sampler.sample(TOKENS, 8, seed=3)))
        asking.start()
        wait_until(lambda: log.of("waiting"), 120)
        server.start()
        second = client.update(batch, 1, "1")
        asking.join(120)
        values = service.sampler(second.sampler).logprobs(np.array(TOKENS)).result()
        wait_until(lambda: log.of("waiting_over"), 120)
    assert again[0].tokens == before.tokens
    np.testing.assert_array_equal(values, undisturbed)
    told = log.of("waiting")[0]
    assert told["what"] == "sampling" and told["seconds"] >= 15 and server.url in told["reason"]
    assert log.of("recovered")[0]["checkpoint"] == first.checkpoint
    assert log.of("waiting_over")


@pytest.mark.slow
def test_a_checkpoint_that_is_gone_is_named(server: Served) -> None:
    with closing(PolicyService(CONFIG, (server.url, server.key), Halt())) as service:
        client = service.client(0)
        path = client.publish("soon-gone").checkpoint
        address = Address.parse(path)
        (server.state / address.folder / address.kind / f"{address.name}.safetensors").unlink()
        client.close()
        with pytest.raises(
            CheckpointGone, match="does not exist: it was never saved here, or has expired"
        ) as caught:
            client.begin()
        assert caught.value.path == path


@pytest.mark.slow
def test_a_client_that_has_begun_goes_on_from_a_checkpoint(server: Served, undisturbed: np.ndarray) -> None:
    """As a resumed run does: its preflight is made on the untrained adapter."""
    with closing(PolicyService(CONFIG, (server.url, server.key), Halt())) as service:
        first = service.client(0)
        first.publish("resumed-start")
        after_one = first.update(batch, 0, "resumed-0")
        second = service.client(1)
        second.begin()
        second.restore(after_one.checkpoint)
        after_two = second.update(batch, 1, "resumed-1")
        values = service.sampler(after_two.sampler).logprobs(np.array(TOKENS)).result()
    np.testing.assert_array_equal(values, undisturbed)


def test_what_the_server_refuses_is_not_asked_for_ever(proxy: Proxy, server: Served) -> None:
    proxy.before["asample"] = refusing("no")
    with closing(PolicyService(CONFIG, (proxy.url, server.key), Halt())) as service:
        sampler = service.base_sampler()
        with pytest.raises(PolicyError, match="no") as caught:
            sampler.sample(TOKENS, 4, seed=None)
        assert caught.value.trouble is Trouble.REFUSED
    sessions = [path for path, _ in proxy.calls if path == "create_session"]
    assert len(sessions) == 2  # the first, and a new one in case the first was forgotten


@pytest.mark.slow
def test_what_a_server_has_forgotten_several_times_is_asked_for_each_time(
    proxy: Proxy, server: Served, undisturbed: np.ndarray
) -> None:
    """As where it restarts more than once while a batch is trained on."""
    forgetting = iter([True] * 3)
    proxy.before["optim_step"] = lambda body: (
        refusing("unknown model: the server was started again", 404)(body)
        if next(forgetting, False)
        else None
    )
    with closing(PolicyService(CONFIG, (proxy.url, server.key), Halt())) as service:
        values = after_two_batches(service, service.client(0), "forgetful")
    np.testing.assert_array_equal(values, undisturbed)


def test_waiting_for_a_dead_server_ends_at_once_when_halted(tmp_path: Path) -> None:
    server = Served(tmp_path)  # never started
    halt = Halt()
    with closing(PolicyService(CONFIG, (server.url, server.key), halt)) as service:
        threading.Timer(1.0, halt.set).start()
        began = time.monotonic()
        with pytest.raises(Stopped):
            service.base_sampler().sample(TOKENS, 4, seed=None)
        with pytest.raises(Stopped):
            service.client(0).begin()
        assert time.monotonic() - began < 60


def test_case_21_what_is_waited_for_is_told_with_its_reason_and_its_age() -> None:
    # tinker-cookbook#652: a server that pauses for hours looked like a client that hangs.
    log, ails = Log(), ["HTTP 503"]
    watch = Watch(log, lambda: ails[0], slow=0.2, look_every=0.05, ask_every=0.0)
    with watch.waiting("forward_backward"):
        wait_until(lambda: log.of("waiting"))
        ails[0] = ""
        watch.hear("Training for m is paused. Reason: short on capacity")
        wait_until(lambda: len(log.of("waiting")) == 2)
    wait_until(lambda: log.of("waiting_over"))
    watch.close()
    first, second = log.of("waiting")
    assert first["what"] == "forward_backward" and first["reason"] == "HTTP 503" and first["seconds"] >= 0.2
    assert "short on capacity" in second["reason"]
    watch.join(60)
    assert not [t for t in threading.enumerate() if t.name == "server-watch" and t is watch.thread]


def test_what_is_asked_of_an_attempt_on_disk_needs_its_recording_until_it_is_asked(server: Served) -> None:
    tokens = np.array(TOKENS, np.int32)
    mask = np.arange(len(tokens)) % 3 == 1
    made = Rollout("t", tokens, mask, -mask.astype(np.float32), (), Ending.FINAL, b"", 1.0)
    there, log = [True], Log()

    def read() -> Rollout:
        if not there[0]:
            raise RecordingLost("a disk fault", {})
        return made

    kept = replace(made.bare(), read=read)
    with closing(PolicyService(CONFIG, (server.url, server.key), Halt(), log)) as service:
        base = service.base_sampler()
        whole, asked, not_asked = base.logprobs(tokens).result(), base.logprobs(kept), base.reference(kept)
        there[0] = False
        np.testing.assert_array_equal(asked.result(), np.where(mask, whole, 0))
        with pytest.raises(RecordingLost):
            not_asked.result()
        not_asked.begin()
        there[0] = True
        not_asked.begin()
        not_asked.begin()
        np.testing.assert_array_equal(not_asked.result(), asked.result())
    assert log.events == []


def wait_until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def test_pauses_grow_and_have_a_bound() -> None:
    assert max(pause(n) for n in range(100)) <= 60
    assert min(pause(10) for _ in range(20)) > max(pause(1) for _ in range(20))


def test_a_halt_reaches_those_below_and_not_those_above() -> None:
    run = Halt()
    job, other = run.child(), run.child()
    job.set()
    assert job.is_set() and not run.is_set() and not other.is_set()
    run.set()
    assert other.is_set() and run.child().is_set()
