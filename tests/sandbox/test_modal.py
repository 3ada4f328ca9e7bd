"""Modal's sandboxes, through the real client, against a Modal server of the tests' own (tests/modal_server).

What every kind of sandbox promises is tested in test_contract.py; here is what is Modal's alone: what it is asked
for, and every way in which it was seen to fail.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

if "modal" not in os.environ.get("SWEGYM_TUTORIAL_REQUIRE", "").split(","):
    pytest.importorskip("modal", reason="the package modal is not installed")

from grpclib import GRPCError, Status
from modal_server import ModalServer

from swegym_tutorial import TrainingConfig
from swegym_tutorial.sandbox import (
    Leftover,
    Sandbox,
    SandboxError,
    contained,
    modal_client,
)
from swegym_tutorial.sandbox import modal as kind
from swegym_tutorial.sandbox import remote as core
from swegym_tutorial.sandbox.container import Throttled
from swegym_tutorial.sandbox.modal import ModalBackend, ModalContainer, leftovers, reap
from swegym_tutorial.tasks import Task

from .conftest import processes_of, wait_for

ROOT = Path(__file__).parents[2]
QUICK = (
    50.0  # seconds, with the start of Python on a busy machine; the client's own word comes after a minute
)
IMAGE = "example/sweb.eval.x86_64.small_s_small-1:latest"


@pytest.fixture
def server(modal_server: ModalServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModalServer]:
    """The server, and its settings in the environment; what a test changed of it is undone."""
    for name, value in modal_server.settings.items():
        monkeypatch.setenv(name, value)
    running = set(modal_server.running)
    yield modal_server
    modal_server.create_seconds, modal_server.build_seconds, modal_server.page_size = 0.0, 0.0, 100
    modal_server.holding = False
    modal_server.rejecting_tokens = False
    modal_server.missing_images.clear()
    modal_server.contents.clear()
    modal_server.throttle(0)
    assert wait_for(lambda: set(modal_server.running) <= running), "a test left sandboxes behind"


@pytest.fixture(params=["1", "2"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The two kinds of sandboxes that Modal has, and that the client asks for by different calls."""
    monkeypatch.setenv("MODAL_SANDBOX_V2", "1" if request.param == "2" else "0")
    return str(request.param)


@pytest.fixture
def sandboxes(server: ModalServer) -> Iterator[ModalBackend]:
    opened = ModalBackend(TrainingConfig.laptop(), run="run-1")
    yield opened
    opened.close()


@pytest.fixture
def sandbox(sandboxes: ModalBackend, small_task: Task) -> Iterator[Sandbox]:
    opened = sandboxes.open(small_task)
    yield opened
    opened.close()


def id_of(sandbox: Sandbox) -> str:
    found: str = sandbox.container.id  # type: ignore[attr-defined]
    return found


def in_child(
    code: str, settings: dict[str, str] | None = None, *, without: tuple[str, ...] = ("MODAL_",)
) -> tuple[str, float]:
    """Run code in a Python of its own, whose client reads its settings anew; return what it printed, and seconds."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    start = time.monotonic()
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={**outside, "PYTHONPATH": str(ROOT), "MODAL_CONFIG_PATH": "/none.toml", **(settings or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert answer.returncode == 0, answer.stdout[-3000:]
    return answer.stdout, time.monotonic() - start


# What Modal is asked for


@pytest.mark.parametrize(
    "config",
    [
        TrainingConfig.spindle(),
        TrainingConfig.laptop(sandbox_cpus=0.5, sandbox_memory_mb=3000, sandbox_lifetime=900.5),
    ],
    ids=["spindle", "other"],
)
def test_case_20_what_is_asked_for_is_what_the_settings_say(
    server: ModalServer, small_task: Task, config: TrainingConfig, form: str
) -> None:  # nemo-platform#2101
    sandboxes = ModalBackend(config, run="run 1/a")
    opened = sandboxes.open(small_task)
    asked = server.asked[-1]
    assert asked.sandbox_id == id_of(opened) and asked.v2 == (form == "2")
    assert (asked.milli_cpu, asked.memory_mb) == (config.sandbox_cpus * 1000, config.sandbox_memory_mb)
    assert asked.lifetime == {7200.0: 7200, 900.5: 901}[config.sandbox_lifetime]
    assert asked.network == "BLOCKED"
    assert asked.command[0] == "/bin/bash" and asked.command[-1] == str(asked.lifetime)
    assert asked.image[0] == "FROM python:3.11-slim" and asked.image[-1] == "ENTRYPOINT []"
    assert any("git" in command for command in asked.image) and any("pytest" in c for c in asked.image)
    assert {
        "project": "swegym-tutorial",
        "run": "run-1-a",
        "instance": "small__small-1",
    }.items() <= asked.tags.items()
    assert opened.exec("cat README", timeout=20).output == "A small repository.\n"
    sandboxes.close()
    assert asked.sandbox_id not in server.running


def git(folder: Path, *arguments: str) -> str:
    names = {
        f"GIT_{who}_{what}": "a@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env={**os.environ, **names}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def image_task(server: ModalServer, small_task: Task, tmp_path: Path) -> Task:
    """A task whose image has the repository, one commit later than the task's, and a stray change."""
    repository = tmp_path / "image" / "testbed"
    repository.mkdir(parents=True)
    git(repository, "init", "-q")
    commits = []
    for text in ("before\n", "after\n"):
        (repository / "module.py").write_text(text)
        git(repository, "add", ".")
        git(repository, "commit", "-q", "-m", text)
        commits.append(git(repository, "rev-parse", "HEAD"))
    (repository / "module.py").write_text("stray\n")
    server.contents[IMAGE] = tmp_path / "image"
    return replace(small_task, instance_id="small__small-9", image=IMAGE, base_commit=commits[0], files={})


def test_an_image_is_opened_at_the_tasks_commit(
    server: ModalServer, sandboxes: ModalBackend, image_task: Task
) -> None:
    opened = sandboxes.open(replace(image_task, setup="export COLOUR=blue"))
    result = opened.exec("cat module.py; git rev-parse HEAD; git status --short; echo $COLOUR", timeout=20)
    assert result.output == f"before\n{image_task.base_commit}\nblue\n"
    assert server.asked[-1].image == (f"FROM {IMAGE}", "FROM base", "ENTRYPOINT []")
    assert sandboxes.open(image_task).exec("cat module.py", timeout=20).output == "before\n"


def test_case_11_an_image_that_is_missing_is_named_with_its_task(
    server: ModalServer, small_task: Task, image_task: Task
) -> None:  # SWE-Gym#18, OpenHands#7168
    told: list[str] = []
    sandboxes = ModalBackend(TrainingConfig.laptop(), say=told.append)
    absent = replace(image_task, instance_id="small__small-8", image="example/absent:1")
    server.missing_images.add("example/absent:1")
    with pytest.raises(SandboxError, match=r"small__small-8.*example/absent:1.*manifest unknown"):
        sandboxes.open(absent)
    missing = sandboxes.missing([small_task, image_task, absent, replace(absent, instance_id="another")])
    assert missing.keys() == {"small__small-8", "another"}
    assert all("example/absent:1" in reason for reason in missing.values())
    assert len(told) == 2 and any(text.startswith("image 2 of 2") for text in told)
    sandboxes.open(image_task)
    sandboxes.close()


# Many at once


def test_case_19_a_storm_of_starts_is_held_back(server: ModalServer, small_task: Task) -> None:
    # tinker-cookbook#302, uni-agent#47
    sandboxes = ModalBackend(TrainingConfig.laptop(sandbox_starts=3))
    server.holding, server.most_creating = True, 0
    with ThreadPoolExecutor(12) as pool:
        starting = pool.map(sandboxes.open, [small_task] * 12)
        assert wait_for(lambda: server.creating == 3)
        server.holding = False
        server.create_seconds = 0.2
        opened = list(starting)
    assert server.most_creating == 3
    assert len({id_of(one) for one in opened}) == 12
    sandboxes.close()


@pytest.mark.parametrize("retry_after", [None, 0.1], ids=["refused", "told when to come back"])
def test_case_19_throttling_is_waited_out(
    server: ModalServer,
    sandboxes: ModalBackend,
    small_task: Task,
    retry_after: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core, "FIRST_PAUSE", 0.05)
    server.throttle(4, retry_after)
    assert sandboxes.open(small_task).exec("echo opened", timeout=20).output == "opened\n"


def test_case_19_throttling_without_end_is_an_error(
    server: ModalServer, sandboxes: ModalBackend, small_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "FIRST_PAUSE", 0.01)
    server.throttle(1000)
    with pytest.raises(Throttled, match=r"small__small-1.*rate limit"):
        sandboxes.open(small_task)


# Sandboxes that die, and calls that are not answered


USES: dict[str, Callable[[Sandbox], object]] = {
    "exec": lambda sandbox: sandbox.exec("true", timeout=20),
    "write": lambda sandbox: sandbox.write_file("/testbed/x", b""),
    "write much": lambda sandbox: sandbox.write_file("/testbed/x", b"x" * 100_000),
    "read": lambda sandbox: sandbox.read_file("/testbed/README"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_dead_sandbox_is_a_fault(
    server: ModalServer,
    sandboxes: ModalBackend,
    small_task: Task,
    use: Callable[[Sandbox], object],
    form: str,
) -> None:
    for end, why in (
        (server.kill, "it was terminated on Modal"),
        (server.end_lifetime, "its life on Modal is over"),
    ):
        opened = sandboxes.open(small_task)
        end(id_of(opened))
        for _ in range(2):
            with pytest.raises(SandboxError, match=f"the sandbox broke: {why}"):
                use(opened)
        opened.close()


def test_death_during_a_command_is_told_from_a_command_that_is_killed(
    server: ModalServer, sandboxes: ModalBackend, small_task: Task, long_sleep: str, form: str
) -> None:
    opened = sandboxes.open(small_task)
    assert opened.exec("echo begun; exit 137", timeout=20).exit_code == 137
    assert opened.exec("echo begun; kill -9 $$", timeout=20).exit_code == 137
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(opened.exec, f"echo begun; {long_sleep}", timeout=600)
        assert wait_for(lambda: processes_of(long_sleep))
        server.kill(id_of(opened))
        with pytest.raises(SandboxError, match="the sandbox broke: it was terminated on Modal"):
            future.result(timeout=120)


def test_the_end_of_the_lifetime_is_told(server: ModalServer, small_task: Task) -> None:
    sandboxes = ModalBackend(TrainingConfig.laptop(sandbox_lifetime=5.2))
    opened = sandboxes.open(small_task)  # which a busy machine does in that time
    with pytest.raises(SandboxError, match="its lifetime of 5 s is over"):
        opened.exec("sleep 600", timeout=600)
    sandboxes.close()


def test_a_command_that_modal_itself_ends_is_a_fault_and_what_it_wrote_is_there(sandbox: Sandbox) -> None:
    # The client then says nothing but -1, and only where the output was read before or meanwhile.
    inner = sandbox.container  # type: ignore[attr-defined]
    taken: list[bytes] = []
    for seconds in (1, 10, 60):  # a busy machine may not have begun it
        short = ModalContainer(inner._modal, inner._sandbox, lifetime=seconds)
        program = ["/bin/bash", "-c", "echo begun; sleep 600"]
        with pytest.raises(SandboxError, match=f"life of {seconds} s ended"):
            short.run(program, {}, lambda stream, data: taken.append(data))
        if taken:
            break
    assert taken == [b"begun\n"]


def test_a_command_of_which_nothing_is_heard_is_given_up(
    server: ModalServer, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contained, "START_PATIENCE", 0.5)
    monkeypatch.setattr(contained, "SLACK", 0.5)
    server.hang_execs()
    with pytest.raises(SandboxError, match="did not end"):
        sandbox.exec("echo unheard", timeout=1)
    assert wait_for(lambda: id_of(sandbox) not in server.running)


def test_a_sandbox_of_which_nothing_is_heard_is_not_opened(
    server: ModalServer, sandboxes: ModalBackend, small_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.hang_execs()
    with monkeypatch.context() as patch:
        patch.setattr(kind, "OPENING_PATIENCE", 1.0)
        with pytest.raises(SandboxError, match="Modal did not answer within 1 s"):
            sandboxes.open(small_task)
    monkeypatch.setattr(ModalBackend, "start_patience", 2.0)
    server.holding = True
    before = len(server.containers)
    with pytest.raises(SandboxError, match="modal: no sandbox was made within 2 s"):
        sandboxes.open(small_task)
    assert wait_for(lambda: server.creating == 1)
    server.holding = False
    assert wait_for(
        lambda: len(server.containers) > before
    )  # it is made when nobody waits any more, and is ended
    assert wait_for(lambda: not set(server.running) & set(list(server.containers)[before:]))


def test_output_goes_on_after_the_connection_broke(
    server: ModalServer, sandbox: Sandbox, long_sleep: str
) -> None:
    command = f": {long_sleep}; for i in {{1..25}}; do echo $i; sleep 0.1; done"
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(sandbox.exec, command, timeout=60)
        assert wait_for(lambda: processes_of(long_sleep))
        time.sleep(0.8)
        server.drop_router()
        time.sleep(0.3)
        server.restore_router()
        result = future.result(timeout=60)
    assert result.output == "".join(f"{i}\n" for i in range(1, 26)) and result.exit_code == 0


@pytest.mark.slow
def test_a_worker_that_is_gone_is_a_fault(
    server: ModalServer, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contained, "START_PAUSES", ())
    server.drop_router()
    start = time.monotonic()
    try:
        with pytest.raises(SandboxError):
            sandbox.exec("true", timeout=5)
        assert time.monotonic() - start < 120
    finally:
        server.restore_router()


def test_a_command_of_which_all_is_refused_is_told_once_and_not_run_twice(
    server: ModalServer,
    sandboxes: ModalBackend,
    small_task: Task,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    count, opened, starts = server.count, [sandboxes.open(small_task) for _ in range(5)], 0
    gc.collect()  # what other tests left to be told of
    caplog.clear()

    def refuse(name: str) -> None:
        nonlocal starts
        count(name)
        starts += name == "TaskExecStart"
        if name in ("TaskExecStdioRead", "TaskExecWait"):
            raise GRPCError(Status.DATA_LOSS, "the worker has lost it")

    monkeypatch.setattr(server, "count", refuse)
    for sandbox in opened:
        with pytest.raises(SandboxError, match="the worker has lost it"):
            sandbox.exec("true", timeout=5)
    assert starts == 5
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_token_that_is_no_longer_taken(
    server: ModalServer, sandboxes: ModalBackend, small_task: Task
) -> None:
    server.rejecting_tokens = True
    with pytest.raises(SandboxError, match="modal token new"):
        sandboxes.open(small_task)


# Interrupts and ends


def test_case_18_an_interrupt_while_opening_leaves_nothing(
    server: ModalServer, sandboxes: ModalBackend, small_task: Task
) -> None:  # tinker-cookbook#943
    sandboxes.open(small_task).close()
    before, server.holding = len(server.containers), True

    def interrupt() -> None:
        wait_for(lambda: server.creating)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        sandboxes.open(small_task)
    thread.join()
    assert server.creating == 1  # nobody waited for it
    server.holding = False
    assert wait_for(lambda: len(server.containers) > before)
    assert wait_for(lambda: not set(server.running) & set(list(server.containers)[before:]))


def test_case_18_closing_while_opening_leaves_nothing(
    server: ModalServer, sandboxes: ModalBackend, small_task: Task
) -> None:
    server.holding = True
    before = len(server.containers)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(sandboxes.open, small_task) for _ in range(4)]
        assert wait_for(lambda: server.creating >= 2)
        release = threading.Timer(1.0, setattr, (server, "holding", False))
        release.start()
        sandboxes.close()  # which waits for those
        release.join()
        for future in futures:
            with pytest.raises(SandboxError, match="closed"):
                future.result(timeout=30)
    assert wait_for(lambda: not set(server.running) & set(list(server.containers)[before:]))


def test_an_interrupt_waits_for_no_image(server: ModalServer, image_task: Task) -> None:
    told: list[str] = []
    sandboxes = ModalBackend(TrainingConfig.laptop(), say=told.append)
    tasks = [replace(image_task, instance_id=f"small-{n}", image=f"example/slow:{n}") for n in range(20)]
    sandboxes.missing(tasks[:1])
    server.build_seconds = 60.0
    builds, interrupted = server.calls["ImageJoinStreaming"], list[float]()

    def interrupt() -> None:
        wait_for(lambda: len(told) == 2 and server.calls["ImageJoinStreaming"] > builds)
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        sandboxes.missing(tasks)
    sandboxes.close()
    assert time.monotonic() - interrupted[0] < 40 and len(told) == 2
    thread.join()


# Tags, listing, reaping


def names(found: list[Leftover]) -> set[str]:
    return {left.name for left in found}


def test_case_18_the_sandboxes_of_a_run_are_listed_and_reaped(
    server: ModalServer, small_task: Task, form: str
) -> None:  # tinker-cookbook#943
    server.page_size = 2
    one, two = (ModalBackend(TrainingConfig.laptop(), run=f"run {n}") for n in (1, 2))
    first = {id_of(one.open(small_task)) for _ in range(3)}
    second = {id_of(two.open(small_task)) for _ in range(2)}
    assert names(leftovers("run 1")) == first and names(leftovers("run 2")) == second
    assert leftovers("run") == [] and first | second <= names(leftovers())
    left = leftovers("run 2")[0]
    assert (left.kind, left.run, left.orphan) == ("modal", "run-2", False)
    assert left.age is not None and 0 <= left.age < 600
    for left in leftovers("run 1"):
        reap(left)
        reap(left)
    assert leftovers("run 1") == [] and not first & set(server.running)
    one.close()
    two.close()
    assert leftovers("run 2") == []


def test_where_nothing_was_ever_opened_nothing_is_left(
    server: ModalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "APP", "never-used")
    assert leftovers() == []
    assert "never-used" not in server.apps


OPEN_AND_WAIT = """
import sys, time
from swegym_tutorial import TrainingConfig, load_tasks
from swegym_tutorial.sandbox import backend
opened = backend("modal", TrainingConfig.laptop(), run="of a killed driver").open(load_tasks()[0])
print(opened.container.id, flush=True)
time.sleep(100)
"""


def test_case_18_what_a_killed_driver_left_is_found_and_reaped(server: ModalServer) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", OPEN_AND_WAIT],
        env={**os.environ, **server.settings, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    name = driver.stdout.readline().strip()
    (left,) = leftovers("of a killed driver")
    assert (left.name, left.orphan) == (name, False)
    driver.kill()
    driver.wait()
    driver.stdout.close()
    (left,) = leftovers("of a killed driver")
    assert left.orphan is True
    reap(left)
    assert name not in server.running


END_IN_THE_MIDST = """
import os, threading, time
from swegym_tutorial import TrainingConfig, load_tasks
from swegym_tutorial.sandbox import SandboxError, backend
opened = backend("modal", TrainingConfig.laptop(), run="of a driver that ended")
sandboxes = [opened.open(load_tasks()[0]) for _ in range(2)]
def run():
    try:
        sandboxes[0].exec("sleep 1000", timeout=1000)
    except SandboxError as error:
        os.write(1, f"{error}\\n".encode())  # print has a lock, with which the interpreter's end may catch it
threading.Thread(target=run, daemon=True).start()
time.sleep(0.5)
"""


def test_case_18_a_driver_that_ends_in_the_midst_leaves_nothing(server: ModalServer) -> None:
    """A script that ends without closing, or a kernel that is restarted (tinker-cookbook#943)."""
    before = len(server.containers)
    said, _ = in_child(END_IN_THE_MIDST, server.settings)
    mine = set(list(server.containers)[before:])
    assert len(mine) == 2 and not mine & set(server.running)
    assert said in ("", "the sandbox is closed\n")


END_AFTER_THE_CLIENT = """
import atexit, contextlib
import modal
from modal._utils.async_utils import synchronizer
from swegym_tutorial import TrainingConfig, load_tasks
from swegym_tutorial.sandbox import backend
def ask_too_late():
    synchronizer._loop.call_soon_threadsafe(synchronizer._stopping.set)
    synchronizer._thread.join()
    with contextlib.suppress(RuntimeError):
        modal.App.lookup("late")
    print("asked")
atexit.register(ask_too_late)  # called between the backend's and the client's own
opened = backend("modal", TrainingConfig.laptop())
opened.open(load_tasks()[0])
"""


def test_a_call_that_comes_after_the_clients_end_is_not_told(server: ModalServer) -> None:
    """A thread that still asks while all ends: the client calls its own end an unexpected death."""
    said, _ = in_child(END_AFTER_THE_CLIENT, server.settings)
    assert said == "asked\n"


def test_another_machines_driver_is_not_judged() -> None:
    assert kind._is_orphan({"host": "elsewhere", "pid": "1.1"}) is None
    assert kind._is_orphan({}) is None
    mine = kind._driver()
    assert kind._is_orphan(mine) is False
    assert kind._is_orphan({**mine, "pid": f"{os.getpid()}.12345"}) is True  # the number is used again


# What the driver needs: each in a process of its own, whose client knows nothing yet


ASK = """
from swegym_tutorial.sandbox import SandboxUnavailable, backend
try:
    backend("modal").close()
    print("available")
except SandboxUnavailable as error:
    print(error)
"""


def test_without_the_package_the_mend_is_told() -> None:
    said, _ = in_child("import sys; sys.modules['modal'] = None\n" + ASK)
    assert 'pip install "modal' in said


def test_without_a_token_the_mend_is_told_in_seconds() -> None:
    said, seconds = in_child(ASK)
    assert "needs a token of Modal" in said and "`modal token new`" in said and seconds < QUICK


def test_with_a_wrong_token_the_mend_is_told_in_seconds(server: ModalServer) -> None:
    said, seconds = in_child(ASK, {**server.settings, "MODAL_TOKEN_SECRET": "as-wrong"})
    assert "refuses the token" in said and "`modal token new`" in said and seconds < QUICK
    assert in_child(ASK, server.settings)[0] == "available\n"


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:{closed}", "https://no-such-host.invalid", "https://127.0.0.1:{closed}"]
)
def test_an_unreachable_server_is_told_in_seconds(server: ModalServer, url: str) -> None:
    with socket.socket() as taken:  # bound and not listening: nobody else gets the port, and it refuses
        taken.bind(("127.0.0.1", 0))
        address = url.format(closed=taken.getsockname()[1])
        said, seconds = in_child(ASK, {**server.settings, "MODAL_SERVER_URL": address})
    assert "Modal cannot be reached" in said and address in said and seconds < QUICK


def test_a_server_that_accepts_and_says_nothing_is_told(server: ModalServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        code = "from swegym_tutorial.sandbox import modal_client; modal_client.HELLO = 2\n" + ASK
        said, seconds = in_child(code, {**server.settings, "MODAL_SERVER_URL": url})
    assert "did not answer within 2 s" in said and seconds < QUICK


def test_a_container_on_modal_needs_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    modal = modal_client.client()
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.setenv(name, "")
    assert not modal_client._has_token(modal)
    monkeypatch.setenv("MODAL_IS_REMOTE", "1")
    assert modal_client._has_token(modal)


WORK_QUIETLY = """
from swegym_tutorial import TrainingConfig, load_tasks
from swegym_tutorial.sandbox import SandboxError, backend
from dataclasses import replace
task = load_tasks()[0]
sandboxes = backend("modal", TrainingConfig.laptop())
opened = sandboxes.open(task)
opened.exec("echo out; echo err >&2", timeout=20)
opened.write_file("/testbed/x", b"x" * 100_000)
try:
    sandboxes.open(replace(task, image="example/absent:2", files={}))
except SandboxError:
    print("done")
sandboxes.close()
"""


def test_the_client_says_nothing_on_the_terminal(server: ModalServer) -> None:
    server.missing_images.add("example/absent:2")
    server.throttle(1, 0.1)
    assert in_child(WORK_QUIETLY, server.settings)[0] == "done\n"


FLOOD = """
import json, threading
import psutil
from swegym_tutorial import TrainingConfig, load_tasks
from swegym_tutorial.sandbox import backend
me = psutil.Process()
sandboxes = backend("modal", TrainingConfig.laptop())
opened = sandboxes.open(load_tasks()[0])
opened.exec("head -c 1000000 /dev/zero", timeout=60)
before, peak, done = me.memory_info().rss, 0, threading.Event()
def look():
    global peak
    while not done.wait(0.01):
        peak = max(peak, me.memory_info().rss)
watch = threading.Thread(target=look)
watch.start()
result = opened.exec("head -c 200000000 /dev/zero", timeout=120, output_bytes=1000)
done.set()
watch.join()
print(json.dumps([result.truncated_bytes, peak - before]))
sandboxes.close()
"""


@pytest.mark.slow
def test_case_14_200_mb_of_output_stay_bounded(server: ModalServer) -> None:  # mini-swe-agent#639
    # The client's HTTP/2 window lets 64 MiB come ahead of the reader, whatever the size of the output.
    left_out, grown = json.loads(in_child(FLOOD, server.settings)[0])
    assert left_out == 200_000_000 - 1000
    assert grown < 110 << 20


def test_a_storm_of_commands_on_one_backend(
    server: ModalServer, sandboxes: ModalBackend, small_task: Task
) -> None:
    def work(number: int) -> list[str]:
        opened = sandboxes.open(small_task)
        said = [opened.exec(f"echo {number}.{n}; sleep 0.05", timeout=60).output for n in range(4)]
        opened.close()
        return said

    threads = len(lasting())
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(16))) == [[f"{i}.{n}\n" for n in range(4)] for i in range(16)]
    assert wait_for(lambda: len(lasting()) <= threads + 2), f"threads were left behind: {lasting()}"


def lasting() -> list[str]:
    """The names of the threads, without the pool that the tests' server fills by and by."""
    return [thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]


# Other releases of the client


@pytest.mark.sdks
@pytest.mark.parametrize("release", ["1.5.5"])
def test_another_release_of_modal(release: str) -> None:
    python = ROOT / f".venv-modal-{release}" / "bin" / "python"
    assert python.exists(), f"{python} is missing: `make sdks` builds it"
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MODAL_")}
    files = ["tests/sandbox/test_modal.py", "tests/sandbox/test_contract.py", "tests/test_modal_app.py"]
    answer = subprocess.run(
        [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", "modal"],
        cwd=ROOT,
        env={**outside, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    version = subprocess.run(
        [str(python), "-c", "import modal; print(modal.__version__)"], capture_output=True, text=True
    )
    assert version.stdout.strip() == release
    assert answer.returncode == 0, answer.stdout[-5000:]
