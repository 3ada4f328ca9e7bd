"""Sandboxes by the clock: create, exec and close of each kind, one at a time and many at once, against plain bash.

    python tests/benchmarks/sandbox.py [--kinds local,subprocess,docker] [--rounds 50] [--files 300] [--at-once 16]
                                       [--memory 1024] [--threads 64] [--busy]

Goals: a command in the local sandbox within 15 ms of `bash -c`, and a sandbox with a repository of 300 files made and
closed in 30 ms. Every exec runs `:`, each after a plain `bash -c :` by subprocess.run, so that other work on the
machine slows both. The first row is that plain command, with shutil's copytree and rmtree of the same files for create
and close. CPU is user and system time of all processes of one exec, this thread's share included, but not what the
kernel does later in its own threads (1-2 ms more, to take the network namespace down); for docker it is the engine's
and not seen. --memory, --threads and --busy make this process as large and busy as a training driver.

docker is podman, started for this with an image of this machine's programs as in the tests. A kind that is not there
is told with its reason. Needs no network; takes a minute, most of it docker's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sandbox.podman import start_engine, why_not
from sandbox.registry import Registry, serve

from swegym_tutorial.sandbox import Sandbox, SandboxBackend, SandboxUnavailable, backend
from swegym_tutorial.sandbox.root import places
from swegym_tutorial.tasks import Task

EACH = 4  # commands of each of those at once
HEADER = "| kind | create | close | both | exec | over bash | CPU | {at_once} at once |\n" + "|---" * 8 + "|"
_BECOME_SUBREAPER = 36  # prctl


def bash() -> None:
    subprocess.run(["bash", "-c", ":"], stdin=subprocess.DEVNULL, capture_output=True, check=True)


def run(sandbox: Sandbox) -> None:
    result = sandbox.exec(":", timeout=60)
    assert (result.exit_code, result.output) == (0, ""), result


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def cpu() -> float:
    """Seconds of this thread and of the processes that were waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.thread_time() + children.ru_utime + children.ru_stime


def ms(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):.1f} ms" if seconds else ""


def at_once(calls: list[Callable[[], object]]) -> str:
    """Make each call EACH times, all calls at the same time; say how long that took and how many a second that is."""
    with ThreadPoolExecutor(len(calls)) as pool:
        seconds = timed(lambda: list(pool.map(lambda call: [call() for _ in range(EACH)], calls)))
    return f"{seconds:.2f} s, {EACH * len(calls) / seconds:.0f}/s"


def row(kind: str, created: list[float], closed: list[float], *rest: str) -> None:
    both = [a + b for a, b in zip(created, closed, strict=True)]
    print(f"| {kind} | {ms(created)} | {ms(closed)} | {ms(both)} | {' | '.join(rest)} |", flush=True)


def plain(task: Task, rounds: int, many: int) -> None:
    """The first row."""
    created, closed, taken, used = [], [], [], []
    with tempfile.TemporaryDirectory(dir=places()[0]) as name:
        source, copy = Path(name, "source"), Path(name, "copy")
        for path, text in task.files.items():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).write_text(text)
        for _ in range(rounds):
            created.append(timed(lambda: shutil.copytree(source, copy)))
            closed.append(timed(lambda: shutil.rmtree(copy)))
            before = cpu()
            taken.append(timed(bash))
            used.append(cpu() - before)
    row("bash -c", created, closed, ms(taken), "", ms(used), at_once([bash] * many))


def measure(kind: str, sandboxes: SandboxBackend, task: Task, rounds: int, many: int) -> None:
    """The row of a kind."""
    created, closed, taken, more, used = [], [], [], [], []
    first = sandboxes.open(task)  # makes the repository, once a task
    opened: list[Sandbox] = []
    for _ in range(rounds):
        created.append(timed(lambda: opened.append(sandboxes.open(task))))
        closed.append(timed(lambda: opened.pop().close()))
        alone = timed(bash)
        before = cpu()
        taken.append(timed(lambda: run(first)))
        used.append(cpu() - before)
        more.append(taken[-1] - alone)
    boxes = [first, *(sandboxes.open(task) for _ in range(many - 1))]
    rate = at_once([lambda box=box: run(box) for box in boxes])
    row(kind, created, closed, ms(taken), ms(more), ms(used) if kind != "docker" else "not seen", rate)


@contextlib.contextmanager
def engine(kind: str) -> Iterator[None]:
    """For docker, a container engine that runs while this lasts. Raises SandboxUnavailable with the reason for none."""
    if kind != "docker":
        yield
        return
    if reason := why_not():
        raise SandboxUnavailable(reason)
    registry, before = Registry(), dict(os.environ)
    with serve(registry) as address, start_engine(registry, address) as started:
        os.environ.update(started.settings)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


@contextlib.contextmanager
def driver(memory: int, threads: int, busy: bool) -> Iterator[None]:
    """Be a process of so many MB and idle threads; busy: one more thread computes in Python all the time."""
    ballast = bytearray(memory << 20)
    ballast[::4096] = b"x" * len(range(0, len(ballast), 4096))
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            sum(range(10_000))

    waiting = [threading.Thread(target=done.wait) for _ in range(threads)]
    for thread in (*waiting, *([threading.Thread(target=compute)] if busy else ())):
        thread.start()
    try:
        yield
    finally:
        done.set()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default="local,subprocess,docker", help="with commas between")
    parser.add_argument("--rounds", type=int, default=50, help="of which the medians are")
    parser.add_argument("--files", type=int, default=300, help="of the repository, 400 bytes each")
    parser.add_argument("--at-once", type=int, default=16, help=f"sandboxes, each with {EACH} commands")
    parser.add_argument("--memory", type=int, default=0, help="MB that this process takes")
    parser.add_argument("--threads", type=int, default=0, help="of this process, idle")
    parser.add_argument("--busy", action="store_true", help="one more of its threads computes in Python")
    args = parser.parse_args()
    if (
        platform.system() == "Linux"
    ):  # so that what a sandbox's own parent leaves is waited for here, and counted
        ctypes.CDLL(None).prctl(_BECOME_SUBREAPER, 1, 0, 0, 0)
    files = {f"package{i % 10}/module{i}.py": f"VALUE = {i:>4}\n" * 31 for i in range(args.files)}
    task = Task("made-up", "made/up", "", "", "", "", "", ("test",), (), files=files)
    print(f"{args.files} files, medians of {args.rounds}, load {os.getloadavg()[0]:.1f}\n")
    print(HEADER.format(at_once=args.at_once), flush=True)
    with driver(args.memory, args.threads, args.busy):
        plain(task, args.rounds, args.at_once)
        for kind in args.kinds.split(","):
            try:
                with engine(kind), warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "sandbox subprocess")
                    with contextlib.closing(backend(kind)) as sandboxes:
                        measure(kind, sandboxes, task, args.rounds, args.at_once)
            except SandboxUnavailable as error:
                print(f"| {kind} | not measured: {error} |" + " |" * 6, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
