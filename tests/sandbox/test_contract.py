"""What every kind of sandbox promises, run against each kind."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from swegym_tutorial.sandbox import CommandResult, Sandbox, SandboxBackend, SandboxError, supervisor
from swegym_tutorial.tasks import Task

from .conftest import KINDS, gone, opened, processes_of, wait_for


@pytest.fixture
def sandbox(any_backend: SandboxBackend, small_task: Task) -> Iterator[Sandbox]:
    opened = any_backend.open(small_task)
    yield opened
    opened.close()


@pytest.fixture
def hosted(hosted_backend: SandboxBackend, small_task: Task) -> Iterator[Sandbox]:
    """A sandbox in a folder of this machine."""
    opened = hosted_backend.open(small_task)
    yield opened
    opened.close()


@pytest.fixture
def remote(remote_backend: SandboxBackend, small_task: Task) -> Iterator[Sandbox]:
    """A sandbox in a container."""
    opened = remote_backend.open(small_task)
    yield opened
    opened.close()


def run(sandbox: Sandbox, command: str, timeout: float = 60) -> CommandResult:
    return sandbox.exec(command, timeout=timeout)


def late(sandbox: Sandbox, command: str, timeout: float, output_bytes: int = 65_536) -> CommandResult:
    """Run what never ends until its deadline; longer where a busy machine has not even begun it by then."""
    for times in (1, 4, 16):
        result = sandbox.exec(command, timeout=timeout * times, output_bytes=output_bytes)
        if result.output:
            break
    return result


def test_a_command_runs_in_a_clean_repository_at_one_commit(sandbox: Sandbox) -> None:
    result = run(sandbox, "git status --short; git rev-list --all --count; git remote; ls")
    assert result.output == "1\nREADME\npkg0\npkg1\npkg2\n"
    assert result.exit_code == 0 and not result.timed_out and result.truncated_bytes == 0


def test_python_and_pytest_work_inside(sandbox: Sandbox) -> None:
    sandbox.write_file("/testbed/test_it.py", b"def test_it(tmp_path):\n    (tmp_path / 'x').touch()\n")
    assert "1 passed" in run(sandbox, "python -m pytest -q test_it.py").output
    assert run(sandbox, "pytest --version; git commit -q --allow-empty -m x").exit_code == 0


def test_each_sandbox_is_a_fresh_copy(any_backend: SandboxBackend, small_task: Task) -> None:
    first, second = any_backend.open(small_task), any_backend.open(small_task)
    run(first, "echo changed > README; rm -r .git; touch ~/mine; echo > new")
    assert run(second, "cat README; ls ~ new; git status --short").output.startswith("A small repository.\n")
    assert run(second, "ls ~/mine new").exit_code != 0
    first.close()
    assert run(second, "cat README").output == "A small repository.\n"
    second.close()


def test_two_tasks_of_one_name_are_two_repositories(any_backend: SandboxBackend, small_task: Task) -> None:
    other = any_backend.open(replace(small_task, files={"README": "Another one.\n"}))
    assert run(other, "cat README; ls").output == "Another one.\nREADME\n"
    other.close()


def test_many_threads_open_at_once(any_backend: SandboxBackend, small_task: Task) -> None:
    task = replace(small_task, instance_id="small__small-2")

    def once(number: int) -> str:
        sandbox = any_backend.open(task)
        try:
            return run(sandbox, f"echo {number} >> README; tail -n 1 README").output
        finally:
            sandbox.close()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(once, range(24))) == [f"{n}\n" for n in range(24)]


def test_stdout_and_stderr_keep_their_order(sandbox: Sandbox) -> None:
    result = run(sandbox, "for i in 1 2 3; do echo out$i; echo err$i >&2; done; exit 3")
    assert result.output == "out1\nerr1\nout2\nerr2\nout3\nerr3\n"
    assert result.exit_code == 3


def test_a_signal_is_128_and_its_number(sandbox: Sandbox) -> None:
    assert run(sandbox, "kill -9 $$").exit_code == 128 + 9
    assert run(sandbox, "kill -SEGV $$").exit_code == 128 + 11


def test_env_is_added(sandbox: Sandbox) -> None:
    result = sandbox.exec('echo "$COLOUR $TZ"', timeout=60, env={"COLOUR": "deep blue"})
    assert result.output == "deep blue UTC\n"


def test_the_drivers_environment_stays_outside(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret-of-the-driver")
    assert "secret-of-the-driver" not in run(sandbox, "env; cat /proc/self/environ").output


def test_a_broken_command_is_a_result(sandbox: Sandbox) -> None:
    assert run(sandbox, "if then").exit_code != 0
    assert run(sandbox, "no-such-program").exit_code == 127
    assert run(sandbox, "echo a\0b").exit_code == 126
    assert run(sandbox, "echo \ud800").exit_code == 0


# Case 12 (evalscope#1685): an exec that never returns.


@pytest.mark.parametrize(
    "command", ["read answer; echo got:$answer", "python -c 'input()'; echo got:", "cat; echo got:"]
)
def test_case_12_a_prompt_finds_stdin_closed(sandbox: Sandbox, command: str) -> None:
    result = run(sandbox, command)
    assert result.output.endswith("got:\n") and not result.timed_out


@pytest.mark.parametrize(
    "command",
    [
        "trap '' TERM INT HUP; echo begun; while :; do SLEEP; done",
        "setsid bash -c \"trap '' TERM; SLEEP\" & echo begun; SLEEP",
        "(SLEEP &); exec >/dev/null 2>&1; SLEEP",
    ],
)
def test_case_12_the_deadline_holds(sandbox: Sandbox, long_sleep: str, command: str) -> None:
    start = time.monotonic()
    result = run(sandbox, command.replace("SLEEP", long_sleep), timeout=1)
    assert result.timed_out and result.exit_code == 124 and result.seconds >= 1
    assert time.monotonic() - start < 60  # the command itself would take a day
    assert result.output in ("begun\n", "")
    assert gone(long_sleep)


def test_case_12_a_deadline_during_the_start_leaves_nothing(sandbox: Sandbox, long_sleep: str) -> None:
    for milliseconds in (*range(20), *range(20)):
        assert run(sandbox, long_sleep, timeout=milliseconds / 1000).timed_out
    assert gone(long_sleep)


@pytest.mark.parametrize(
    "start", ["SLEEP &", "setsid SLEEP &", "nohup setsid SLEEP > /dev/null 2>&1 &", "(setsid SLEEP &) &"]
)
def test_case_12_what_runs_in_the_background_ends_with_its_command(
    sandbox: Sandbox, long_sleep: str, start: str
) -> None:
    result = run(sandbox, start.replace("SLEEP", long_sleep) + " sleep 0.1; echo done")
    assert "done\n" in result.output and not result.timed_out and result.exit_code == 0
    assert gone(long_sleep)


# Case 14 (mini-swe-agent#639): huge output, on either path.


def rss() -> int:
    return psutil.Process().memory_info().rss


# Modal's client takes up to 64 MiB of output ahead, and its server runs in this process: test_modal.py measures it alone.
BUFFERS = {"modal": 160 << 20}


def test_case_14_100_mb_of_output_stay_bounded(any_backend: SandboxBackend, sandbox: Sandbox) -> None:
    before = rss()
    result = sandbox.exec(
        "echo first; head -c 100000000 /dev/zero | tr '\\0' x; echo last", timeout=300, output_bytes=1000
    )
    assert rss() - before < (30 << 20) + BUFFERS.get(any_backend.name, 0)
    assert result.truncated_bytes == 100_000_000 + len("first\nlast\n") - 1000
    assert f"\n[... {result.truncated_bytes} bytes left out ...]\n" in result.output
    assert result.output.startswith("first\nxxx") and result.output.endswith("xxxlast\n")
    assert len(result.output) < 1100 and result.exit_code == 0


def test_case_14_output_on_the_way_to_a_timeout_stays_bounded(
    any_backend: SandboxBackend, sandbox: Sandbox
) -> None:
    before = rss()
    command = "echo first; trap '' TERM; yes | head -c 100000000; sleep 1000"
    result = late(sandbox, command, timeout=1.5, output_bytes=1000)
    assert rss() - before < (30 << 20) + BUFFERS.get(any_backend.name, 0)
    assert result.timed_out and result.exit_code == 124
    assert result.output.startswith("first\ny\n") and result.truncated_bytes > 0


def test_output_up_to_the_limit_is_whole(sandbox: Sandbox) -> None:
    result = sandbox.exec("printf 0123456789", timeout=60, output_bytes=10)
    assert result.output == "0123456789" and result.truncated_bytes == 0
    result = sandbox.exec("printf 0123456789X", timeout=60, output_bytes=10)
    assert result.output == "01234\n[... 1 bytes left out ...]\n6789X" and result.truncated_bytes == 1


# What stands at the end of a command's output tells the driver that it is whole: see supervisor.Stdout.
MARK = b"00000000-1111-2222-3333-444444444444"


def test_output_of_any_size_and_any_bytes_is_whole(sandbox: Sandbox) -> None:
    data = random.Random(1).randbytes(1_000_003 - len(MARK)) + MARK
    sandbox.write_file("/testbed/data", data)
    for size in (0, 1, 35, 36, 37, 71, 72, 73, 65_535, 65_536, 65_537, len(data)):
        result = sandbox.exec(f"tail -c {size} data; exit 3", timeout=60, output_bytes=1 << 20)
        assert result.output == data[len(data) - size :].decode("utf-8", "replace"), size
        assert (result.exit_code, result.truncated_bytes) == (3, 0)
    result = sandbox.exec("cat data", timeout=60, output_bytes=2)
    assert result.output.endswith(f"[... {len(data) - 2} bytes left out ...]\n4")


FILL = "import os; os.set_blocking(1, False)\nwhile True: os.write(1, b'x' * 4096)"  # until the pipe is full


@pytest.mark.parametrize(
    ("command", "output", "code"),
    [
        ("printf begun; exec >&- 2>&-; sleep 0.1", r"begun", 0),
        ("printf begun; kill -9 $$", r"begun", 137),
        ("printf begun; kill -9 0", r"begun", 137),
        ("printf begun; sleep 1000", r"begun", 124),
        ("printf begun; (while :; do printf y; done) & sleep 0.1", r"beguny*", 0),
        # Who reads as fast as it writes gets more than is kept.
        (
            f'python -c "{FILL}" 2> /dev/null; exit 3',
            r"x{4096,}(\n\[\.\.\. \d+ bytes left out \.\.\.\]\nx+)?",
            3,
        ),
    ],
)
def test_output_is_whole_whatever_the_command_does_to_it(
    sandbox: Sandbox, command: str, output: str, code: int
) -> None:
    if code == 124:
        result = late(sandbox, command, timeout=3, output_bytes=1 << 22)
    else:
        result = sandbox.exec(command, timeout=120, output_bytes=1 << 22)
    assert re.fullmatch(output, result.output) and result.exit_code == code


def test_the_mark_is_found_however_its_bytes_come() -> None:
    chance = random.Random(2)
    for _ in range(300):
        text = chance.randbytes(chance.choice([0, 1, 35, 36, 37, 500]))
        for sent, whole in ((text + MARK, True), (text + MARK[:-1], False), (text + MARK + b"x", False)):
            passed = bytearray()
            stdout = supervisor.Stdout(passed.extend)
            left = sent
            while left:
                size = chance.choice([0, 1, 10, 36, 100])
                stdout.add(left[:size])
                left = left[size:]
            assert stdout.end(MARK) is whole
            assert bytes(passed) == (text if whole else sent)


# Case 15 (rllm#895): output that is no UTF-8 ended the attempt.


def test_case_15_bytes_that_are_no_utf8_are_replaced(sandbox: Sandbox) -> None:
    result = run(sandbox, r"printf 'a\xff\xfeb\n\xc3\xa4\n'")
    assert result.output == "a��b\nä\n" and result.exit_code == 0


# Case 16 (rllm#649): payloads over the argument limit.


def test_case_16_five_megabytes_as_script_command_and_patch(sandbox: Sandbox) -> None:
    padding = b"# " + b"x" * 61 + b"\n"
    sandbox.write_file("/testbed/deep/er/big.sh", padding * 82_000 + b'wc -c < "$0"\n')
    assert run(sandbox, "bash deep/er/big.sh").output == f"{82_000 * 64 + 13}\n"

    result = run(sandbox, padding.decode() * 82_000 + "echo 'a  b'; exit 5")
    assert (result.output, result.exit_code) == ("a  b\n", 5)

    lines = 100_000
    patch = f"--- /dev/null\n+++ b/big.txt\n@@ -0,0 +1,{lines} @@\n" + f"+{'y' * 52}\n" * lines
    sandbox.write_file("/tmp/big.patch", patch.encode())
    assert (
        run(sandbox, 'git apply "${TMPDIR:-/tmp}/big.patch" && wc -c < big.txt').output == f"{53 * lines}\n"
    )
    assert sandbox.read_file("/testbed/big.txt") == (b"y" * 52 + b"\n") * lines
    assert len(sandbox.read_file("/testbed/big.txt", limit=1000)) == 1001


# Files


def test_files_are_written_where_the_agent_finds_them(sandbox: Sandbox) -> None:
    sandbox.write_file("/home/agent/.config/a b.bin", bytes(range(256)))
    assert sandbox.read_file("/home/agent/.config/./a b.bin") == bytes(range(256))
    assert run(sandbox, "echo more >> ~/.config/'a b.bin' && rm -r ~/.config").exit_code == 0
    run(sandbox, "printf '#!/bin/sh\necho old\n' > run.sh; chmod 555 run.sh")
    sandbox.write_file("/testbed/run.sh", b"#!/bin/sh\necho new\n")
    assert run(sandbox, "./run.sh; stat -c %a run.sh").output == "new\n555\n"


def test_only_regular_files_are_read_and_none_outside(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    run(sandbox, f"ln -s {secret} link; ln -s {tmp_path} folder; ln -s README inner; mkfifo pipe; mkdir real")
    for path in ("link", "folder/secret", "inner", "pipe", "real", "absent", "README/x", "absent/x"):
        with pytest.raises(FileNotFoundError):
            sandbox.read_file(f"/testbed/{path}")
    for path in ("/testbed/../x", "README", "/testbed/", "/tmp/a\0b"):
        with pytest.raises(SandboxError):
            sandbox.read_file(path)


def test_nothing_is_written_through_a_link_or_outside(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    run(
        sandbox,
        f"ln -s {secret} link; ln -s {tmp_path} folder; mkfifo pipe; mkdir real; ln -s {tmp_path}/new dangling",
    )
    for path in ("link", "folder/secret", "folder/new", "pipe", "real", "dangling", "README/x", "../x", "."):
        with pytest.raises(SandboxError):
            sandbox.write_file(f"/testbed/{path}", b"overwritten")
    for path in ("x", "/home/agent", "/testbed", "/testbed/a\0b"):
        with pytest.raises(SandboxError):
            sandbox.write_file(path, b"overwritten")
    assert secret.read_text() == "secret" and os.listdir(tmp_path) == ["secret"]


def test_files_of_this_machine_are_out_of_reach(hosted: Sandbox) -> None:
    for path in ("/etc/passwd", "/etc/x", "/x", "/testbed", "/testbedx/a", "/home/other/x"):
        with pytest.raises(SandboxError):
            hosted.read_file(path)
        with pytest.raises(SandboxError):
            hosted.write_file(path, b"overwritten")


def test_a_container_is_written_anywhere(remote: Sandbox) -> None:
    remote.write_file("/eval.sh", b"echo evaluated in $PWD; exit 4\n")
    remote.write_file("/opt/a b/*/c", bytes(range(256)))
    assert remote.read_file("/opt/a b/*/c") == bytes(range(256))
    result = run(remote, "bash /eval.sh")
    assert (result.output, result.exit_code) == ("evaluated in /testbed\n", 4)
    assert remote.read_file("/etc/passwd").startswith(b"root:")


@pytest.mark.parametrize(
    "ruin",
    [
        'rm -rf /testbed "$REPO"',
        'mv "${REPO:-/testbed}" ~/elsewhere',
        'rm -rf "$REPO" && echo > "$REPO"',
        'rm -rf "$REPO" && ln -s / "$REPO"',
        'rm -rf ~ "$TMPDIR"',
    ],
)
def test_a_removed_top_folder_is_the_commands_doing(sandbox: Sandbox, ruin: str) -> None:
    run(sandbox, ruin)
    assert run(sandbox, "echo still here > file && cat file").output == "still here\n"
    assert sandbox.read_file("/testbed/file") == b"still here\n"
    for path in ("/tmp/x", "/home/agent/x", "/testbed/x"):
        run(sandbox, ruin)
        with pytest.raises(FileNotFoundError):
            sandbox.read_file(path)
        sandbox.write_file(path, b"text")
        assert sandbox.read_file(path) == b"text"


def test_a_sandbox_whose_folder_is_gone_is_a_fault(hosted: Sandbox) -> None:
    sandbox = hosted
    folder: Path = sandbox.state.path  # type: ignore[attr-defined]
    folder.rename(folder.with_name("moved"))
    for use in (
        lambda: run(sandbox, "true"),
        lambda: sandbox.write_file("/testbed/x", b""),
        lambda: sandbox.read_file("/testbed/README"),
    ):
        with pytest.raises(SandboxError, match="could not be"):
            use()
    folder.with_name("moved").rename(folder)
    assert run(sandbox, "echo usable").output == "usable\n"


# The end


def test_exec_after_close_raises(any_backend: SandboxBackend, small_task: Task) -> None:
    sandbox = any_backend.open(small_task)
    sandbox.close()
    sandbox.close()
    for use in (
        lambda: run(sandbox, "true"),
        lambda: sandbox.write_file("/testbed/x", b""),
        lambda: sandbox.read_file("/testbed/README"),
    ):
        with pytest.raises(SandboxError, match="closed"):
            use()


def test_close_ends_a_running_command(any_backend: SandboxBackend, small_task: Task, long_sleep: str) -> None:
    sandbox = any_backend.open(small_task)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run, sandbox, f"(setsid {long_sleep} &) ; {long_sleep}", 600)
        assert wait_for(lambda: len(processes_of(long_sleep)) >= 2)
        sandbox.close()
        with pytest.raises(SandboxError, match="closed"):
            future.result(timeout=30)
    assert gone(long_sleep)


def test_close_deletes_hostile_folders(hosted_backend: SandboxBackend, small_task: Task) -> None:
    sandbox = hosted_backend.open(small_task)
    deep = "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"
    run(sandbox, f'mkdir -p a/b; touch a/b/c; python -c "{deep}"; chmod 000 a/b a; chmod 000 . ~')
    folder: Path = sandbox.state.path  # type: ignore[attr-defined]
    assert folder.exists()
    assert run(sandbox, "echo still here").output == "still here\n"
    sandbox.close()
    assert not folder.exists()


# Case 18 (tinker-cookbook#943): leaked sandboxes.


def test_case_18_an_interrupt_leaves_nothing_running(sandbox: Sandbox, long_sleep: str) -> None:
    def interrupt() -> None:
        wait_for(lambda: processes_of(long_sleep))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(sandbox, f"setsid {long_sleep} & {long_sleep}", timeout=600)
    thread.join()
    assert gone(long_sleep)
    assert run(sandbox, "echo usable").output == "usable\n"


@pytest.mark.parametrize("kind", KINDS)
def test_case_18_the_backend_closes_what_was_opened(
    small_task: Task, long_sleep: str, kind: str, request: pytest.FixtureRequest
) -> None:
    refused = []

    def use() -> None:
        try:
            while True:
                run(sandboxes.open(small_task), f"{long_sleep} & {long_sleep}", timeout=600)
        except SandboxError as error:
            refused.append(str(error))

    with opened(kind, request) as sandboxes:
        threads = [threading.Thread(target=use) for _ in range(6)]
        for thread in threads:
            thread.start()
        assert wait_for(lambda: len(processes_of(long_sleep)) >= 4)
        sandboxes.close()
        for thread in threads:
            thread.join(timeout=30)
        assert len(refused) == 6 and all("closed" in text for text in refused)
        assert gone(long_sleep)
        root: Path | None = getattr(sandboxes, "root", None)
        assert root is None or (not root.exists() and gone(str(root)))
        with pytest.raises(SandboxError, match="closed"):
            sandboxes.open(small_task)
