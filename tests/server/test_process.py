"""The child process: found from anywhere, ended with its parent, told of when it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import tinker
from tinker import types

import swegym_tutorial
from swegym_tutorial.server import main as server_main
from swegym_tutorial.server.process import LocalServer

pytestmark = pytest.mark.slow  # each starts a server of its own

PACKAGE = Path(swegym_tutorial.__file__).parent.parent


def gone(pid: int, within: float = 60.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


Connect = Callable[[str, str], tinker.ServiceClient]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Give what connects to a server. Its clients' heartbeats end, which would warn of a server that is gone for ever."""
    made: list[tinker.ServiceClient] = []

    def connected(url: str, key: str) -> tinker.ServiceClient:
        made.append(tinker.ServiceClient(base_url=url, api_key=key))
        return made[-1]

    yield connected
    for service in made:
        service.holder.close()


def test_checkpoints_are_found_after_a_restart(
    folders: dict[str, Path], tmp_path: Path, connect: Connect
) -> None:
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([3, 4, 5]),
        loss_fn_inputs={"target_tokens": types.TensorData([4, 5, 6], "int64", [3])},
    )
    losses, ids = [], set()
    state = sampler = ""
    for _ in range(2):
        with LocalServer({"tiny": folders["qwen3"]}, tmp_path / "state") as server:
            service = connect(server.url, server.key)
            if state:
                client = service.create_training_client_from_state_with_optimizer(state)
                logprobs = service.create_sampling_client(model_path=sampler).compute_logprobs
                scored = logprobs(types.ModelInput.from_ints([3, 4, 5, 6])).result()
                assert -sum(scored[1:]) == pytest.approx(losses[0], abs=1e-3)
            else:
                client = service.create_lora_training_client("tiny", rank=4)
                client.forward_backward([datum], "cross_entropy")
                client.optim_step(types.AdamParams(learning_rate=0.01)).result()
                state = client.save_state("s").result().path
                sampler = client.save_weights_for_sampler("s").result().path
            losses.append(client.forward([datum], "cross_entropy").result().metrics["loss:sum"])
            ids.add(client.model_id)
            pid = server.pid
        assert gone(pid)
    assert losses[0] == losses[1] and len(ids) == 2


PARENT = """
    import sys, time
    sys.path.insert(0, {package!r})
    sys.path.insert(0, "relative")
    from pathlib import Path
    from swegym_tutorial.server.process import LocalServer
    assert not {{"torch", "starlette", "tinker", "transformers"}} & set(sys.modules)
    server = LocalServer({{"tiny": Path({folder!r})}}, Path("state"))
    server.start()
    print(server.pid, server.url, server.key, flush=True)
    time.sleep(600)
"""


def test_the_child_ends_with_a_parent_that_is_killed(
    folders: dict[str, Path], tmp_path: Path, connect: Connect
) -> None:
    """The parent runs in a folder of its own, and knows the package by its sys.path alone."""
    script = textwrap.dedent(PARENT.format(package=str(PACKAGE), folder=str(folders["qwen3"])))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    (tmp_path / "torch.py").write_text("raise RuntimeError('a file beside the user is no module of ours')")
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, cwd=tmp_path, env=environment, text=True
    )
    assert parent.stdout is not None
    pid, url, key = parent.stdout.readline().split()
    assert os.getsid(int(pid)) != os.getsid(parent.pid)
    assert key not in " ".join(psutil.Process(int(pid)).cmdline())
    connect(url, key).create_lora_training_client("tiny", rank=4)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone(int(pid))


def test_a_session_that_falls_silent_ends_and_its_checkpoints_stay(
    folders: dict[str, Path], tmp_path: Path, connect: Connect
) -> None:
    with LocalServer({"tiny": folders["qwen3"]}, tmp_path / "state", session_patience=8.0) as server:
        silent = connect(server.url, server.key)
        client = silent.create_lora_training_client("tiny", rank=4)
        path = client.save_state("s").result().path
        client.save_weights_and_get_sampling_client()
        assert list((tmp_path / "state").glob("*/ephemeral/*"))
        silent.holder.close()  # ends the heartbeats
        deadline = time.monotonic() + 60
        while list((tmp_path / "state").glob("*/ephemeral/*")):
            assert time.monotonic() < deadline, "the session didn't end"
            time.sleep(0.2)
        answer = httpx.post(
            f"{server.url}/api/v1/get_info",
            json={"model_id": client.model_id},
            headers={"X-API-Key": server.key},
            trust_env=False,
        )
        assert answer.status_code == 404 and "without a heartbeat" in answer.json()["detail"]
        other = connect(server.url, server.key)
        assert other.create_training_client_from_state(path).get_info().lora_rank == 4


def test_a_server_that_cannot_start_says_why(folders: dict[str, Path], tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    server = LocalServer({"tiny": empty}, tmp_path / "state")
    with pytest.raises(RuntimeError, match="ended before it was ready") as raised:
        server.start()
    assert str(empty) in str(raised.value) and str(server.log_path) in str(raised.value)
    assert gone(server.pid)
    server.stop()  # and again: nothing is left to stop


def test_missing_packages_are_named_with_their_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(server_main, "NEEDED", ("torch", "no_such_package"))
    for start in (
        LocalServer({"tiny": tmp_path}, tmp_path).start,
        lambda: server_main.serve({}, state_dir=tmp_path),
    ):
        with pytest.raises(RuntimeError, match=r'no_such_package: pip install "swegym_tutorial\[local\]"'):
            start()


def test_serving_by_hand_tells_how_to_connect_and_ends_by_a_signal(
    folders: dict[str, Path], tmp_path: Path, connect: Connect
) -> None:
    script = f"""
from pathlib import Path
from swegym_tutorial.server import serve
serve({{"tiny": Path({str(folders["qwen3"])!r})}}, state_dir=Path("state"), api_key="tml-mine")
print("ended")
"""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=tmp_path, env=environment, text=True
    )
    assert process.stdout is not None
    first, url, key = (process.stdout.readline().strip() for _ in range(3))
    assert first.startswith("serving tiny (LoRA alpha 32)") and key == "export TINKER_API_KEY=tml-mine"
    address = url.removeprefix("export TINKER_BASE_URL=")
    sampler = connect(address, "tml-mine").create_sampling_client(base_model="tiny")
    assert len(sampler.sample(types.ModelInput.from_ints([3]), 1, types.SamplingParams(max_tokens=2, stop=[])).result().sequences[0].tokens) == 2  # fmt: skip
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120)[0] == "ended\n" and process.returncode == 0
