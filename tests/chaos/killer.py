"""Ends a run's process with SIGKILL at chosen and at random moments, and resumes it, until it is done.

Runs of the exact mode must each end as one that was left alone. Those with attempts side by side, of two clients, have
none to be compared with; all that holds of every run must hold of them.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from . import checks, leaks, reference
from .driver import EXACT, ROOT, SIDE_BY_SIDE, cli_command, command, environment
from .history import Event, history, jobs, read_checkpoint, read_config, read_log

LIMIT = 600.0  # seconds that one process may take
GONE = 90.0  # seconds in which all that a killed process started must be gone
LOOK = 0.0005  # seconds between two looks at the folder
MODES = {"exact": EXACT, "side by side": SIDE_BY_SIDE}


@dataclass(frozen=True)
class Aim:
    """When to kill: so many seconds, at random up to `within`, after something shows for the first time."""

    name: str
    within: float
    event: str = ""  # a line of the log; "" with no `file`: the start of the process
    count: int = 1  # the how many-th of these
    file: str = ""  # a pattern in the run folder; a file that is new or changed


AIMS = (
    Aim("starting", 9.0),
    Aim("a folder just made", 0.01, file="events.jsonl"),
    Aim("resuming", 0.15, event="phase", count=3),
    Aim("filling a batch", 2.0, event="rollout_start"),
    Aim("training or publishing", 0.6, event="training_start"),
    Aim("a checkpoint just saved at the server", 0.03, file="server/*/weights/*.safetensors"),
    Aim("a checkpoint's file being written", 0.002, file=".train-job*-checkpoint.json.*"),
    Aim("a checkpoint's file just written", 0.03, file="train-job*-checkpoint.json"),
    Aim("a step just logged", 0.05, event="step_done"),
    Aim("some steps later", 4.0, event="step_done", count=2),
)


@dataclass(frozen=True)
class Kill:
    """One kill, and what the run was doing by what its folder shows."""

    aim: str
    where: str
    seconds: float  # since the start of the process
    cli: bool = False  # whether the process was the command's, not the driver's


@dataclass
class KilledRun:
    """One run that was killed and resumed until it was done, and what was found wrong with it."""

    folder: Path
    mode: str = "exact"
    kills: list[Kill] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)  # processes and folders that outlived theirs
    identical: bool = False  # the final adapter equals the reference's in every bit


class Killer:
    """Makes killed runs in one folder, and the reference runs that they are compared with.

    Each second process is the `swegym-tutorial train` of a user, who resumes by what the folder tells alone.
    """

    def __init__(
        self,
        output: Path,
        *,
        mode: str = "exact",
        seed: int = 0,
        steps: int = 4,
        aims: Sequence[Aim] = AIMS,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """mode: exact | side by side. steps: of each run. say: told of each kill and each run's end.

        aims: each comes once, in an order that the seed decides, before one comes again.
        """
        self.output = output
        self.runs: list[KilledRun] = []
        self._mode = mode
        self._settings = MODES[mode]
        self._started = 0
        self._steps = steps
        self._random = random.Random(seed)
        self._say = say
        self._references: dict[int, Path] = {}
        self._all_aims = aims
        self._aims: list[Aim] = []

    def run(self, kills: int, *, seeds: int = 1) -> list[KilledRun]:
        """Make runs, each killed a few times, until there were so many kills; the runs' own seeds take turns."""
        while (missing := kills - sum(len(run.kills) for run in self.runs)) > 0:
            number = len(self.runs)
            wanted = min(missing, self._random.randint(3, 5))
            self.runs.append(self._killed_run(number, number % seeds, wanted))
            if len(self.runs) > 3 * kills:
                raise RuntimeError("runs end before they can be killed")
        return self.runs

    def _left_alone(self, seed: int) -> Path:
        """Return the folder of a run with this seed that was left alone."""
        if seed not in self._references:
            folder = self.output / f"reference-seed{seed}"
            with leaks.temporary_place() as temp:
                process = self._start(folder, temp, seed)
                self._finish(process, folder)
            if wrong := checks.all_of(folder, steps=self._steps):
                raise RuntimeError(f"the run that was left alone is wrong itself: {wrong}")
            self._references[seed] = folder
        return self._references[seed]

    def _killed_run(self, number: int, seed: int, wanted: int) -> KilledRun:
        alone = self._left_alone(seed) if self._mode == "exact" else None
        run = KilledRun(self.output / f"killed-{self._mode.replace(' ', '-')}{number:02d}", self._mode)
        with leaks.temporary_place() as temp:
            try:
                while len(run.kills) < wanted:
                    process = self._start(run.folder, temp, seed)
                    kill = self._kill(process, run.folder)
                    if kill is None:  # it was done before its moment came
                        break
                    run.kills.append(kill)
                    self._say(
                        f"{run.folder.name}: {'command' if kill.cli else 'driver'} killed after {kill.seconds:.1f} s, "
                        f"aim: {kill.aim}; {kill.where}"
                    )
                    time.sleep(self._random.choice((0, 0, 1)))
                else:
                    process = self._start(run.folder, temp, seed)
                self._finish(process, run.folder)
                self._judge(run, alone)
            except (DriverFailed, OSError, LookupError, ValueError) as error:
                run.wrong.append(f"{type(error).__name__}: {error}")
            run.left = self._left(temp)
        good = "whole" if alone is None else "exact" if run.identical else "exact, but for the last bits"
        self._say(f"{run.folder.name}: {len(run.kills)} kills, {'; '.join([*run.wrong, *run.left]) or good}")
        return run

    def _judge(self, run: KilledRun, alone: Path | None) -> None:
        run.wrong = checks.all_of(run.folder, steps=self._steps)
        told = jobs(read_log(run.folder)[0])
        ours = {job: reference.weights(run.folder, job) for job in told}  # each can be read
        if alone is not None:
            run.wrong += reference.differences(run.folder, alone)
            theirs = reference.weights(alone, "train-job0")
            run.identical = reference.same_weights(ours["train-job0"], theirs, exactly=True)

    def _start(self, folder: Path, temp: Path, seed: int) -> subprocess.Popen[bytes]:
        """Start the run's process, which goes on where there is a folder."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._started += 1
        begun = (folder / "config.json").exists()
        make, resume = (cli_command, begun) if self._by_cli else (command, folder.exists())
        words = make(folder, resume=resume, seed=seed, steps=self._steps, **self._settings)
        with (folder.parent / f"{folder.name}.log").open("ab") as log:
            return subprocess.Popen(
                words,
                env=environment(temp),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def _by_cli(self) -> bool:
        """Whether the process that was started last is the command's."""
        return self._started % 2 == 0

    def _finish(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        try:
            status = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            process.kill()
            process.wait()
        if status != 0:
            said = (folder.parent / f"{folder.name}.log").read_text(errors="replace").strip()[-600:]
            raise DriverFailed(
                f"{folder.name} was not done within {LIMIT:.0f} s"
                if status is None
                else f"{folder.name} ended with status {status}: {said}"
            )

    def _kill(self, process: subprocess.Popen[bytes], folder: Path) -> Kill | None:
        """Wait for the next aim and kill. Returns None where the process ended first, which the caller looks at."""
        if not self._aims:
            self._aims = self._random.sample(self._all_aims, len(self._all_aims))
        aim = self._aims.pop()
        began = time.monotonic()
        shows = _Watch(folder, aim)
        while not shows():
            if process.poll() is not None:
                self._aims.insert(0, aim)  # for a run that has more to do
                return None
            if time.monotonic() - began > LIMIT:
                process.kill()
                process.wait()
                raise DriverFailed(f"{folder.name}: {aim.name} did not come within {LIMIT:.0f} s")
            time.sleep(LOOK)
        time.sleep(self._random.uniform(0, aim.within))
        if process.poll() is not None:
            self._aims.insert(0, aim)
            return None
        process.kill()
        process.wait()
        return Kill(aim.name, where(folder), time.monotonic() - began, self._by_cli)

    def _left(self, temp: Path) -> list[str]:
        found = leaks.after_patience(lambda: leaks.processes(temp), GONE)
        left = [f"process {p.pid} is left: {' '.join(_words(p))[:200]}" for p in found]
        return left + [f"{path} is left" for path in leaks.after_patience(lambda: leaks.folders(temp), GONE)]


class DriverFailed(Exception):
    """A run's process did not end as it should."""


class _Watch:
    """Whether what an aim names has come since this was made."""

    def __init__(self, folder: Path, aim: Aim) -> None:
        self._folder, self._aim = folder, aim
        self._log = folder / "events.jsonl"
        self._at = self._log.stat().st_size if self._log.exists() else 0
        self._count = 0
        self._before = self._files()

    def __call__(self) -> bool:
        if self._aim.event:
            return self._events()
        return not self._aim.file or bool(self._files() - self._before)

    def _files(self) -> set[tuple[str, int, int]]:
        found = set()
        for path in self._folder.glob(self._aim.file) if self._aim.file else ():
            try:
                told = path.stat()
            except OSError:
                continue
            found.add((str(path), told.st_ino, told.st_mtime_ns))
        return found

    def _events(self) -> bool:
        try:
            if os.stat(self._log).st_size == self._at:
                return False
            with self._log.open("rb") as file:
                file.seek(self._at)
                new = file.read()
        except FileNotFoundError:
            return False
        self._at += len(new)
        self._count += new.count(f'"event": "{self._aim.event}"'.encode())
        return self._count >= self._aim.count


def where(folder: Path) -> str:
    """Say what a killed run was doing, by its folder."""
    if not (folder / "events.jsonl").exists():
        return "before the log"
    events, _ = read_log(folder)
    if not events:
        return "before the first line"
    doing = list(filter(None, (_doing(folder, events, job) for job in jobs(events))))
    if doing:
        return "; ".join(doing)
    last = events[-1]
    if last["event"] == "phase":
        return f"phase: {last['name']}"
    done = " and ".join(str(len(history(events, job).steps)) for job in jobs(events))
    return f"{done or 'no'} steps done, last line: {last['event']}"


def _doing(folder: Path, events: list[Event], job: str) -> str:
    """Say what a client was doing, where it trained or wrote down what it had trained; else nothing."""
    told = history(events, job)
    if (folder / f"{job}-checkpoint.json").exists():
        saved = read_checkpoint(folder, job)["step"]
        if saved > told.last:
            return f"{job}: step {saved}'s checkpoint is written, its line is not"
    if (folder / "config.json").exists() and checks.is_full(told.pending, read_config(folder)):
        return f"{job}: training or publishing a full batch"
    return ""


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return ["gone"]
