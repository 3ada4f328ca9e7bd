"""What the bubblewrap sandbox keeps in, keeps out and keeps small."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import swegym_tutorial
from swegym_tutorial.sandbox import Sandbox, SandboxUnavailable, local, root
from swegym_tutorial.sandbox.limits import Limits, Meter, descendants
from swegym_tutorial.sandbox.local import LocalBackend
from swegym_tutorial.sandbox.root import leftovers, reap
from swegym_tutorial.sandbox.view import hidden_folders, interpreter_folders, layers
from swegym_tutorial.tasks import BUNDLED, Task

from .conftest import gone, processes_of, wait_for

SITE = Path(pytest.__file__).parent.parent
IMPORTS = {"PYTHONPATH": os.pathsep.join((str(Path(swegym_tutorial.__file__).parent.parent), str(SITE)))}
SMALL = {"memory_mb": 512, "disk_mb": 64, "processes": 64}


@pytest.fixture(scope="module", params=["agents are users", "plain"])
def form(request: pytest.FixtureRequest) -> Iterator[LocalBackend]:
    """Root's form, and the one that ordinary users get, and root where it may make no namespace itself."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "plain":
            patch.setattr(local, "make_user_namespace", lambda: None)
        elif os.geteuid() != 0:
            pytest.skip(reason="this form is root's")
        backend = LocalBackend(**SMALL)
    yield backend
    backend.close()


@pytest.fixture
def sandbox(form: LocalBackend, small_task: Task) -> Iterator[Sandbox]:
    opened = form.open(small_task)
    yield opened
    opened.close()


def output(sandbox: Sandbox, command: str, timeout: float = 60) -> str:
    return sandbox.exec(command, timeout=timeout).output


# What it keeps out


def test_there_is_no_network(sandbox: Sandbox) -> None:
    attempt = "import socket; socket.create_connection(('{}', {}), timeout=5)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "refused" in output(sandbox, f'python -c "{attempt.format("127.0.0.1", port)}"')
    assert "Network is unreachable" in output(sandbox, f'python -c "{attempt.format("192.0.2.1", 80)}"')
    assert output(sandbox, "ls /sys /run /var 2>&1 | grep -c 'No such'") == "3\n"
    assert output(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1").split() == ["lo"]


def test_nothing_is_written_elsewhere(sandbox: Sandbox) -> None:
    folders = (
        f"/usr/local/bin {sys.prefix}/bin {sys.base_prefix}/lib $(find / -maxdepth 2 -type d 2>/dev/null)"
    )
    made = output(sandbox, f"for d in {folders}; do touch $d/made 2>/dev/null && echo $d; done; true").split()
    mine = ("/testbed", "/tmp", "/home/agent", "/dev/shm")
    assert set(mine) <= set(made) and all(folder.startswith(mine) for folder in made)
    attempts = output(sandbox, "mount -o remount,rw / 2>&1; echo x > /etc/passwd; umount /tmp; true")
    assert attempts.count("\n") >= 3


def test_secrets_of_the_driver_are_invisible(
    form: LocalBackend, small_task: Task, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret-of-the-driver")
    (tmp_path / "credentials").write_text("secret in a file")
    sandbox = form.open(small_task)
    seen = output(sandbox, "env; cat /proc/*/environ; tr '\\0' ' ' < /proc/1/cmdline; cat /proc/mounts")
    assert "secret-of-the-driver" not in seen
    places = [
        tmp_path,
        Path(swegym_tutorial.__file__).parent,
        Path(__file__).parent,
        form.root,
        Path.home() / ".ssh",
    ]
    for place in places:
        assert output(sandbox, f"ls -A {place} 2>/dev/null") == "", place
    home = output(
        sandbox,
        f"find {Path.home()} -type f -not -path '{sys.base_prefix}/*' -not -path '{sys.prefix}/*' 2>/dev/null",
    )
    assert home == ""
    assert set(output(sandbox, "cut -d: -f1 /etc/passwd").split()) == {"root", "agent"}
    assert output(sandbox, "whoami; id -un; id -gn") == "agent\n" * 3
    sandbox.close()


def test_the_tasks_solutions_are_invisible(sandbox: Sandbox) -> None:
    assert output(sandbox, f"find / -name {BUNDLED.name} 2>/dev/null; true") == ""
    assert "ModuleNotFoundError" in output(sandbox, "cd /; python -c 'import swegym_tutorial'")


def test_a_package_installed_beside_the_interpreter_is_hidden(small_task: Task, tmp_path: Path) -> None:
    """The driver runs from a virtual environment inside a checkout, into which the package is installed too."""
    checkout = Path(tempfile.mkdtemp(prefix="checkout-", dir="/var/tmp"))
    try:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", checkout / ".venv"], check=True)
        site = next((checkout / ".venv" / "lib").glob("python3*")) / "site-packages"
        package = Path(swegym_tutorial.__file__).parent
        for place in (checkout, site):
            shutil.copytree(package, place / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        (checkout / "pyproject.toml").write_text("[project]\n")
        (site / "others.pth").write_text(f"{SITE}\n")
        (site / "shown.py").write_text("shown = 'a package'\n")
        script = (
            "from swegym_tutorial.sandbox.local import LocalBackend; from swegym_tutorial.tasks import Task\n"
            "import swegym_tutorial; print(swegym_tutorial.__file__)\n"
            "backend = LocalBackend(); task = Task('t', 'r', '', '', '', '', '', (), (), files={'a': 'b'})\n"
            "find = 'find / -name tasks.jsonl -o -name userns.py -o -name pyproject.toml 2>/dev/null | grep -v /numpy'\n"
            "print(backend.open(task).exec(find + '; python -c \"import shown, sys; print(shown.shown, sys.prefix)\"',"
            " timeout=60).output)\n"
            "backend.close()\n"
        )
        if os.geteuid() == 0:  # a home folder that only its user and root may enter
            os.chown(checkout, 12345, 12345)
            checkout.chmod(0o750)
        for start in (checkout, Path("/")):  # imported from the checkout, and as installed
            done = subprocess.run(
                [checkout / ".venv" / "bin" / "python", "-c", script],
                cwd=start, capture_output=True, text=True, env={"PATH": os.environ["PATH"]},
            )  # fmt: skip
            where, _, rest = done.stdout.partition("\n")
            assert Path(where).is_relative_to(checkout), done.stderr
            assert rest.split("\n")[-3] == f"a package {checkout}/.venv"
            assert not [line for line in rest.split("\n") if line.startswith(str(checkout))]
    finally:
        shutil.rmtree(checkout)


def test_the_deepest_rule_wins() -> None:
    shown, hidden = {Path("/usr"), Path("/usr/src/app/.venv/lib")}, {Path("/usr/src/app"), Path("/srv/tree")}
    assert [a for a in layers(shown, hidden) if a.startswith("--") and a != "--dir" and a != "--perms"] == [
        "--ro-bind", "--size", "--tmpfs", "--ro-bind", "--remount-ro",
    ]  # fmt: skip
    assert "/srv/tree" not in layers(shown, hidden)


def test_each_folder_on_the_way_is_made_once() -> None:
    shown, hidden = {Path("/opt/p/bin"), Path("/opt/p/lib"), Path("/opt/p/src/lib")}, {Path("/opt/p/src")}
    arguments = layers(shown | {Path("/opt/p/lib/x/shown")}, hidden | {Path("/opt/p/lib/x")})
    made = [arguments[i + 1] for i, argument in enumerate(arguments) if argument == "--dir"]
    assert made.count("/opt") == made.count("/opt/p") == 1 and "/opt/p/src" in made
    assert arguments.index("/opt/p/src") < arguments.index("/opt/p/src/lib")


def test_the_checkout_is_among_the_hidden() -> None:
    package = Path(swegym_tutorial.__file__).parent
    hidden = hidden_folders(interpreter_folders())
    assert package in hidden and (
        package.parent in hidden or not (package.parent / "pyproject.toml").exists()
    )


def test_other_sandboxes_are_invisible(form: LocalBackend, small_task: Task, long_sleep: str) -> None:
    first, second = form.open(small_task), form.open(small_task)
    first.write_file("/tmp/of-the-first", b"x")
    assert (
        output(second, f"ls -A /tmp; ls {form.root}; find / -name of-the-first 2>/dev/null").count(
            "of-the-first"
        )
        == 0
    )
    assert output(second, "ps ax 2>/dev/null | wc -l; ls -d /proc/[0-9]* | wc -l").split()[-1] in (
        "3",
        "4",
        "5",
    )
    first.close()
    second.close()


def test_there_are_no_rights(sandbox: Sandbox) -> None:
    status = output(sandbox, "grep -E '^(Cap|NoNewPrivs)' /proc/self/status").split()
    assert set(status[1::2]) == {"0000000000000000", "1"}
    assert sandbox.exec("unshare -U true", timeout=60).exit_code != 0
    assert sandbox.exec("unshare -r true", timeout=60).exit_code != 0
    assert sandbox.exec("kill -9 1; kill -9 -1; sleep 0.1", timeout=60).exit_code in (0, 137)
    assert output(sandbox, "ls -l /proc/self/fd | grep -c -E 'pipe|null'") == "3\n"
    assert output(sandbox, "ls /proc/self/fd").split() == ["0", "1", "2", "3"]


def test_what_gives_up_the_rights_is_never_a_program_of_the_agents(sandbox: Sandbox) -> None:
    """With a PATH that leads to the agent's programs first: setpriv and prlimit still come from the system."""
    caught = "#!/bin/sh\nprogram=$(basename $0); id -u > /tmp/caught-$program; grep Cap /proc/self/status\n"
    for name in ("setpriv", "prlimit"):
        sandbox.write_file(f"/testbed/{name}", caught.encode())
    output(sandbox, "chmod +x setpriv prlimit")
    result = sandbox.exec(
        "type -P setpriv; ls /tmp/caught* 2> /dev/null; grep CapEff /proc/self/status; ulimit -c",
        timeout=60,
        env={"PATH": "/testbed:/usr/bin:/bin"},
    )
    assert result.output.split() == ["/testbed/setpriv", "CapEff:", "0000000000000000", "0"]


def test_users_are_looked_up_in_the_sandboxs_own_files(sandbox: Sandbox) -> None:
    who = "import os, pwd, grp; print(pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name)"
    assert output(sandbox, f'python -c "{who}"') == "agent agent\n"
    assert output(sandbox, "getent passwd | cut -d: -f1; getent group | cut -d: -f1").split() == [
        "root", "agent", "root", "agent",
    ]  # fmt: skip
    assert output(sandbox, "getent hosts localhost | grep -c localhost") == "1\n"
    files = "/etc/passwd /etc/group /etc/nsswitch.conf"
    change = f"for f in {files}; do rm -f $f; echo x >> $f && echo $f; ln -sf /tmp/x $f && echo $f; done 2>/dev/null"
    assert output(sandbox, f"{change}; true") == ""
    assert output(sandbox, "whoami") == "agent\n"


def test_the_agent_is_no_user_of_this_machine(small_task: Task) -> None:
    if os.geteuid() != 0:
        pytest.skip(reason="an ordinary user's agent is that user outside")
    with contextlib.closing(LocalBackend()) as backend:
        first, second = backend.open(small_task), backend.open(small_task)
        owners = set()
        for sandbox in (first, second):
            sandbox.exec("touch made", timeout=60)
            owners.add((sandbox.state.path / "testbed" / "made").stat().st_uid)  # type: ignore[attr-defined]
        assert len(owners) == 2 and min(owners) >= 60_000


# What it keeps small


def _kernel_counts_processes(form: LocalBackend) -> bool:
    return os.geteuid() != 0 or form._bubblewrap.namespace is not None


def test_processes_are_bounded(sandbox: Sandbox, form: LocalBackend) -> None:
    forks = "import os,time\nn=0\ntry:\n  while n<200:\n    if not os.fork(): time.sleep(600)\n    n+=1\nexcept OSError: print(n)"
    if not _kernel_counts_processes(form):
        forks += "\ntime.sleep(600)"  # until the meter looks
    result = sandbox.exec(f'python -c "{forks}"', timeout=120)
    if _kernel_counts_processes(form):
        assert 20 < int(result.output) < 64
    else:
        assert result.exit_code == 137 and "processes ran at once; the limit is 64" in result.output


def test_a_fork_bomb_ends_with_its_command(sandbox: Sandbox, form: LocalBackend) -> None:
    if not _kernel_counts_processes(form):
        pytest.skip(reason="too rough here, where only the meter stops it: see the test above")
    result = sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 60", timeout=2)
    assert result.exit_code in (124, 137)
    assert gone(str(sandbox.state.path))  # type: ignore[attr-defined]
    assert output(sandbox, "echo fine") == "fine\n"


def test_a_command_may_be_killed_at_any_point_of_its_set_up(sandbox: Sandbox) -> None:
    for thousandths in range(40):
        for _ in range(3):
            result = sandbox.exec("sleep 60", timeout=thousandths / 4000)
            assert result.exit_code == 124 and result.timed_out
    assert gone(str(sandbox.state.path))  # type: ignore[attr-defined]
    assert output(sandbox, "echo fine") == "fine\n"


@pytest.mark.parametrize(
    ("told", "child", "code"),
    [
        (b"", None, None),
        (b'{ "child-pid": 28063', 28063, None),  # as a killed bubblewrap left it
        (b'{ "child-pid": 28063, "ipc-namespace": 40265', 28063, None),
        (b'{ "child-pid": 7, "net-namespace": 1 }\n{ "exit-code": 3 }\n', 7, 3),
    ],
)
def test_what_bubblewrap_told_before_it_was_killed(
    sandbox: Sandbox, told: bytes, child: int | None, code: int | None
) -> None:
    sandbox._status = told  # type: ignore[attr-defined]
    assert sandbox._told("child-pid") == child  # type: ignore[attr-defined]
    assert sandbox._told("exit-code") == code  # type: ignore[attr-defined]


EIGHT = "for i in 1 2 3 4 5 6 7 8; do python -c 'x = b\"x\" * (200 << 20); import time; time.sleep(600)' & done; wait"


def test_memory_of_all_processes_together_is_bounded(sandbox: Sandbox) -> None:
    result = sandbox.exec(EIGHT, timeout=120)
    assert result.exit_code == 137 and not result.timed_out
    assert "[killed: its processes took" in result.output and "the limit is 512 MB]" in result.output


def test_shared_memory_counts_once(sandbox: Sandbox) -> None:
    code = "import os,time\nx = b'x' * (200 << 20)\nfor _ in range(6):\n  if not os.fork(): time.sleep(1.5); os._exit(0)\ntime.sleep(1.6)\nprint('done')"
    assert output(sandbox, f'python -c "{code}"') == "done\n"


def test_memory_of_one_process_is_bounded(sandbox: Sandbox) -> None:
    assert "MemoryError" in output(sandbox, "python -c 'x = b\"x\" * (600 << 20)'")


def test_files_together_are_bounded(sandbox: Sandbox) -> None:
    result = sandbox.exec(
        "for i in $(seq 400); do head -c 1000000 /dev/zero > f$i; sleep 0.01; done; sleep 600", timeout=120
    )
    assert result.exit_code == 137 and "[killed: files take" in result.output
    assert sandbox.exec("echo more > more", timeout=60).exit_code != 0  # nothing grows any more
    slowly = "for f in f*; do rm $f; sleep 0.02; done"  # with looks at the files in between
    assert sandbox.exec(slowly, timeout=60).exit_code == 0
    assert sandbox.exec("echo more > more; cat more", timeout=60).output == "more\n"


def test_too_many_files_may_be_deleted_and_no_more_made(tmp_path: Path) -> None:
    def fill(names: range) -> None:
        for name in names:
            (tmp_path / str(name)).write_bytes(b"x")

    def looked() -> str | None:
        meter.begin()
        meter.look(os.getpid())
        meter._disk_due = 0.0
        return meter.look(os.getpid())

    meter = Meter((tmp_path,), Limits(memory_mb=1 << 20, disk_mb=1, processes=1 << 20, cpu_seconds=0))
    fill(range(101))
    assert looked() == "there are 101 files and folders; the limit is 100"
    assert looked() is None and meter.disk_excess  # a command that only deletes, slowly
    meter.begin()
    fill(range(101, 103))
    meter._disk_due = 0.0
    assert meter.look(os.getpid()) == "there are 103 files and folders; the limit is 100"
    for name in range(50, 103):
        (tmp_path / str(name)).unlink()
    assert looked() is None and meter.disk_excess is None
    fill(range(50, 101))
    assert looked() == "there are 101 files and folders; the limit is 100"


def test_what_is_allowed_beyond_the_limit_only_falls(tmp_path: Path) -> None:
    """Not a little more with each command that was too short for a look."""

    def files(count: int) -> None:
        for number in range(max(count, len(list(tmp_path.iterdir())))):
            file = tmp_path / str(number)
            file.touch() if number < count else file.unlink(missing_ok=True)

    def ended(*counts: int) -> list[bool]:
        """Whether each look at a command ends it, with so many files there at each."""
        meter.begin()
        looks = []
        for count in counts:
            files(count)
            meter._disk_due = 0.0
            looks.append(meter.look(os.getpid()) is not None)
        meter.end(0.3)
        return looks

    meter = Meter((tmp_path,), Limits(memory_mb=1 << 20, disk_mb=1, processes=1 << 20, cpu_seconds=0))
    assert ended(160) == [True]
    assert ended(160, 160) == [False, False]  # it may go on where nothing grows
    for short in range(240, 481, 80):
        meter.begin()
        files(short)
        assert meter.look(os.getpid()) is None  # no look at the disk is due
        assert meter.end(0.3) == f"there are {short} files and folders; the limit is 100"
        assert ended(short) == [True]  # though this one made none
    assert ended(400, 300, 200, 200) == [False, False, False, True]  # it deletes, and then no more
    assert ended(150, 130, 150) == [False, False, False]  # never beyond what was first there
    assert ended(140, 120) == [False, False]
    assert ended(121) == [True]
    assert ended(90) == [False] and meter.disk_excess is None
    assert ended(160) == [True]
    assert ended(160) == [False]


def test_files_of_many_short_commands_are_bounded(sandbox: Sandbox) -> None:
    for number in range(200):
        result = sandbox.exec(f"head -c 1000000 /dev/zero > f{number}", timeout=60)
        if "no file can grow" in result.output:
            break
    assert 60 < number < 150  # each takes about 15 ms, and after 0.2 s of them there is a look


def test_the_number_of_files_is_bounded(sandbox: Sandbox) -> None:
    code = "import itertools\nfor i in itertools.count(): open(f'/tmp/{i}', 'w').close()"
    result = sandbox.exec(f'python -c "{code}"', timeout=60)
    assert result.exit_code == 137 and "files and folders; the limit is 6400" in result.output


def test_one_file_is_bounded(sandbox: Sandbox) -> None:
    assert sandbox.exec("head -c 100000000 /dev/zero > big", timeout=60).exit_code != 0
    assert int(output(sandbox, "stat -c %s big").split()[0]) <= 64 << 20


def test_shared_memory_files_are_bounded(sandbox: Sandbox) -> None:
    fill = "for i in 1 2; do head -c 40000000 /dev/zero > /dev/shm/$i; done; df -m --output=size /dev/shm"
    result = sandbox.exec(fill, timeout=60)
    assert "No space left" in result.output and result.output.split()[-1] == "64"


def test_processor_time_is_bounded(small_task: Task) -> None:
    with contextlib.closing(LocalBackend(cpu_seconds=1)) as backend:
        assert backend.open(small_task).exec("while :; do :; done", timeout=300).exit_code in (128 + 24, 137)


def test_descendants_are_found(long_sleep: str) -> None:
    command = ["bash", "-c", f"(setsid {long_sleep} & {long_sleep}) & wait"]
    with subprocess.Popen(command, start_new_session=True) as started:
        assert wait_for(
            lambda: len([p for p in descendants(started.pid) if p in processes_of(long_sleep)]) >= 2
        )
        for pid in (*descendants(started.pid), started.pid):
            os.kill(pid, signal.SIGKILL)


# Where it cannot work


def test_a_bubblewrap_that_fails_is_told_with_the_mend(tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text(
        "#!/bin/sh\necho 'bwrap: Creating new namespace failed: Operation not permitted' >&2\nexit 1\n"
    )
    fake.chmod(0o755)
    with pytest.raises(SandboxUnavailable) as raised:
        LocalBackend(tmp_path, bwrap=str(fake))
    for part in ("Creating new namespace failed", "docker", "modal", "--sandbox subprocess"):
        assert part in str(raised.value)
    assert os.listdir(tmp_path) == ["bwrap"] and gone(str(tmp_path))  # a watchdog may end a little later
    with pytest.raises(SandboxUnavailable, match="No such file"):
        LocalBackend(tmp_path, bwrap=str(tmp_path / "absent"))


def test_it_works_where_the_tests_run() -> None:
    assert local.why_unavailable() is None


# Case 18 (tinker-cookbook#943): leaked sandboxes, when the driver is killed.

DRIVER = """
import sys, threading, warnings
from pathlib import Path
from swegym_tutorial.sandbox.local import LocalBackend
from swegym_tutorial.sandbox.subprocess import SubprocessBackend
from swegym_tutorial.tasks import Task
warnings.simplefilter("ignore")
kind, parent, command = sys.argv[1:]
backend = {"local": LocalBackend, "subprocess": SubprocessBackend}[kind](Path(parent))
task = Task("t", "r", "", "", "", "", "", (), (), files={"a": "b"})
for _ in range(4):
    sandbox = backend.open(task)
    threading.Thread(target=sandbox.exec, args=(command,), kwargs={"timeout": 600}).start()
print(backend.root, flush=True)
"""


@pytest.fixture
def killed_driver(tmp_path: Path, long_sleep: str) -> Iterator[Callable[..., tuple[Path, str]]]:
    """Start a driver with four busy sandboxes, and kill it as soon as they are."""

    def start_and_kill(kind: str, *, watchdog_too: bool = False) -> tuple[Path, str]:
        command = f"mkdir x; chmod 000 x; setsid {long_sleep} & while :; do date > f; {long_sleep}; done"
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, kind, str(tmp_path), command], stdout=subprocess.PIPE, text=True,
            env={**os.environ, **IMPORTS},
        )  # fmt: skip
        assert driver.stdout is not None
        root = Path(driver.stdout.readline().strip())
        assert wait_for(lambda: len(processes_of(long_sleep)) >= 8)
        if watchdog_too:
            for pid in processes_of(f"watchdog.py {root}"):
                os.kill(pid, signal.SIGKILL)
        driver.kill()
        driver.wait()
        driver.stdout.close()
        return root, long_sleep

    yield start_and_kill
    for folder in leftovers(tmp_path):
        reap(folder)


@pytest.mark.parametrize("kind", ["local", "subprocess"])
def test_case_18_a_killed_driver_leaves_neither_folder_nor_process(
    killed_driver: Callable[..., tuple[Path, str]], kind: str
) -> None:
    folder, long_sleep = killed_driver(kind)
    assert wait_for(lambda: not folder.exists())
    assert gone(long_sleep) and gone(str(folder))


def test_case_18_what_a_killed_watchdog_leaves_is_listed_and_reaped(
    killed_driver: Callable[..., tuple[Path, str]], tmp_path: Path, small_task: Task
) -> None:
    living = LocalBackend(tmp_path)
    living.open(small_task)
    folder, long_sleep = killed_driver("subprocess", watchdog_too=True)
    assert leftovers(tmp_path) == [folder]
    assert json.loads((folder / "driver.json").read_text())["pid"] not in psutil.pids()
    reap(folder)
    assert not folder.exists() and leftovers(tmp_path) == [] and gone(long_sleep)
    assert living.root.exists()
    living.close()


# As another user

AS_USER = """
import json
from swegym_tutorial.sandbox.local import LocalBackend
from swegym_tutorial.tasks import Task
backend = LocalBackend(memory_mb=512, disk_mb=64, processes=64)
sandbox = backend.open(Task("t", "r", "", "", "", "", "", (), (), files={"a": "b"}))
commands = json.loads(input())
print(json.dumps([sandbox.exec(command, timeout=60).output for command in commands]))
print(json.dumps(sandbox.exec(EIGHT, timeout=120).output))
sandbox.exec("mkdir -p x/y; chmod 000 x . ~ /tmp", timeout=60)
sandbox.write_file("/tmp/late", b"late")
assert sandbox.read_file("/tmp/late") == b"late"
root = backend.root
backend.close()
assert not root.exists()
"""


def test_an_ordinary_user_gets_the_same() -> None:
    if os.geteuid() != 0:
        pytest.skip(reason="needs root to become another user; an ordinary user's other tests show the same")
    user: dict[str, Any] = {"user": 12345, "group": 12345, "extra_groups": ()}
    check = "import sys, psutil, swegym_tutorial; assert sys.version_info >= (3, 11)"

    def reaches(python: str) -> bool:
        try:
            return not subprocess.run(
                [python, "-c", check], env=IMPORTS, stderr=subprocess.DEVNULL, cwd="/", **user
            ).returncode
        except OSError:
            return False

    python = next(filter(reaches, (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3")), None)
    if python is None:
        pytest.skip(reason="another user can reach no Python 3.11 with psutil here")
    forks = "import os,time\nn=0\ntry:\n  while n<200:\n    if not os.fork(): time.sleep(600)\n    n+=1\nexcept OSError: print(n)"
    commands = [
        "id -un; ls -A; python -m pytest --version; unshare -r true; ls /root; cat /proc/1/environ | grep -c secret",
        f'python -c "{forks}"',
    ]
    done = subprocess.run(
        [python, "-c", AS_USER.replace("EIGHT", repr(EIGHT))], input=json.dumps(commands) + "\n", text=True,
        capture_output=True, cwd="/", env={**IMPORTS, "PATH": "/usr/bin:/bin", "SECRET": "secret"}, **user,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    shown, count = lines[0]
    assert shown.startswith("agent\n.git\na\npytest ") and "unshare failed" in shown and shown.endswith("0\n")
    assert 20 < int(count) < 64
    assert "[killed: its processes took" in lines[1]


def test_sandboxes_lie_in_memory_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small_task: Task
) -> None:
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(root, "MEMORY", tmp_path)
    monkeypatch.setattr(root, "MEMORY_ROOM", 1)
    assert root.places() == [tmp_path, Path(tempfile.gettempdir())]
    with contextlib.closing(LocalBackend()) as backend:
        assert backend.root.parent == tmp_path
        assert backend.root not in leftovers()
    monkeypatch.setattr(root, "MEMORY_ROOM", 1 << 60)
    assert root.places()[0] == Path(tempfile.gettempdir())
    monkeypatch.setattr(root, "MEMORY_ROOM", 1)
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())
    assert root.places()[0] == Path(tempfile.gettempdir())
