"""Sandboxes in containers, on a real podman: limits, deaths, images, leftovers, and whole gradings."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import swegym_tutorial
from swegym_tutorial import TrainingConfig, load_tasks
from swegym_tutorial.grading import Outcome, grade
from swegym_tutorial.patches import capture_patch
from swegym_tutorial.sandbox import (
    Sandbox,
    SandboxError,
    SandboxUnavailable,
    backend,
    contained,
    docker,
    images,
    reaper,
    remote,
    supervisor,
)  # fmt: skip
from swegym_tutorial.sandbox.docker import DockerBackend
from swegym_tutorial.tasks import Task

from .conftest import gone, processes_of, wait_for
from .podman import IMAGE, Engine
from .proxy import Proxy, cut_after, lose_after, proxied

Make = Callable[..., DockerBackend]
pytestmark = pytest.mark.slow  # the engine alone takes seconds to start


@pytest.fixture
def opened(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[contextlib.ExitStack]:
    """What a test opens here is closed in the opposite order: the backends before the way to their engine."""
    for name, value in engine.settings.items():
        monkeypatch.setenv(name, value)
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def make(opened: contextlib.ExitStack) -> Make:
    """Make a backend with changed settings, which is closed afterwards."""

    def made(kind: type[DockerBackend] = DockerBackend, run: str = "", **changes: Any) -> DockerBackend:
        return opened.enter_context(closing(kind(TrainingConfig.laptop(**changes), run=run)))

    return made


@pytest.fixture(scope="module")
def shared(engine: Engine) -> Iterator[DockerBackend]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine.settings.items():
            patch.setenv(name, value)
        with closing(DockerBackend(TrainingConfig.laptop())) as made:
            yield made


@pytest.fixture
def sandbox(shared: DockerBackend, small_task: Task) -> Iterator[Sandbox]:
    with closing(shared.open(small_task)) as opened:
        yield opened


def output(sandbox: Sandbox, command: str, timeout: float = 60) -> str:
    return sandbox.exec(command, timeout=timeout).output


def name_of(sandbox: Sandbox) -> str:
    name: str = sandbox.container.name  # type: ignore[attr-defined]
    return name


# What a container may


# Case 20 (nemo-platform#2101): limits that are lower than asked, silently.


def test_case_20_the_limits_are_those_asked_for(make: Make, engine: Engine, small_task: Task) -> None:
    config = {"sandbox_cpus": 1.5, "sandbox_memory_mb": 300, "sandbox_processes": 77}
    sandbox = make(**config, sandbox_lifetime=1234.5).open(small_task)
    told = docker.connect().inspect_container(name_of(sandbox))
    limits = told["HostConfig"]
    assert limits["NanoCpus"] == 1.5e9 and limits["PidsLimit"] == 77
    assert limits["Memory"] == limits["MemorySwap"] == 300 << 20
    assert limits["NetworkMode"] == "none" and limits["AutoRemove"]
    assert "no-new-privileges" in limits["SecurityOpt"]
    assert told["Config"]["Entrypoint"][-1] == "1235" and not told["Config"]["Cmd"]
    groups = "/sys/fs/cgroup"
    if Path(groups, "memory").exists():  # control groups of version 1
        files = "memory/memory.limit_in_bytes pids/pids.max cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us"
        inside = output(sandbox, f"cd {groups}; cat {files}")
        assert inside.split() == [str(300 << 20), "77", "150000", "100000"]
    else:
        inside = output(sandbox, f"cd {groups}; cat memory.max pids.max cpu.max")
        assert inside.split() == [str(300 << 20), "77", "150000", "100000"]


def test_there_is_no_network(sandbox: Sandbox) -> None:
    assert output(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1").split() == ["lo"]
    attempt = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=5)"
    assert "Network is unreachable" in output(sandbox, f'python -c "{attempt}"')


def test_root_has_few_rights(sandbox: Sandbox) -> None:
    status = output(sandbox, "grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status").split()
    wanted = f"{1 << 0 | 1 << 1 | 1 << 3:016x}"  # CHOWN, DAC_OVERRIDE, FOWNER
    assert status[1::2] == [wanted, wanted, "1"]
    assert output(sandbox, "ls /proc/self/fd").split() == ["0", "1", "2", "3"]
    assert sandbox.exec("chown 1:1 README && chmod 0 README && cat README", timeout=60).exit_code == 0


def test_nothing_of_the_driver_is_inside(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = output(sandbox, "env; cat /proc/*/environ | tr '\\0' '\\n'; cat /proc/mounts; ls /")
    assert "DOCKER_HOST" not in seen and str(Path(swegym_tutorial.__file__).parent) not in seen
    assert "LANG=C.UTF-8\n" in seen and "TZ=UTC\n" in seen and "PYTHONHASHSEED=0\n" in seen
    assert output(sandbox, "echo ~; whoami") == "/home/agent\nroot\n"


def test_the_users_proxy_and_its_password_stay_outside(
    make: Make, small_task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"proxies": {"default": {"httpProxy": "http://me:secret@proxy"}}}')
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    made = make()
    assert "secret" in str(made._api._general_configs)
    assert "secret" not in output(made.open(small_task), "env; cat /proc/1/environ | tr '\\0' '\\n'")


def test_a_fork_bomb_is_held(make: Make, small_task: Task, long_sleep: str) -> None:
    sandbox = make(sandbox_processes=64).open(small_task)
    bomb = f"for i in {{1..500}}; do setsid {long_sleep} & done; ls -d /proc/[0-9]* | wc -l; :(){{ :|:& }}; :; wait"
    for seconds in (3, 12, 48):  # a busy machine may need longer to be full
        result = sandbox.exec(bomb, timeout=seconds)
        if full := "Resource temporarily unavailable" in result.output:
            break
    assert full, result
    assert gone(long_sleep)
    assert output(sandbox, "echo usable") == "usable\n"


def test_a_memory_bomb_is_killed_and_the_sandbox_lives(make: Make, small_task: Task) -> None:
    sandbox = make(sandbox_memory_mb=128).open(small_task)
    result = sandbox.exec('python -c "x = bytearray(1 << 30); print(len(x))"; echo $?', timeout=60)
    assert result.output.endswith("137\n") and str(1 << 30) not in result.output
    assert output(sandbox, "echo usable") == "usable\n"


def test_a_flood_is_killed(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contained, "OUTPUT_LIMIT", 20 << 20)
    result = sandbox.exec("yes; echo never", timeout=60)
    assert result.exit_code == 137 and not result.timed_out and result.truncated_bytes > 19 << 20
    assert result.output.endswith("y\n[killed: it wrote more than 20 MB of output]\n")
    assert output(sandbox, "ps ax -o stat,comm | grep -v ^Z | grep -c 'yes$'; echo usable") == "0\nusable\n"


# Ends that are not a command's own


@pytest.mark.parametrize(
    "attack", ["kill -9 -1; SLEEP", "kill -9 $PPID; SLEEP", "kill -TERM 0; SLEEP", "kill -9 1"]
)
def test_a_command_that_kills_its_supervisor_is_a_result(
    sandbox: Sandbox, long_sleep: str, attack: str
) -> None:
    start = f"setsid {long_sleep} & "
    result = sandbox.exec(start + attack.replace("SLEEP", long_sleep), timeout=30)
    assert result.exit_code in (0, 137, 143) and not result.timed_out
    assert gone(long_sleep)
    assert output(sandbox, "echo usable") == "usable\n"


def test_case_12_a_stopped_supervisor_does_not_stop_the_deadline(
    sandbox: Sandbox, long_sleep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 12 (evalscope#1685): the deadline inside does not hold, the second call from outside does."""
    monkeypatch.setattr(contained, "SLACK", 5.0)  # also for the engine to hear of its end
    for seconds in (0.5, 10, 60):  # a busy machine may not even have begun it
        result = sandbox.exec(f"echo begun; {long_sleep} & kill -STOP -1; {long_sleep}", timeout=seconds)
        if result.output:
            break
    assert (result.exit_code, result.timed_out, result.output) == (124, True, "begun\n")
    assert gone(long_sleep)
    assert output(sandbox, "echo usable") == "usable\n"


def test_case_12_an_engine_that_never_answers_breaks_the_sandbox(
    make: Make, engine: Engine, small_task: Task, long_sleep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 12 (evalscope#1685): a frozen container, whose exec never returns."""
    monkeypatch.setattr(contained, "SLACK", 0.5)
    monkeypatch.setattr(contained, "CLEAR_PATIENCE", 2.0)
    sandbox, api = make().open(small_task), docker.connect()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(sandbox.exec, long_sleep, timeout=8)  # in which it must be paused
        assert wait_for(lambda: processes_of(long_sleep))
        api.pause(name_of(sandbox))
        with pytest.raises(SandboxError, match=r"the sandbox broke: .* is paused"):
            future.result(timeout=60)
    with pytest.raises(SandboxError, match="the sandbox broke"):
        sandbox.exec("true", timeout=1)
    assert wait_for(lambda: name_of(sandbox) not in engine.containers())
    assert gone(long_sleep)
    sandbox.close()


def test_a_container_that_dies_is_a_fault(
    make: Make, engine: Engine, small_task: Task, long_sleep: str
) -> None:
    sandbox = make().open(small_task)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(sandbox.exec, long_sleep, timeout=600)
        assert wait_for(lambda: processes_of(long_sleep))
        engine.podman("kill", name_of(sandbox))
        # An engine may hear of the command's end a little before that of the container.
        why = "container swegym-|the engine hung up before the command's end|a command could not be ended"
        with pytest.raises(SandboxError, match=f"the sandbox broke: ({why})"):
            future.result(timeout=60)
    for use in (
        lambda: sandbox.exec("true", timeout=1),
        lambda: sandbox.write_file("/testbed/x", b""),
        lambda: sandbox.read_file("/testbed/README"),
    ):
        with pytest.raises(SandboxError, match="broke"):
            use()
    sandbox.close()


def test_a_container_that_died_between_commands_is_a_fault(
    make: Make, engine: Engine, small_task: Task
) -> None:
    made = make()
    for use in (
        lambda sandbox: sandbox.exec("exit 137", timeout=1),
        lambda sandbox: sandbox.write_file("/testbed/x", b"x" * 100_000),
        lambda sandbox: sandbox.read_file("/testbed/README"),
    ):
        sandbox = made.open(small_task)
        engine.podman("rm", "-f", "-t", "0", name_of(sandbox))
        with pytest.raises(SandboxError, match="ended or was removed from outside"):
            use(sandbox)
        sandbox.close()


def test_a_container_ends_by_itself(make: Make, engine: Engine, small_task: Task) -> None:
    sandbox = make(sandbox_lifetime=6.0).open(small_task)  # which a busy machine opens in that time
    with pytest.raises(SandboxError, match="its lifetime of 6 s is over"):
        sandbox.exec("sleep 1000", timeout=600)
    assert wait_for(lambda: name_of(sandbox) not in engine.containers())


def test_a_sandbox_without_a_shell_is_the_commands_doing(sandbox: Sandbox) -> None:
    assert sandbox.exec("rm -f /usr/bin/bash /bin/bash", timeout=60).exit_code == 0
    result = sandbox.exec("echo x", timeout=60)
    assert result.exit_code == 127 and "/bin/bash" in result.output
    assert sandbox.exec("", timeout=60).exit_code == 127


@pytest.mark.parametrize("ruin", ["ln -s /nowhere /tmp", "echo > /tmp"])
def test_a_ruined_tmp_hinders_no_large_command_and_no_large_file(sandbox: Sandbox, ruin: str) -> None:
    assert sandbox.exec(f"rm -rf /tmp && {ruin}", timeout=60).exit_code == 0
    assert output(sandbox, f"# {'x' * 100_000}\necho usable") == "usable\n"
    sandbox.write_file("/testbed/large", b"x" * 100_000)
    assert sandbox.read_file("/testbed/large") == b"x" * 100_000
    assert "swegym" not in output(sandbox, "ls -a /")


_MARK = "00000000-1111-2222-3333-444444444444"  # as a mark is, and not the right one
# $S is the supervisor: the command is run by a child of it.
_FORGE = "S=$(ps -o ppid= -p $PPID | tr -d ' '); setsid SLEEP & "


@pytest.mark.parametrize(
    ("attack", "code"),
    [
        (f"echo exit 0 {_MARK} > /proc/$S/fd/3; printf {_MARK} > /proc/$S/fd/5; kill -9 $S; SLEEP", 137),
        (f"echo late {_MARK} > /proc/$S/fd/3; kill -9 $S; SLEEP", 137),
        ("printf 'no end of a line' > /proc/$S/fd/3; exit 5", 5),
        ("head -c 9000 /dev/zero | tr '\\0' x > /proc/$S/fd/3; echo ran >> /tmp/ran; kill -9 $S; SLEEP", 137),
        ("echo word > /proc/$PPID/fd/1; SLEEP", 137),
        ("seq -s 1 1 999 > /proc/$PPID/fd/1; SLEEP", 137),
    ],
)
def test_a_command_that_speaks_for_its_supervisor_wins_nothing(
    sandbox: Sandbox, long_sleep: str, attack: str, code: int
) -> None:
    result = sandbox.exec((_FORGE + attack).replace("SLEEP", long_sleep), timeout=20)
    assert result.exit_code == code
    assert gone(long_sleep)
    assert output(sandbox, "cat /tmp/ran 2> /dev/null; echo usable") in ("usable\n", "ran\nusable\n")


def test_a_flood_through_the_supervisor_is_killed_too(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contained, "OUTPUT_LIMIT", 20 << 20)
    result = sandbox.exec(_FORGE.replace("SLEEP", "true") + "yes > /proc/$S/fd/3", timeout=60)
    assert result.exit_code == 137 and not result.timed_out
    assert output(sandbox, "echo usable") == "usable\n"


def test_no_signal_from_inside_ends_the_container(sandbox: Sandbox) -> None:
    signals = "for i in {1..64}; do kill -$i 1; done 2> /dev/null; sleep 0.3; echo alive"
    assert output(sandbox, signals) == "alive\n"
    reaped = (
        "for i in {1..300}; do ps ax -o stat | grep -q Z || break; sleep 0.1; done; ps ax -o stat | grep -c Z"
    )
    assert output(sandbox, f"(setsid true &); sleep 0.5; {reaped}") == "0\n"  # it still reaps


# The way to the engine


@pytest.fixture
def proxy(
    opened: contextlib.ExitStack, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Proxy:
    """What backends that are made after it go through."""
    made = opened.enter_context(proxied(tmp_path, engine.settings["DOCKER_HOST"].removeprefix("unix://")))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{made.path}")
    return made


def sleeping(command: str) -> list[int]:
    """The ids of the processes that are this `sleep` themselves, in whatever container."""
    found = []
    for pid in processes_of(command):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [pid] if psutil.Process(pid).cmdline() == command.split() else []
    return found


@pytest.mark.parametrize("ends", [True, False], ids=["ends meanwhile", "goes on"])
def test_case_37_a_command_whose_connection_broke_is_a_fault(
    make: Make, proxy: Proxy, small_task: Task, long_sleep: str, ends: bool
) -> None:
    """Case 37 (rllm#710, open-instruct#1887): the engine is started anew, and nobody hears of the command's end."""
    sandbox = make().open(small_task)
    with ThreadPoolExecutor(1) as pool:
        waited_for = f"{long_sleep}1"
        future = pool.submit(sandbox.exec, f"{long_sleep} & {waited_for}; echo unheard", timeout=600)
        assert wait_for(lambda: sleeping(waited_for))
        proxy.cut()
        for pid in sleeping(waited_for) if ends else ():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="the engine hung up before the command's end"):
            future.result(timeout=60)
    assert gone(long_sleep)


SIZE = 300_000
FAULTS = {
    **{f"after {size} bytes": cut_after(size) for size in (-1, 0, 7, 16, 17, 5_000, 150_000, SIZE)},
    **{
        f"after {size} bytes of stdout": lose_after(size)
        for size in (0, 1, 150_000, SIZE - 1, SIZE, SIZE + 35)
    },
}
WHOLE = {"long after the end": cut_after(2 * SIZE), "after the mark": lose_after(SIZE + supervisor.MARK_SIZE)}


def test_case_37_no_break_of_the_connection_cuts_the_output_unheard(
    make: Make, proxy: Proxy, small_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 37 (rllm#710, open-instruct#1887): at any moment, and where the end of stdout alone is lost."""
    made, run, programs = make(), docker.DockerContainer.run, list[str]()

    def counted(container: Any, program: Any, env: Any, take: Any) -> int:
        programs.extend(text for text in program if "echo started" in text)
        return run(container, program, env, take)

    def attempt(moment: str, end: str, timeout: float) -> None:
        with closing(made.open(small_task)) as sandbox:
            programs.clear()
            proxy.output = (FAULTS | WHOLE)[moment]
            try:
                command = f"head -c {SIZE} /dev/zero | tr '\\0' x; {end}"
                result = sandbox.exec(command, timeout=timeout, output_bytes=1 << 20)
            except SandboxError:
                assert moment in FAULTS, moment
            else:
                assert moment in WHOLE and result.output == "x" * SIZE, moment
                assert (result.exit_code, result.timed_out) == ((3, False) if "exit" in end else (124, True))
            finally:
                proxy.output = iter
            assert len(programs) == 1, moment  # a command that may have run is not run again

    monkeypatch.setattr(docker.DockerContainer, "run", counted)
    for moment in FAULTS | WHOLE:
        attempt(moment, "exit 3", 60)
    for moment in ("after 150000 bytes", "after 150000 bytes of stdout", "after the mark"):
        attempt(moment, "sleep 1000", 8)


def test_case_37_no_break_of_the_connection_cuts_a_file_unheard(
    make: Make, proxy: Proxy, small_task: Task
) -> None:
    data = os.urandom(SIZE)
    with closing(make().open(small_task)) as sandbox:
        sandbox.write_file("/testbed/data", data)
        for moment, output in (FAULTS | WHOLE).items():
            proxy.output = output
            try:
                assert sandbox.read_file("/testbed/data") == data and moment in WHOLE, moment
            except SandboxError:
                assert moment in FAULTS, moment
            finally:
                proxy.output = iter


# Prints what the supervisor knows: how it was called, and its memory.
_SPY = """
import sys
place = "/proc/" + sys.argv[1]
found = [open(f"{place}/{name}", "rb").read() for name in ("cmdline", "environ")]
memory = open(f"{place}/mem", "rb")
for line in open(f"{place}/maps"):
    ends, rights = line.split()[:2]
    start, end = (int(number, 16) for number in ends.split("-"))
    if "w" in rights:
        memory.seek(start)
        found.append(memory.read(end - start))
sys.stdout.buffer.write(b"".join(found))
"""


def test_no_command_knows_or_forges_the_mark(
    make: Make, proxy: Proxy, small_task: Task, long_sleep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks: list[str] = []

    def seen(head: bytes, words: bytes) -> supervisor.Told:
        said = supervisor.told(head, words)
        marks.append(said.mark.decode() if said.mark else "")
        return said

    monkeypatch.setattr(contained, "told", seen)
    sandbox = make().open(small_task)
    sandbox.write_file("/spy", _SPY.encode())
    spied = sandbox.exec("python /spy $(ps -o ppid= -p $PPID)", timeout=60, output_bytes=64 << 20)
    assert spied.exit_code == 0 and "PYTHONHASHSEED=0" in spied.output and "echo started" in spied.output
    assert len(marks[-1]) == supervisor.MARK_SIZE and marks[-1] not in spied.output

    forge = _FORGE.replace("SLEEP", "true")
    forge += f"printf '\\nexit 0 {_MARK}\\n' > /proc/$S/fd/3; printf {_MARK}; "
    result = sandbox.exec(forge + "exit 5", timeout=60)
    assert result.exit_code == 5 and result.output.endswith(_MARK)
    assert marks[-1] not in ("", _MARK) and marks[-1] != marks[-2]

    with ThreadPoolExecutor(1) as pool:  # the break comes when it has forged all that is looked at
        future = pool.submit(sandbox.exec, f"{forge}{long_sleep}", timeout=600)
        assert wait_for(lambda: processes_of(long_sleep))
        time.sleep(0.5)
        proxy.cut()
        with pytest.raises(SandboxError, match="the engine hung up before the command's end"):
            future.result(timeout=60)
    assert gone(long_sleep)


@pytest.mark.parametrize("lost", ["all", "the end of stdout"])
def test_case_37_no_fault_of_the_engine_becomes_a_reward(
    make: Make, proxy: Proxy, config: TrainingConfig, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Case 37 (rllm#710, open-instruct#1887): the connection breaks during each program of a grading in turn."""
    run, made, task = docker.DockerContainer.run, make(), load_tasks()[0]
    programs, broken = 0, 0

    def cut_one(container: Any, program: Any, env: Any, take: Any) -> int:
        nonlocal programs
        programs += 1
        proxy.output = lose_after(20) if lost != "all" and programs == broken else iter

        def take_and_cut(stream: int, data: bytes) -> None:
            if lost == "all" and programs == broken:
                proxy.cut()
            take(stream, data)

        return run(container, program, env, take_and_cut)

    monkeypatch.setattr(docker.DockerContainer, "run", cut_one)
    assert grade(task, task.patch.encode(), made, config).outcome is Outcome.RESOLVED
    monkeypatch.setattr(docker, "_ASKED", 4)  # from now on a fault is as good
    for number in range(1, programs + 1):
        programs, broken = 0, number
        try:
            assert grade(task, task.patch.encode(), made, config).outcome is Outcome.RESOLVED
        except SandboxError:
            continue


def test_case_18_what_could_not_be_removed_is_removed_later(
    make: Make, proxy: Proxy, small_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 18 (tinker-cookbook#943): the engine is away while a sandbox is closed."""
    made = make(run="engine away")
    sandboxes = [made.open(small_task) for _ in range(2)]
    proxy.closed = True
    proxy.cut()
    for sandbox in sandboxes:
        with pytest.raises(SandboxError, match="could not be removed"):
            sandbox.close()
    proxy.closed = False
    sandboxes[0].close()
    assert len(docker.leftovers("engine away")) == 1
    made.close()
    assert not docker.leftovers("engine away")


def test_a_container_that_the_engine_holds_on_to_is_not_taken_for_removed(
    make: Make, small_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine says each time that it is being removed already: no real one can be held at that."""
    import requests
    from docker.errors import APIError

    made = make(run="engine holds")
    sandbox = made.open(small_task)
    held = requests.Response()
    held.status_code, held.reason = 409, "removal is already in progress"

    def refuse(*args: object, **kwargs: object) -> None:
        raise APIError("409 Client Error", response=held)

    with monkeypatch.context() as patch:
        patch.setattr(made._api, "remove_container", refuse)
        with pytest.raises(SandboxError, match=r"could not be removed: .*409"):
            sandbox.close()
    assert len(docker.leftovers("engine holds")) == 1
    sandbox.close()
    assert not docker.leftovers("engine holds")


def test_case_18_an_engine_that_hangs_is_not_waited_for_long(
    make: Make, proxy: Proxy, small_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 18 (tinker-cookbook#943): close() gives up soon, and the reaper goes on."""
    monkeypatch.setattr(docker, "CLOSING_TIMEOUT", 1)
    monkeypatch.setattr(docker, "_REMOVAL_PATIENCE", 0.5)
    made = make(run="engine hangs")
    for _ in range(20):
        made.open(small_task)
    proxy.stall()
    start = time.monotonic()
    with pytest.raises(SandboxError, match="could not be removed"):
        made.close()
    assert time.monotonic() - start < 30
    proxy.stall(False)
    assert wait_for(lambda: not docker.leftovers("engine hangs"), seconds=180)  # one after another
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(made._reaper._child.pid).kill()


# Openings


# Case 19 (tinker-cookbook#302, uni-agent#47): storms of starts, and services that throttle them.


def test_case_19_few_start_at_once(make: Make, small_task: Task) -> None:
    class Counted(DockerBackend):
        now, most, lock, three = 0, 0, threading.Lock(), threading.Event()

        def _start(self, image: str, task: Task) -> Any:
            with self.lock:
                self.now += 1
                self.most = max(self.most, self.now)
            if self.most >= 3:
                self.three.set()
            self.three.wait(60)  # the first wait until so many are there at once
            try:
                return super()._start(image, task)
            finally:
                with self.lock:
                    self.now -= 1

    made = make(Counted, sandbox_starts=3)
    with ThreadPoolExecutor(12) as pool:
        opened = list(pool.map(lambda number: made.open(small_task), range(12)))
        assert list(pool.map(lambda s: output(s, "cat README"), opened)) == ["A small repository.\n"] * 12
    assert made.most == 3  # type: ignore[attr-defined]


def test_case_19_a_busy_engine_is_asked_again(
    make: Make, engine: Engine, small_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    import docker.errors
    import requests

    made = make()
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.05)
    create, refusals = made._api.create_container, [503, 429, 500]

    def refuse(*args: Any, **settings: Any) -> Any:
        if not refusals:
            return create(*args, **settings)
        answer = requests.Response()
        answer.status_code = refusals.pop() if len(refusals) < 10 else refusals[0]
        raise docker.errors.APIError("too busy", answer, "toomanyrequests")

    monkeypatch.setattr(made._api, "create_container", refuse)
    made.open(small_task).close()
    assert not refusals
    refusals.extend([429] * 100)
    before = engine.containers()
    with pytest.raises(SandboxError, match="small__small-1 could not be started: toomanyrequests"):
        made.open(small_task)
    assert len(refusals) == 100 and engine.containers() <= before
    refusals[:] = [400]
    with pytest.raises(SandboxError, match="toomanyrequests"):  # a refusal for good is not repeated
        made.open(small_task)
    assert not refusals


def test_close_during_openings_leaves_nothing(make: Make, engine: Engine, small_task: Task) -> None:
    made, before = make(run="during openings"), engine.containers()
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(made.open, small_task) for _ in range(24)]
        assert wait_for(lambda: any(future.done() for future in futures))
        made.close()
        for future in futures:
            error = future.exception(timeout=60)
            assert error is None or (isinstance(error, SandboxError) and "closed" in str(error))
    assert engine.containers() <= before and not docker.leftovers("during openings")


def test_close_does_not_wait_for_a_pull(make: Make, engine: Engine, small_task: Task) -> None:
    pulling, go_on = threading.Event(), threading.Event()

    class Slow(DockerBackend):
        def _fetch(self, image: str, task: Task) -> str:
            pulling.set()
            go_on.wait(60)
            return super()._fetch(image, task)

    made = make(Slow)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(made.open, small_task) for _ in range(2)]
        assert pulling.wait(30)
        start = time.monotonic()
        made.close()
        assert time.monotonic() - start < 30  # the pull itself takes 60 s
        for future in futures:
            with pytest.raises(SandboxError, match="closed"):
                future.result(timeout=30)
    go_on.set()


# Images


def image_task(task: Task, name: str, base: str = "", setup: str = "") -> Task:
    return replace(task, instance_id="owner__name-1", image=name, base_commit=base, setup=setup, files={})


@pytest.fixture(scope="module")
def conda(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """An image as SWE-Gym's are, and its base_commit: later commits, stray files, another owner, an activation."""
    folder = tmp_path_factory.mktemp("image")
    (folder / "activate").write_text(
        "conda() { export PATH=/opt/miniconda3/envs/$2/bin:$PATH CONDA_DEFAULT_ENV=$2 ODD='a \"b\"\n c'; }\n"
    )
    (folder / "tool").write_text("#!/bin/sh\necho the tool of the environment\n")
    git = "git -c user.name=x -c user.email=x@example.org"
    (folder / "Dockerfile").write_text(
        f"FROM {IMAGE}\n"
        "ENV FROM_THE_IMAGE=yes LC_ALL=POSIX\n"
        "WORKDIR /testbed\n"
        "COPY activate /opt/miniconda3/bin/activate\n"
        "COPY --chmod=755 tool /opt/miniconda3/envs/testbed/bin/tool\n"
        f"RUN git init -q . && echo base > a.txt && echo '*.so' > .gitignore && git add . && {git} commit -q -m base "
        f"&& git rev-parse HEAD > /base && echo fixed > a.txt && {git} commit -q -a -m future "
        "&& echo dirty > a.txt && touch stray built.so && chown -R 12:34 .\n"
        'ENTRYPOINT ["/bin/false"]\nCMD ["never"]\n'
    )
    name = "localhost/swegym-conda:1"
    engine.podman("build", "-q", "--network=none", "-t", name, str(folder))
    return name, engine.podman("run", "--rm", "--network=none", "--entrypoint=cat", name, "/base").strip()


ACTIVATE = "source /opt/miniconda3/bin/activate && conda activate testbed"


def test_a_task_with_an_image_finds_its_repository_and_environment(
    make: Make, small_task: Task, conda: tuple[str, str]
) -> None:
    made = make()
    for _ in range(2):  # the second time the environment is known
        with closing(made.open(image_task(small_task, *conda, setup=ACTIVATE))) as sandbox:
            assert output(sandbox, "git rev-parse HEAD; git status --short; cat a.txt; ls; git branch") == (
                f"{conda[1]}\nbase\na.txt\nbuilt.so\n* (HEAD detached at {conda[1][:7]})\n  master\n"
            )
            assert output(
                sandbox, "tool; echo $FROM_THE_IMAGE, $CONDA_DEFAULT_ENV, $ODD, $LC_ALL, $TZ; echo ~"
            ) == ('the tool of the environment\nyes, testbed, a "b" c, , UTC\n/root\n')
            assert output(sandbox, 'printf %s "$ODD" | wc -l; python -c "print(chr(228))"') == "1\nä\n"
            assert output(sandbox, "tool", timeout=60).startswith("the tool")
            sandbox.write_file("/testbed/a.txt", b"better\n")
            patch = capture_patch(sandbox, image_task(small_task, *conda), 10_000)
            assert b"-base\n+better\n" in patch and b"stray" not in patch


def test_a_base_commit_that_is_not_there_is_named(
    make: Make, small_task: Task, conda: tuple[str, str]
) -> None:
    made, wrong = make(run="wrong"), "0123456789" * 4
    with pytest.raises(SandboxError, match=f"owner__name-1 in {conda[0]}: base_commit {wrong} is not in"):
        made.open(image_task(small_task, conda[0], wrong))
    with pytest.raises(SandboxError, match="there is no git repository at /testbed"):
        made.open(image_task(small_task, IMAGE))
    assert not docker.leftovers("wrong")


def test_a_set_up_that_fails_is_a_fault(make: Make, small_task: Task, conda: tuple[str, str]) -> None:
    made = make()
    with pytest.raises(
        SandboxError, match=r"(?s)the set-up of owner__name-1 failed with 1: .*no such environment"
    ):
        made.open(image_task(small_task, *conda, setup="echo no such environment >&2; false"))
    with pytest.raises(SandboxError, match="the set-up of owner__name-1 failed with 9: it said nothing"):
        made.open(image_task(small_task, *conda, setup="exit 9"))
    for setup, said in {
        "echo leaving; exit 0": "leaving",
        "export PATH=/nowhere": "command not found",
        "cat << END": "END",
    }.items():
        with pytest.raises(SandboxError, match=rf"(?s)the set-up of owner__name-1 failed with \d+: .*{said}"):
            made.open(image_task(small_task, *conda, setup=setup))


# Case 11 (SWE-Gym#18, OpenHands#7168): images that are missing or misnamed.


def test_case_11_a_missing_image_is_named_with_its_task(make: Make, engine: Engine, small_task: Task) -> None:
    made = make()
    for name in ("nobody/nothing", "private/secret"):
        image = f"{engine.address}/{name}:latest"
        with pytest.raises(
            SandboxError, match=f"owner__name-1 cannot be opened: the image {image} could not be"
        ):
            made.open(image_task(small_task, image))
        assert engine.registry.asked.count(name) <= 2  # no use in asking again
    assert made.open(small_task).exec("true", timeout=60).exit_code == 0


def test_case_11_missing_images_are_listed_before_a_run(
    make: Make, engine: Engine, small_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "FIRST_PAUSE", 0.05)

    def task(number: int, image: str) -> Task:
        return replace(small_task, instance_id=f"t{number}", image=image, files={})

    there = [IMAGE, *(f"{engine.address}/{name}/looked-for:latest" for name in ("good", "busy"))]
    missing = [
        f"{engine.address}/{name}:latest" for name in ("nobody/nothing", "nobody/else", "private/secret")
    ]
    found = make().missing([task(n, image) for n, image in enumerate([*there, *missing])] + [small_task])
    assert list(found) == ["t3", "t4", "t5"]
    assert engine.registry.asked.count("busy/looked-for") > engine.registry.failures
    assert all(image in reason for image, reason in zip(missing, found.values(), strict=True))
    assert not re.search("looked-for", engine.podman("images"))  # asked for, and not pulled
    with pytest.raises(SandboxError, match=r"the registry of 127.0.0.1:1/x/y:latest could not be asked"):
        make().missing([task(0, "127.0.0.1:1/x/y:latest")])
    found = make().missing([task(0, "127.0.0.1:1/x/y:latest"), task(1, IMAGE)])
    assert list(found) == ["t0"] and found["t0"].startswith(
        "the registry of 127.0.0.1:1/x/y:latest could not"
    )
    assert "the container engine does not answer" not in found["t0"]
    assert make().missing([replace(small_task, files={})]) == {
        small_task.instance_id: "it brings neither an image nor files"
    }


def test_an_image_is_pulled_once_with_retries(
    make: Make, engine: Engine, small_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(images, "SAY_EVERY", 0.0)
    said: list[str] = []
    name, before = f"{engine.address}/busy/image:latest", engine.containers()
    with closing(DockerBackend(TrainingConfig.laptop(), say=said.append)) as made:

        def use(number: int) -> str:
            with pytest.raises(SandboxError) as error:  # the image holds no shell
                made.open(image_task(small_task, name))
            return str(error.value)

        with ThreadPoolExecutor(4) as pool:
            assert all("could not be started" in text for text in pool.map(use, range(4)))
    assert engine.containers() <= before
    tries = sum("trying again" in text for text in said)
    assert tries >= 1 and said.count(f"pulling {name}") == tries + 1
    assert engine.registry.asked.count("busy/image") <= engine.registry.failures + 3
    assert name.removesuffix(":latest") in engine.podman("images")


def test_the_progress_of_a_pull_is_told_in_megabytes() -> None:
    progress = images.Progress()
    download = {"status": "Downloading"}
    assert progress.add({"status": "Pulling from x/y", "id": "latest"}) == "Pulling from x/y"
    assert (
        progress.add({**download, "id": "a", "progressDetail": {"current": 1_000_000, "total": 9_000_000}})
        == "1 of 9 MB"
    )
    assert (
        progress.add({**download, "id": "b", "progressDetail": {"current": 2_000_000, "total": 3_000_000}})
        == "3 of 12 MB"
    )
    assert (
        progress.add({"status": "Extracting", "id": "a", "progressDetail": {"current": 5, "total": 9}})
        == "3 of 12 MB"
    )
    assert progress.add({"status": "Pull complete", "id": "a", "progressDetail": {}}) == "11 of 12 MB"


def test_the_image_for_files_is_built_once(
    make: Make, engine: Engine, small_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    make()
    monkeypatch.delenv("SWEGYM_TUTORIAL_IMAGE")
    monkeypatch.setattr(
        docker,
        "laptop_image",
        lambda: (f"FROM {IMAGE}\nRUN echo made here > /made\n", "swegym-tutorial:test"),
    )
    for _ in range(2):
        with closing(DockerBackend(TrainingConfig.laptop(), say=said.append)) as made:
            assert output(made.open(small_task), "cat /made README") == "made here\nA small repository.\n"
    assert said[0] == "building swegym-tutorial:test, once"
    assert sum("once" in text for text in said) == 1
    monkeypatch.setattr(
        docker, "laptop_image", lambda: (f"FROM {IMAGE}\nRUN exit 5\n", "swegym-tutorial:broken")
    )
    with (
        closing(DockerBackend(TrainingConfig.laptop())) as made,
        pytest.raises(SandboxError, match=r"could not be built: .*exit"),
    ):
        made.open(small_task)


def test_the_image_for_files_has_the_packages_pytest() -> None:
    import tomllib

    text, name = images.laptop_image()
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    [pytest_wanted] = [line for line in project["project"]["dependencies"] if line.startswith("pytest")]
    assert f'"{pytest_wanted}"' in text and " git " in text
    assert re.fullmatch(r"swegym-tutorial:[0-9a-f]{12}", name)


# Case 18 (tinker-cookbook#943): leaked sandboxes.


def test_case_18_a_runs_containers_are_listed_and_reaped(
    make: Make, engine: Engine, small_task: Task
) -> None:
    mine, other = make(run="run-a"), make(run="run-b")
    sandboxes = [mine.open(small_task), mine.open(small_task), other.open(small_task)]
    found = docker.leftovers("run-a")
    assert {each.name for each in found} == {name_of(sandbox) for sandbox in sandboxes[:2]}
    assert all(each.kind == "docker" and each.run == "run-a" and each.orphan is False for each in found)
    assert all(each.age is not None and 0 <= each.age < 600 for each in found)
    assert {name_of(sandbox) for sandbox in sandboxes} <= {each.name for each in docker.leftovers()}
    docker.reap(found[0])
    docker.reap(found[0])  # gone already
    assert len(docker.leftovers("run-a")) == 1
    mine.close()
    other.close()
    assert not docker.leftovers("run-a") and not docker.leftovers("run-b")


def test_a_driver_elsewhere_is_not_judged() -> None:
    assert reaper.is_gone(reaper.driver_id()) is False
    host, pid, start = reaper.driver_id().rsplit(":", 2)
    assert reaper.is_gone(f"{host}:{pid}:{start}1") is True  # another process has its number now
    assert reaper.is_gone(f"elsewhere-{host}:{pid}:{start}") is None
    assert reaper.is_gone("") is None and reaper.is_gone(f"{host}:x:y") is None


_DRIVER = """
import sys, time
from swegym_tutorial import TrainingConfig
from swegym_tutorial.sandbox.docker import DockerBackend
from swegym_tutorial.tasks import Task
made = DockerBackend(TrainingConfig.laptop(), run=sys.argv[1])
sandbox = made.open(Task("t", "r", "", "", "", "", (), (), files={"a": "b"}))
print(made._reaper._child.pid, flush=True)
sandbox.exec(sys.argv[2], timeout=1000)
"""


@pytest.mark.parametrize("reaper_too", [False, True])
def test_case_18_a_killed_driver_leaves_nothing(
    make: Make, small_task: Task, long_sleep: str, reaper_too: bool
) -> None:
    make()
    run = f"killed-{reaper_too}"
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER, run, long_sleep], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    its_reaper = int(driver.stdout.readline())
    assert wait_for(lambda: len(processes_of(long_sleep)) > 1)  # the driver, and the command in the container
    assert [each.orphan for each in docker.leftovers(run)] == [False]
    if reaper_too:
        os.kill(its_reaper, signal.SIGKILL)
    driver.kill()
    driver.wait()
    driver.stdout.close()
    if reaper_too:
        [leftover] = docker.leftovers(run)
        assert leftover.orphan
        docker.reap(leftover)
    assert wait_for(lambda: not docker.leftovers(run), seconds=120)
    assert gone(long_sleep)
    if not reaper_too:  # it goes by itself a while later; no need to wait for it
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(its_reaper).kill()


# Where it cannot work


def test_an_engine_that_is_not_there_is_told_with_the_mend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    start = time.monotonic()
    with pytest.raises(
        SandboxUnavailable, match=r"no container engine answers.*nothing\.sock.*podman\.socket"
    ):
        backend("docker")
    with pytest.raises(SandboxUnavailable):
        docker.leftovers()
    assert time.monotonic() - start < 30
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(SandboxUnavailable, match=r'pip install "swegym_tutorial\[docker\]"'):
        backend("docker")


# All together


def test_a_task_is_graded_on_containers(shared: DockerBackend, config: TrainingConfig) -> None:
    task = load_tasks()[0]
    with closing(shared.open(task)) as sandbox:
        base = sandbox.exec("git rev-parse HEAD; git log --all --oneline | wc -l", timeout=60).output
        assert base == f"{task.base_commit}\n1\n"
        sandbox.write_file("/tmp/gold.patch", task.patch.encode())
        assert sandbox.exec("git apply /tmp/gold.patch", timeout=60).exit_code == 0
        captured = capture_patch(sandbox, task, config.patch_bytes)
    assert grade(task, captured, shared, config).outcome is Outcome.RESOLVED
    useless = b"diff --git a/new.txt b/new.txt\nnew file mode 100644\n--- /dev/null\n+++ b/new.txt\n@@ -0,0 +1 @@\n+x\n"
    verdict = grade(task, useless, shared, config)
    assert verdict.outcome is Outcome.UNRESOLVED and verdict.tests
    assert grade(task, b"no patch", shared, config).outcome is Outcome.INVALID_PATCH
