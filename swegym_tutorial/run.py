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
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from . import sandbox
from .attempts import AttemptRunner
from .clients import Clients
from .config import TrainingConfig
from .connect import (
    RunError,
    anywhere,
    check_parts,
    connect,
    first_client,
    model_folder,
    raise_file_limit,
    server_from_environment,
)
from .evaluate import Evaluation, evaluate_splits
from .events import RunFolder, dumps, write_atomically
from .grading import check_graders, name_of
from .halt import Halt, Stopped
from .job import TrainingJob
from .preflight import check_training
from .resuming import begin_log, check_settings, check_step, measured_before, reap_dead, was_evaluated
from .selection import Selection, all_held_out
from .tasks import Task, load_tasks
from .trust import make_grader, trust_in

if TYPE_CHECKING:
    from .grading import Reward
    from .policy import PolicyClient, PolicyService
    from .rollout import Chat
    from .sandbox import SandboxBackend
    from .trust import Trust

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
        evaluate: bool | None = None,
        resume: bool = False,
        from_step: int | None = None,
        server: tuple[str, str] | None = None,
        sandboxes: SandboxBackend | None = None,
        reward: Reward | None = None,
    ) -> None:
        """Check what can be checked without starting anything.

        tasks: what to train on; by default what config.tasks names. evaluate: measure the split held-out, and each that
        is named held-out-..., before and after; by default a new run doesn't, and one that is resumed does if it did
        before. resume: go on in a used folder, with the settings that must stay the same; from_step: from the checkpoint
        after so many steps, one of those that are kept, and without the steps after it. server: (URL, key) of a
        Tinker-compatible server; by default the laptop preset starts its own, and others read TINKER_BASE_URL and
        TINKER_API_KEY. sandboxes: what opens them, instead of config.sandbox; closed at the run's end. reward: called
        with the task, the attempt and its verdict, and returns a number between 0 and 1, in place of 1 for resolved and
        0 for all else; never asked about an infrastructure fault, nor in evaluations, which count what was resolved.
        Raises RunError, TaskError and GradingUnavailable.
        """
        self.config = config = anywhere(config)
        check_parts(config, sandboxes, reward)
        self.folder = RunFolder(output, episodes_gb=config.episodes_gb)
        self.error: BaseException | None = None
        self.evaluations: list[Evaluation] = []
        self.left: str | None = None  # what could not be ended, in words
        self._resumed = self.folder.used()
        if self._resumed and not resume:
            raise RunError(
                f"{self.folder.path} holds an earlier run: resume it (--resume), or name another output folder"
            )
        self._changed = check_settings(self.folder, config, name_of(reward)) if self._resumed else {}
        self._from_step = from_step
        if from_step is not None:
            check_step(self.folder, config, from_step)
        self.id = f"{re.sub(r'[^a-zA-Z0-9.-]', '-', self.folder.path.name)[:40]}-{secrets.token_hex(3)}"
        self._server_address = server or server_from_environment(config)
        if self._server_address is None:
            model_folder(config)
        train = list(tasks) if tasks is not None else load_tasks(config.tasks)
        if evaluate is None:
            evaluate = self._resumed and was_evaluated(self.folder.events)
        self._tasks = Selection(config, self.folder, train, all_held_out(config) if evaluate else [])
        check_graders([*self._tasks.train, *self._tasks.held_out])
        self._sandboxes, self._reward = sandboxes, reward
        self._clients: Clients | None = None
        self._halt = Halt()
        self._stop, self._paused = threading.Event(), threading.Event()
        self._done = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._exiting = False
        self._fatal: RunError | None = None

    # -- Control -----------------------------------------------------------------------------------

    def start(self) -> TrainingRun:
        """Begin in the background and return at once. Raises RuntimeError on a second call."""
        if self._thread is not None:
            raise RuntimeError("this run was started before; make a new TrainingRun to go on in its folder")
        raise_file_limit()
        self.folder.open()
        try:
            if self._changed:  # before the old settings are gone
                self.folder.log("settings_changed", changed=self._changed)
            write_atomically(self.folder.path / "config.json", dumps(self.config.to_json()) + "\n")
        except BaseException:
            self.folder.close()
            raise
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
        if self._thread is None:
            raise RuntimeError("this run was not started: call start() first")
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
        self._exiting = True
        self.stop()
        self._done.wait(CLOSING)  # it takes two seconds, or as long as imports that are under way
        self._closed.wait(CLOSING + 5)

    # -- The run itself: a thread of its own -------------------------------------------------------

    def _main(self) -> None:
        with contextlib.ExitStack() as closing:
            try:
                self._run(closing)
            except Stopped:
                self.error = self._fatal
            except BaseException as error:
                # An interpreter that ends refuses new threads, and imports that would register for its end.
                refused = self._exiting and isinstance(error, RuntimeError)
                self.error = self._fatal if refused else error
            self._halt.set()  # whatever still waits for an answer waits in vain
            closer = threading.Thread(target=self._close_sandboxes, name="closing-sandboxes", daemon=True)
            closer.start()
            self._await(closer)
        try:
            if self.error is not None:
                self.folder.log("run_failed", reason=f"{type(self.error).__name__}: {self.error}")
            else:
                self.folder.log("run_stopped" if self._stop.is_set() else "run_done")
        except OSError as error:  # the disk is full, say: the end must come all the same
            self.error = self.error or error
        finally:
            with contextlib.suppress(OSError):
                self.folder.close()
            self._done.set()

    def _await(self, closer: threading.Thread) -> None:
        """Wait for the sandboxes' end; for a run that is stopped, before or meanwhile, a moment only."""
        began = time.monotonic()
        while closer.is_alive() and time.monotonic() - began < CLOSING:
            if self._stop.wait(0.1):
                closer.join(AT_ONCE)
                return
            closer.join(0.1)

    def _close_sandboxes(self) -> None:
        try:
            if self._sandboxes is not None:
                self._sandboxes.close()
        except Exception as error:  # sandboxes may be anybody's
            self._tell_left(f"not all sandboxes could be ended: {error}")
        if self._clients is not None and not self._clients.join(CLOSING):
            self._tell_left("some attempts have not ended: their sandboxes keep them in a call")
            return
        self._closed.set()
        atexit.unregister(self._at_exit)

    def _tell_left(self, text: str) -> None:
        """Tell what is left in the log where it is still open, and in any case by a warning and in `left`."""
        self.left = text
        logging.getLogger(__name__).warning("%s%s", text, sandbox.how_to_end(self._sandboxes))
        with contextlib.suppress(OSError):
            self._say(text)

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
        config, tasks, folder, halt = self.config, self._tasks, self.folder, self._halt
        deadline = time.time() + config.hours * 3600
        threading.Thread(target=self._watch_hours, name="hours", daemon=True).start()
        trust = self._begin()
        self._phase("starting the training server and the sandboxes")
        sandboxes = self._open_sandboxes()
        # Closing the sandboxes ends the commands in them, which frees the workers that wait for them.
        service = connect(config, folder, self._server_address, halt, closing, self._end_with)
        self._phase("checking the training server")
        halts = [halt.child() for _ in range(config.clients)]
        clients, chat = self._check_server(service, halts)
        self._phase("looking for the tasks' images")
        tasks.leave_out_missing(sandboxes, halt)
        grader = make_grader(sandboxes, config, trust)
        attempts = AttemptRunner(chat, sandboxes, grader, folder, config, self._paused, self._reward)
        measure = partial(
            evaluate_splits, tasks.held_out, runner=attempts, folder=folder, config=config, halt=halt
        )
        if tasks.held_out:
            done = measured_before(folder, tasks.held_out, config.evaluation_attempts)
            self.evaluations.extend(measure(service.base_sampler(), label="before", done=done))
        self._phase("training")
        jobs = [self._job(n, service, client, attempts, halts[n]) for n, client in enumerate(clients)]
        self._clients = Clients(jobs, folder, halt)
        self._clients.run(f"run-{time.time_ns()}", deadline)
        for n, policy in sorted(self._clients.policies.items()):
            job, version = jobs[n].name, jobs[n].version
            self.evaluations.extend(measure(policy, label="after", job=job, version=version))
        self._phase("drawing the figure")
        from .plots import save_reward_time

        save_reward_time(folder.path)
        self._clients.check()

    def _begin(self) -> Trust:
        """Log the start and which tasks are not used; returns what is known of all of them."""
        tasks, reward = self._tasks, name_of(self._reward)
        measured, resumed = bool(tasks.held_out), self._resumed
        begin_log(self.folder, self.config, run=self.id, reward=reward, evaluate=measured, resumed=resumed)
        if self._reward is not None:
            self._say(f"attempts in training earn what {reward} makes of their verdicts")
        trust = trust_in([*tasks.train, *tasks.held_out])
        tasks.tell_unused()
        tasks.leave_out_invalid(trust)
        return trust

    def _open_sandboxes(self) -> SandboxBackend:
        """Return what opens them, which is closed at the end; of our own, end what earlier parts left."""
        if self._sandboxes is None:
            kind = self.config.sandbox
            self._sandboxes = sandbox.backend(kind, self.config, run=self.id, say=self._say)
            reap_dead(self.folder, self._sandboxes.name, self.id)
        return self._sandboxes

    def _check_server(self, service: PolicyService, halts: Sequence[Halt]) -> tuple[list[PolicyClient], Chat]:
        """Try with the first client whether the server can train; returns all of them, and the chat."""
        first, chat = first_client(service, self.config, halts[0])
        check_training(service, first, self.config, chat.encode("Hello"), f"preflight-{time.time_ns()}")
        return [first, *(service.client(n, halt) for n, halt in enumerate(halts) if n)], chat

    def _job(
        self, n: int, service: PolicyService, client: PolicyClient, attempts: AttemptRunner, halt: Halt
    ) -> TrainingJob:
        """Return the job of a client. One that has no checkpoint yet begins anew, whatever step is gone back to."""
        folder, train, missing = self.folder, self._tasks.train, self._tasks.missing
        step = self._from_step if folder.checkpoint(n).exists() else None
        return TrainingJob(
            n, self.config, train, service, client, attempts, folder, halt, missing=missing, from_step=step
        )

    def _say(self, text: str) -> None:
        self.folder.log("note", text=text)
