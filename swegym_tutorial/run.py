"""A whole run: server, sandboxes, jobs, evaluations; started, watched and stopped from anywhere.

    run = TrainingRun(TrainingConfig.laptop(), output="runs/first")
    run.start()
    run.wait()

Nothing of a run outlives it: the local server and the sandboxes are closed however it ends, and both have
children of their own that see to it when this process is killed. What a killed process left all the same is
ended by the next one that goes on in its folder.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import re
import resource
import secrets
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import sandbox
from .attempts import AttemptRunner
from .checkpoints import CheckpointError, all_checkpoints, go_back, read_checkpoint, told_steps
from .clients import Clients
from .config import TrainingConfig
from .connect import (
    RunError,
    anywhere,
    changed_settings,
    check_same,
    connect,
    first_client,
    model_folder,
    saved_config,
    server_from_environment,
)
from .evaluate import Evaluation, evaluate
from .events import RunFolder, dumps, mark_unfinished, scan, write_atomically
from .grading import check_graders
from .halt import Halt, Stopped
from .job import TrainingJob
from .policy import PolicySampler
from .preflight import check_training
from .sandbox.leftovers import reap_runs
from .selection import Selection, held_out_tasks
from .tasks import Task, load_tasks
from .trust import make_grader, trust_in

if TYPE_CHECKING:
    from .sandbox import SandboxBackend

FILES = 65_536  # open files at once
CLOSING = 30.0  # seconds in which all sandboxes of a stopped run should have ended
AT_ONCE = 0.5  # seconds that a stopped run waits for them itself


class TrainingRun:
    """One run in one folder. Its methods may be called from any thread."""

    def __init__(
        self,
        config: TrainingConfig,
        output: str | os.PathLike[str],
        *,
        tasks: Sequence[Task] | None = None,
        evaluate: bool = False,
        resume: bool = False,
        from_step: int | None = None,
        server: tuple[str, str] | None = None,
        sandboxes: SandboxBackend | None = None,
    ) -> None:
        """Check what can be checked without starting anything.

        tasks: what to train on; by default what config.tasks names. evaluate: measure the held-out split before and
        after. resume: go on in a used folder, with the settings that must stay the same; from_step: from the checkpoint
        after so many steps, one of those that are kept, and without the steps after it. server: (URL, key) of a
        Tinker-compatible server; by default the laptop preset starts its own, and others read TINKER_BASE_URL and
        TINKER_API_KEY. sandboxes: what opens them, instead of config.sandbox; closed at the run's end.
        Raises RunError, TaskError and GradingUnavailable.
        """
        self.config = config = anywhere(config)
        self.folder = RunFolder(output, episodes_gb=config.episodes_gb)
        self.error: BaseException | None = None
        self.evaluations: list[Evaluation] = []
        self._resumed = self.folder.used()
        self._changed: dict[str, list[object]] = {}
        if self._resumed and not resume:
            raise RunError(
                f"{self.folder.path} holds an earlier run: resume it (--resume), or name another output folder"
            )
        if self._resumed:
            saved = anywhere(saved_config(self.folder.path))
            check_same(saved, config)
            self._changed = changed_settings(saved, config)
        self._from_step = from_step
        if from_step is not None:
            self._check_step(from_step)
        if sandboxes is None and config.sandbox not in sandbox.KINDS:
            raise RunError(f"no sandbox is called {config.sandbox!r}; there are {', '.join(sandbox.KINDS)}")
        self.id = f"{re.sub(r'[^a-zA-Z0-9.-]', '-', self.folder.path.name)[:40]}-{secrets.token_hex(3)}"
        self._server_address = server or server_from_environment(config)
        if self._server_address is None:
            model_folder(config)
        train = list(tasks) if tasks is not None else load_tasks(config.tasks)
        self._tasks = Selection(config, self.folder, train, held_out_tasks(config) if evaluate else [])
        check_graders([*self._tasks.train, *self._tasks.held_out])
        self._sandboxes = sandboxes
        self._clients: Clients | None = None
        self._halt = Halt()
        self._stop = threading.Event()
        self._paused = threading.Event()
        self._done = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._fatal: RunError | None = None
        self._deadline = math.inf

    # -- Control -----------------------------------------------------------------------------------

    def start(self) -> TrainingRun:
        """Begin in the background and return at once. Raises RuntimeError on a second call."""
        if self._thread is not None:
            raise RuntimeError("this run was started before; make a new TrainingRun to go on in its folder")
        _raise_file_limit()
        self.folder.open()
        write_atomically(self.folder.path / "config.json", dumps(self.config.to_json()) + "\n")
        self._thread = threading.Thread(target=self._main, name="training-run", daemon=True)
        atexit.register(self._at_exit)
        self._thread.start()
        return self

    def pause(self) -> None:
        """Start no more attempts; those in flight go on to their end, and what can be trained on is."""
        self._paused.set()
        self.folder.log("paused")

    def resume(self) -> None:
        """Go on after pause()."""
        self._paused.clear()
        self.folder.log("unpaused")

    def stop(self) -> None:
        """End the run: returns at once; the last checkpoint stands, the unfinished batch is dropped.

        `wait` comes back within two seconds; the sandboxes end in the background, which `closed` waits for.
        """
        self._stop.set()
        self._halt.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most `timeout` seconds; returns whether it has come. Raises nothing."""
        return self._done.wait(timeout)

    def closed(self, timeout: float | None = None) -> bool:
        """Wait until all sandboxes and threads have ended too, at most `timeout` seconds; returns whether they have."""
        return self._closed.wait(timeout)

    def wait(self) -> None:
        """Wait for the end, and raise what the run raised. A run that was stopped ends without an error.

        Ctrl-C, or a notebook's interrupt, stops the run and is raised again: call `join` to wait without that.
        """
        try:
            while not self._done.wait(0.2):  # short waits, so that an interrupt gets through everywhere
                pass
        except KeyboardInterrupt:
            self.stop()
            self._done.wait(1.5)
            raise
        if self.error is not None:
            raise self.error

    @property
    def running(self) -> bool:
        return self._thread is not None and not self._done.is_set()

    @property
    def stopped(self) -> bool:
        """Whether it was told to stop before its end."""
        return self._stop.is_set()

    def _at_exit(self) -> None:
        self.stop()
        self._closed.wait(CLOSING + 5)

    # -- The run itself: a thread of its own -------------------------------------------------------

    def _main(self) -> None:
        with contextlib.ExitStack() as closing:
            try:
                self._run(closing)
            except Stopped:
                self.error = self._fatal
            except BaseException as error:
                self.error = error
            self._halt.set()  # whatever still waits for an answer waits in vain
            closer = threading.Thread(target=self._close_sandboxes, name="closing-sandboxes", daemon=True)
            closer.start()
            closer.join(AT_ONCE if self._stop.is_set() else CLOSING)
        try:
            if self.error is not None:
                self.folder.log("run_failed", reason=f"{type(self.error).__name__}: {self.error}")
            else:
                self.folder.log("run_stopped" if self._stop.is_set() else "run_done")
            self.folder.close()
        except OSError as error:  # the disk is full, say: the end must come all the same
            self.error = self.error or error
        finally:
            self._done.set()

    def _close_sandboxes(self) -> None:
        try:
            if self._sandboxes is not None:
                self._sandboxes.close()
        except Exception as error:  # sandboxes may be anybody's
            with contextlib.suppress(OSError):
                self._say(f"not all sandboxes could be ended: {error}")
        finally:
            if self._clients is not None:
                self._clients.join(CLOSING)
            self._closed.set()
            atexit.unregister(self._at_exit)

    def _watch_hours(self) -> None:
        """End a run whose hours are over before it trains; from then on its clients see to it."""
        if not self._halt.wait(self.config.hours * 3600) and self._clients is None:
            self._end_with(
                f"the run's hours ({self.config.hours:g}) were over before its training could begin"
            )

    def _end_with(self, reason: str) -> None:
        """End the run with this error, from another thread."""
        self._fatal = RunError(reason)
        self._halt.set()

    def _phase(self, name: str) -> None:
        if self._halt.is_set():
            raise Stopped
        self.folder.log("phase", name=name)

    def _run(self, closing: contextlib.ExitStack) -> None:
        config, tasks = self.config, self._tasks
        self._deadline = time.time() + config.hours * 3600
        threading.Thread(target=self._watch_hours, name="hours", daemon=True).start()
        self._begin_log()
        trust = trust_in([*tasks.train, *tasks.held_out])
        tasks.leave_out_invalid(trust)
        self._phase("starting the training server and the sandboxes")
        sandboxes = self._sandboxes = self._sandboxes or sandbox.backend(
            config.sandbox, config, run=self.id, say=self._say
        )
        self._reap(sandboxes.name)
        # Closing the sandboxes ends the commands in them, which frees the workers that wait for them.
        service = connect(config, self.folder, self._server_address, self._halt, closing, self._end_with)
        self._phase("checking the training server")
        halts = [self._halt.child() for _ in range(config.clients)]
        first, chat = first_client(service, config, halts[0])
        check_training(service, first, config, chat.encode("Hello"), f"preflight-{time.time_ns()}")
        clients = [first, *(service.client(n, halts[n]) for n in range(1, config.clients))]
        self._phase("looking for the tasks' images")
        tasks.leave_out_missing(sandboxes, self._halt)
        grader = make_grader(sandboxes, config, trust)
        attempts = AttemptRunner(chat, sandboxes, grader, self.folder, config, self._paused)
        if tasks.held_out and not self._measured_before():
            self._evaluate(service.base_sampler(), attempts, "before")
        self._phase("training")
        jobs = [
            TrainingJob(n, config, tasks.train, service, client, attempts, self.folder, halts[n])
            for n, client in enumerate(clients)
        ]
        self._clients = Clients(jobs, self.folder, self._halt)
        self._clients.run(f"run-{time.time_ns()}", self._deadline)
        if tasks.held_out:
            for n, policy in sorted(self._clients.policies.items()):
                self._evaluate(policy, attempts, "after", jobs[n].name, jobs[n].version)
        self._phase("drawing the figure")
        from .plots import save_reward_time

        save_reward_time(self.folder.path)
        self._clients.check()

    def _begin_log(self) -> None:
        """Log the beginning, and bring the log of an earlier part to what its checkpoints tell."""
        config = self.config
        for attempt in mark_unfinished(self.folder.events) if self._resumed else []:
            self.folder.log("attempt_unfinished", **attempt)
        self.folder.log(
            "run_start",
            run=self.id,
            preset=config.preset,
            steps=config.steps,
            clients=config.clients,
            groups_per_batch=config.groups_per_batch,
            resumed=self._resumed,
        )
        if self._changed:
            self.folder.log("settings_changed", changed=self._changed)
        if self._from_step is not None:
            for job in range(config.clients):
                if (path := self.folder.checkpoint(job)).exists():
                    go_back(path, self._from_step - 1)
                    self.folder.log("rolled_back", job=f"train-job{job}", step=self._from_step - 1)

    def _check_step(self, step: int) -> None:
        paths = [self.folder.checkpoint(job) for job in range(self.config.clients)]
        if not any(path.exists() for path in paths):
            raise RunError(f"{self.folder.path} has no checkpoint yet, so there is no step to go back to")
        for path in filter(lambda path: path.exists(), paths):
            try:
                kept = all_checkpoints(read_checkpoint(path))
            except CheckpointError as error:
                raise RunError(str(error)) from error
            if step - 1 not in [each["step"] for each in kept]:
                raise RunError(f"{path} has no checkpoint of step {step}: {told_steps(kept)}")

    def _reap(self, kind: str) -> None:
        """End, in the background, what earlier parts of this run, and other dead runs of this machine, left."""
        runs = [event["run"] for event in scan(self.folder.events, ("run_start",)) if event.get("run")]
        dead = [run for run in runs if run != self.id]

        def work() -> None:
            if count := reap_runs(kind, dead, self._say):
                self.folder.log("reaped", kind=kind, count=count, runs=dead)

        threading.Thread(target=work, name="reaping", daemon=True).start()

    def _say(self, text: str) -> None:
        self.folder.log("note", text=text)

    def _measured_before(self) -> bool:
        """Whether an earlier part of this run has measured the base policy."""
        return any(e.get("label") == "before" for e in scan(self.folder.events, ("evaluation",)))

    def _evaluate(
        self, policy: PolicySampler, attempts: AttemptRunner, label: str, job: str = "base", version: int = 0
    ) -> None:
        self._phase(f"evaluating the held-out split {label} training")
        config = self.config
        result = evaluate(
            self._tasks.held_out,
            policy,
            attempts,
            self.folder,
            attempts=config.evaluation_attempts,
            workers=config.rollout_workers,
            label=label,
            halt=self._halt,
            job=job,
            version=version,
        )
        self.evaluations.append(result)


def _raise_file_limit() -> None:
    """Allow as many open files as the system lets us: hundreds of sandboxes each keep connections open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
