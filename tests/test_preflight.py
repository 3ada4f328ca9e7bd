"""What the preflight finds lacking, on a real server behind a proxy that takes something away."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from proxy import Proxy, proxy_of, refusing
from tinker import types

from swegym_tutorial import TrainingConfig, TrainingRun, load_tasks
from swegym_tutorial.bundled import POLICY
from swegym_tutorial.connect import RunError, first_client, server_from_environment
from swegym_tutorial.halt import Halt, Stopped
from swegym_tutorial.policy import PolicyClient, PolicyService
from swegym_tutorial.preflight import PreflightError, check_address, check_training
from swegym_tutorial.sandbox.hosted import HostedBackend
from swegym_tutorial.server.process import LocalServer

NAME = "qwen35-9b-lora-128k"
CONFIG = replace(
    TrainingConfig.laptop(), base_model=NAME, kl_coef=0.1, steps=1, groups_per_batch=1, max_groups_per_batch=1
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with LocalServer({NAME: POLICY}, tmp_path_factory.mktemp("state"), threads=1) as started:
        yield started


@pytest.fixture
def proxy(server: LocalServer) -> Iterator[Proxy]:
    with proxy_of(server.url) as started:
        yield started


def check(proxy: Proxy, key: str, config: TrainingConfig = CONFIG) -> None:
    """The whole preflight, as a run does it."""
    check_address(proxy.url, key, config.base_model)
    with closing(PolicyService(config, (proxy.url, key), Halt())) as service:
        client, chat = first_client(service, config)
        check_training(service, client, config, chat.encode("Hello"), "preflight-test")


def test_a_server_that_has_all_passes(proxy: Proxy, server: LocalServer) -> None:
    check(proxy, server.key)
    paths = [path for path, _ in proxy.calls]
    assert paths.count("create_model") == 1  # no adapter beside the job's own
    assert "optim_step" not in paths


# case 27 (SkyRL: no prompt log-probabilities, no ppo): what is missing is named before any sandbox starts
LACKS = {
    "publishing": ("save_weights_for_sampler", "no samplers here", "cannot publish sampling weights"),
    "sampling": ("asample", "no sampling here", "cannot sample with log-probabilities"),
    "ppo": ("forward_backward", "unknown loss ppo", "cannot train with the `ppo` loss"),
}


@pytest.mark.parametrize("lack", LACKS)
def test_case_27_what_a_server_lacks_is_named(proxy: Proxy, server: LocalServer, lack: str) -> None:
    path, words, told = LACKS[lack]
    proxy.before[path] = refusing(words)
    with pytest.raises(PreflightError, match=told) as caught:
        check(proxy, server.key)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def _no_prompt_logprobs(body: bytes) -> Any:
    return refusing("prompt_logprobs is not supported")(body) if _wants_prompt_logprobs(body) else None


def _wants_prompt_logprobs(body: bytes) -> bool:
    return bool(json.loads(body).get("prompt_logprobs"))


def _silently_none(body: bytes) -> bytes:
    return json.dumps({**json.loads(body), "prompt_logprobs": False}).encode()


@pytest.mark.parametrize("handler", [_no_prompt_logprobs, _silently_none])
def test_case_27_prompt_logprobs_are_needed_for_the_kl_term_alone(
    proxy: Proxy, server: LocalServer, handler: Any
) -> None:
    proxy.before["asample"] = handler
    with pytest.raises(PreflightError, match=r"cannot give prompt log-probabilities .*--set kl_coef=0"):
        check(proxy, server.key)
    proxy.calls.clear()
    check(proxy, server.key, replace(CONFIG, kl_coef=0.0))
    assert not any(_wants_prompt_logprobs(body) for path, body in proxy.calls if path == "asample")


def _without_logprobs(content: bytes) -> bytes:
    from tinker.proto.tinker_public_pb2 import SampleResponse

    response = SampleResponse()
    try:
        response.ParseFromString(content)
    except Exception:
        return content
    for sequence in response.sequences:
        sequence.logprobs = b""
    return response.SerializeToString()


def test_case_27_samples_without_logprobs_are_not_enough(proxy: Proxy, server: LocalServer) -> None:
    proxy.after["retrieve_future"] = lambda content: (
        content if content.startswith(b"{") else _without_logprobs(content)
    )
    with pytest.raises(PreflightError, match="cannot sample with log-probabilities"):
        check(proxy, server.key)


def test_a_refused_adapter_is_told(proxy: Proxy, server: LocalServer) -> None:
    proxy.before["create_model"] = refusing("rank 16 is too high: at most 8")
    with pytest.raises(Exception, match=r"creating a rank-16 LoRA client of .*at most 8"):
        check(proxy, server.key)


def test_the_address_is_checked_in_seconds(server: LocalServer, proxy: Proxy) -> None:
    with pytest.raises(PreflightError, match="must look like https://host"):
        check_address("spindle.modal.run", "tml-x", NAME)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(PreflightError, match=r"no server answers at .*TINKER_BASE_URL"):
            check_address(url, "tml-x", NAME)
    with pytest.raises(PreflightError, match=r"no server answers at https://no-such-host\.invalid"):
        check_address("https://no-such-host.invalid", "tml-x", NAME)
    with pytest.raises(PreflightError, match=r"refuses the key in TINKER_API_KEY"):
        check_address(server.url, "tml-wrong", NAME)
    with pytest.raises(PreflightError, match=rf"does not offer 'other'; it offers '{NAME}': .*--base-model"):
        check_address(server.url, server.key, "other")
    proxy.before["get_server_capabilities"] = refusing("starting", 503)
    with pytest.raises(PreflightError, match="fails; it answered 503"):
        check_address(proxy.url, server.key, NAME)
    proxy.before["get_server_capabilities"] = refusing("no such call", 404)
    check_address(proxy.url, server.key, NAME)  # a server without this call may have all others


@pytest.mark.parametrize(
    "url",
    ["http://[::1", "http://host:port", "https://a b", "https://host?x=1", "https://", "", "https://host\n"],
)
def test_what_is_no_address_is_told_as_such(url: str) -> None:
    with pytest.raises(PreflightError, match="must look like https://host") as told:
        check_address(url, "tml-x", NAME)
    assert repr(url) in str(told.value)
    with pytest.raises(PreflightError, match="without /api/v1"):
        check_address("https://host/api/v1/", "tml-x", NAME)


@pytest.mark.parametrize("key", ["tml-secret\n", "tml-sec ret", "tml-\u200bsecret", ""])
def test_what_cannot_be_a_key_is_told_without_it(server: LocalServer, key: str) -> None:
    with pytest.raises(PreflightError, match="TINKER_API_KEY is no key") as told:
        check_address(server.url, key, NAME)
    assert "ret" not in str(told.value)


def test_white_space_around_the_address_and_the_key_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", " https://host/\r\n")
    monkeypatch.setenv("TINKER_API_KEY", "tml-x\n")
    assert server_from_environment(TrainingConfig.spindle()) == ("https://host/", "tml-x")
    monkeypatch.setenv("TINKER_API_KEY", " ")
    with pytest.raises(RunError, match="not set: TINKER_API_KEY"):
        server_from_environment(TrainingConfig.spindle())


def test_a_session_that_never_began_is_closed_without_the_server(proxy: Proxy, server: LocalServer) -> None:
    """An interrupted run must not wait for a server that hangs, nor begin a session in order to end it."""
    going_on = threading.Event()
    asked = threading.Event()

    def hang(body: bytes) -> None:
        asked.set()
        going_on.wait(60)

    proxy.before["client/config"] = hang
    stop = Halt()
    service = PolicyService(CONFIG, (proxy.url, server.key), stop)
    service.close()
    assert not proxy.calls
    service = PolicyService(CONFIG, (proxy.url, server.key), stop)
    threading.Thread(target=lambda: (asked.wait(60), stop.set()), daemon=True).start()
    client = service.client(0)
    session = service.session()
    service.session = lambda: session  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        client.begin()
    began = time.monotonic()
    service.close()
    assert time.monotonic() - began < 30
    going_on.set()  # the session begins after all, and is ended by the one who waited for it
    deadline = time.monotonic() + 60
    while session._holder is None and time.monotonic() < deadline:
        time.sleep(0.05)
    task = session._holder._session_heartbeat_task
    while not task.done() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert task.done()
    assert "create_model" not in [path for path, _ in proxy.calls]


def test_a_session_that_is_just_beginning_at_the_end_leaves_no_thread(
    proxy: Proxy, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local server ends next, and the SDK would ask for it for minutes."""
    monkeypatch.setattr("swegym_tutorial.session.BEGINNING", 60.0)
    asked, closing, stop = threading.Event(), threading.Event(), Halt()

    def slow(body: bytes) -> None:
        asked.set()
        closing.wait(60)

    proxy.before["create_session"] = slow
    service = PolicyService(CONFIG, (proxy.url, server.key), stop)
    client = service.client(0)
    beginning = threading.Thread(target=partial(_stopped, client.begin))
    beginning.start()
    assert asked.wait(60)
    (session,) = service._sessions
    stop.set()
    beginning.join(60)
    threading.Timer(0.5, closing.set).start()
    service.close()
    assert closing.is_set() and session._holder is not None  # it was waited for
    assert "create_model" not in [path for path, _ in proxy.calls]


def _stopped(call: Callable[[], object]) -> None:
    with pytest.raises(Stopped):
        call()


def test_a_wrong_path_is_one_clear_line(server: LocalServer) -> None:
    wrong = {**os.environ, "TINKER_BASE_URL": f"{server.url}/x", "TINKER_API_KEY": server.key}
    command = [sys.executable, "-m", "swegym_tutorial.cli", "train", "--smoke-test"]
    done = subprocess.run(command, env=wrong, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and done.stderr.count("\n") == 2, done.stderr  # the first: that it asks
    assert "creating a rank-32 LoRA client" in done.stderr and "404" in done.stderr


def test_something_else_at_the_address_is_told(proxy: Proxy, server: LocalServer) -> None:
    proxy.after["get_server_capabilities"] = lambda content: b"<html>Welcome to nginx</html>"
    with pytest.raises(PreflightError, match=r"is no Tinker-compatible server: .*nginx"):
        check_address(proxy.url, server.key, NAME)


def _step(client: PolicyClient, service: PolicyService, tokens: list[int], name: str) -> np.ndarray:
    """One update on the tokens; returns their log-probabilities under the policy after it."""
    array = np.array(tokens)
    data = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(array[1:]),
            "logprobs": types.TensorData.from_numpy(np.full(len(tokens) - 1, -1.0, np.float32)),
            "advantages": types.TensorData.from_numpy(np.ones(len(tokens) - 1, np.float32)),
        },
    )
    update = client.update(lambda: [[data]], 0, name)
    return service.sampler(update.sampler).logprobs(array).result()


def test_the_preflight_changes_neither_weights_nor_the_next_gradient(server: LocalServer) -> None:
    after = []
    for checked in (False, True):
        with closing(PolicyService(CONFIG, (server.url, server.key), Halt())) as service:
            client, chat = first_client(service, CONFIG)
            tokens = chat.encode("def add(a, b): return a - b")
            if checked:
                check_training(service, client, CONFIG, chat.encode("Hello"), "preflight")
                base, fresh = (
                    s.logprobs(np.array(tokens)).result()
                    for s in (
                        service.base_sampler(),
                        service.sampler(client.publish_once("fresh")),
                    )
                )
                np.testing.assert_array_equal(base, fresh)
            after.append(_step(client, service, tokens, f"after-{checked}"))
    np.testing.assert_array_equal(after[0], after[1])
    assert np.abs(after[1] - base).max() > 1e-3  # and the update did something


def test_the_smoke_test_prints_its_line_and_opens_nothing(server: LocalServer, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "swegym_tutorial.cli",
        "train",
        "--smoke-test",
        "--tokenizer",
        str(POLICY),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    told = f"smoke ok: generated 4 tokens with {NAME} on the server at {server.url} (preset spindle)\n"
    assert (done.stdout, done.returncode) == (told, 0), done.stderr
    assert not list(tmp_path.iterdir())
    done = subprocess.run(
        [*command, "--preset", "laptop"],
        env={**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    told = "smoke ok: generated 4 tokens with tiny-qwen3 on a local server (preset laptop)\n"
    assert (done.stdout, done.returncode) == (told, 0), done.stderr
    assert done.stderr == "TINKER_BASE_URL is set and not used: the preset laptop starts its own server\n"
    wrong = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-wrong"}
    done = subprocess.run(command, env=wrong, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "refuses the key" in done.stderr and "Traceback" not in done.stderr


def test_case_27_no_sandbox_is_opened_before(
    proxy: Proxy, server: LocalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = HostedBackend.open
    monkeypatch.setattr(HostedBackend, "open", lambda self, task: (opened.append("x"), real(self, task))[1])
    proxy.before["forward_backward"] = refusing("unknown loss ppo")
    run = TrainingRun(
        CONFIG, tmp_path / "run", tasks=load_tasks("bundled")[:1], server=(proxy.url, server.key)
    )
    with ExitStack() as stack:
        stack.callback(run.stop)
        run.start()
        with pytest.raises(PreflightError, match="`ppo` loss"):
            run.wait()
    assert not opened
    assert "run_failed" in (tmp_path / "run" / "events.jsonl").read_text()
