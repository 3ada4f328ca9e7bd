"""A whole run: server, sandboxes, jobs, evaluations; started, watched and stopped from anywhere.

    run = TrainingRun(TrainingConfig.laptop(), output="runs/first")
    run.start()
    run.wait()

Nothing of a run outlives it: the local server and the sandboxes are closed however it ends, and both have
children of their own that see to it when this process is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import random
import re
import resource
import secrets
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from . import sandbox
from .attempts import AttemptRunner
from .config import TrainingConfig
from .connect import (
    RunError,
    anywhere,
    check_same,
    connect,
    model_folder,
    saved_config,
    server_from_environment,
)
from .evaluate import Evaluation, evaluate
from .events import EventReader, RunFolder, dumps, write_atomically
from .grading import check_graders
from .job import TrainingJob
from .policy import PolicyClient, PolicySampler, PolicyService, Stopped, in_thread
from .preflight import check_training
from .rollout import Chat
from .tasks import Task, load_tasks
from .trust import Trust, make_grader, trust_in

if TYPE_CHECKING:
    from .sandbox import SandboxBackend

FILES = 65_536  # open files at once
IMAGES_TIMEOUT = 7200.0  # seconds in which a service must have found or built the images of all tasks


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
        server: tuple[str, str] | None = None,
    ) -> None:
        """Check what can be checked without starting anything.

        tasks: what to train on; by default what config.tasks names. evaluate: measure the held-out split
        before and after. resume: go on in a used folder, with the settings that must stay the same. server: (URL, key) of a Tinker-compatible server; by
        default the laptop preset starts its own, and others read TINKER_BASE_URL and TINKER_API_KEY.
        Raises RunError, TaskError and GradingUnavailable.
        """
        self.config = config = anywhere(config)
        self.folder = RunFolder(output)
        self.error: BaseException | None = None
        self.evaluations: list[Evaluation] = []
        if self.folder.used() and not resume:
            raise RunError(
                f"{self.folder.path} holds an earlier run: resume it (--resume), or name another output folder"
            )
        if self.folder.used():
            check_same(anywhere(saved_config(self.folder.path)), config)
        if config.sandbox not in sandbox.KINDS:
            raise RunError(f"no sandbox is called {config.sandbox!r}; there are {', '.join(sandbox.KINDS)}")
        self.id = f"{re.sub(r'[^a-zA-Z0-9.-]', '-', self.folder.path.name)[:40]}-{secrets.token_hex(3)}"
        self._server_address = server or server_from_environment(config)
        if self._server_address is None:
            model_folder(config)
        self._tasks = list(tasks) if tasks is not None else load_tasks(config.tasks)
        self._held_out = held_out_tasks(config) if evaluate else []
        check_graders([*self._tasks, *self._held_out])
        self._stop = threading.Event()
        self._paused = threading.Event()
        self._done = threading.Event()
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
        """Start no more groups; those in flight go on to their end."""
        self._paused.set()
        self.folder.log("paused")

    def resume(self) -> None:
        """Go on after pause()."""
        self._paused.clear()
        self.folder.log("unpaused")

    def stop(self) -> None:
        """End the run: returns at once; the last checkpoint stands, the unfinished batch is dropped."""
        self._stop.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most `timeout` seconds; returns whether it has come. Raises nothing."""
        return self._done.wait(timeout)

    def wait(self) -> None:
        """Wait for the end, and raise what the run raised. A run that was stopped ends without an error."""
        while not self._done.wait(0.2):  # short waits, so that Ctrl-C gets through everywhere
            pass
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
        self._done.wait(10)

    # -- The run itself: a thread of its own -------------------------------------------------------

    def _main(self) -> None:
        try:
            with contextlib.ExitStack() as closing:
                self._run(closing)
        except Stopped:
            self.error = self._fatal
        except BaseException as error:
            self.error = error
        try:
            if self.error is not None:
                self.folder.log("run_failed", reason=f"{type(self.error).__name__}: {self.error}")
            else:
                self.folder.log("run_stopped" if self._stop.is_set() else "run_done")
            self.folder.close()
        except OSError as error:  # the disk is full, say: the end must come all the same
            self.error = self.error or error
        finally:
            atexit.unregister(self._at_exit)
            self._done.set()

    def _end_with(self, reason: str) -> None:
        """The local server is gone: end the run with this error."""
        self._fatal = RunError(reason)
        self._stop.set()

    def _phase(self, name: str) -> None:
        if self._stop.is_set():
            raise Stopped
        self.folder.log("phase", name=name)

    def _run(self, closing: contextlib.ExitStack) -> None:
        config = self.config
        self._deadline = time.time() + config.hours * 3600
        self.folder.log(
            "run_start", run=self.id, preset=config.preset, steps=config.steps, clients=config.clients
        )
        trust = trust_in([*self._tasks, *self._held_out])
        self._leave_out_invalid(trust)
        self._phase("starting the training server and the sandboxes")
        sandboxes = sandbox.backend(config.sandbox, config, run=self.id, say=self._say)
        closing.callback(sandboxes.close)
        # Closing the sandboxes ends the commands in them, which frees the workers that wait for them.
        service = connect(config, self.folder, self._server_address, self._stop, closing, self._end_with)
        self._phase("checking the training server")
        client, chat = first_client(service, config)
        check_training(service, client, config, chat.encode("Hello"), f"preflight-{time.time_ns()}")
        clients = [client, *(service.create_client(job) for job in range(1, config.clients))]
        self._leave_out_missing(sandboxes)
        grader = make_grader(sandboxes, config, trust)
        attempts = AttemptRunner(chat, sandboxes, grader, self.folder, config, self._stop)
        if self._held_out and not self._measured_before():
            self._evaluate(service.base_sampler(), attempts, "before")
        phase = f"run-{time.time_ns()}"
        self._phase("training")
        jobs = [
            TrainingJob(
                n, config, self._tasks, service, client, attempts, self.folder, self._stop, self._paused
            )
            for n, client in enumerate(clients)
        ]
        policies = self._run_jobs(jobs, phase, closing, sandboxes)
        if self._held_out:
            for job, policy in zip(jobs, policies, strict=True):
                self._evaluate(policy, attempts, "after", job.name, job.version)
        self._phase("drawing the figure")
        from .plots import save_reward_time

        save_reward_time(self.folder.path)

    def _say(self, text: str) -> None:
        self.folder.log("note", text=text)

    def _leave_out_invalid(self, trust: Trust) -> None:
        """Leave out the tasks that are known to be broken or flaky, and tell how many nobody has validated.

        A run that goes on leaves out what it began without: the order of its tasks hangs on their number.
        """
        events = EventReader(self.folder.path).read()
        begun = next((event for event in events if event.get("event") == "tasks_trusted"), None)
        not_valid = trust.not_valid if self.config.only_valid else {}
        if begun is not None:
            not_valid = begun["not_valid"]
        elif count := len(trust.never_validated):
            total = len(self._tasks) + len(self._held_out)
            self._say(
                f"{count} of the {total} tasks were never validated, and are used all the same: `swegym-tutorial "
                f"tasks validate --tasks {shlex.quote(self.config.tasks)} --sandbox {self.config.sandbox}` finds "
                "those that are broken or flaky, and the next run leaves them out"
            )
        if begun is None:
            self.folder.log("tasks_trusted", not_valid=not_valid, never_validated=len(trust.never_validated))
        self._leave_out(not_valid, "used")

    def _leave_out_missing(self, sandboxes: SandboxBackend) -> None:
        """Leave out the tasks that cannot be opened."""
        self._phase("looking for the tasks' images")
        tasks = [*self._tasks, *self._held_out]
        missing = in_thread(
            lambda: sandboxes.missing(tasks), self._stop, "looking for the tasks' images", IMAGES_TIMEOUT
        )
        self._leave_out(missing, "opened")

    def _leave_out(self, reasons: Mapping[str, str], verb: str) -> None:
        """Go without some tasks, instance_id -> why, visibly; raises RunError where none of a kind is left."""
        here = {task.instance_id for task in (*self._tasks, *self._held_out)}
        reasons = {name: why for name, why in reasons.items() if name in here}
        if not reasons:
            return
        self.folder.log("tasks_left_out", tasks=reasons)
        for kind, tasks in (("", self._tasks), ("held-out ", self._held_out)):
            if tasks and all(task.instance_id in reasons for task in tasks):
                why = reasons[tasks[0].instance_id]
                raise RunError(f"none of the {len(tasks)} {kind}tasks can be {verb}: {why}")
        self._tasks = [task for task in self._tasks if task.instance_id not in reasons]
        self._held_out = [task for task in self._held_out if task.instance_id not in reasons]

    def _measured_before(self) -> bool:
        """Whether an earlier part of this run has measured the base policy."""
        events = EventReader(self.folder.path).read()
        return any(e.get("event") == "evaluation" and e.get("label") == "before" for e in events)

    def _run_jobs(
        self, jobs: list[TrainingJob], phase: str, closing: contextlib.ExitStack, sandboxes: SandboxBackend
    ) -> list[PolicySampler]:
        """Run all jobs side by side; the first error stops the others and is raised."""
        policies: dict[int, PolicySampler] = {}
        errors: list[BaseException] = []

        def work(job: TrainingJob) -> None:
            try:
                policies[job.index] = job.run(phase, self._deadline)
            except BaseException as error:
                errors.append(error)
                failed.set()
                with contextlib.suppress(OSError):
                    self.folder.log("job_failed", job=job.name, reason=f"{type(error).__name__}: {error}")

        failed = threading.Event()
        threads = [threading.Thread(target=work, args=(job,), name=job.name, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if self._stop.is_set() or failed.is_set():
                self._stop.set()
                sandboxes.close()
            for thread in threads:
                thread.join(0.05)
        if failures := [error for error in errors if not isinstance(error, Stopped)]:
            raise failures[0]
        if errors:
            raise errors[0]
        return [policies[job.index] for job in jobs]

    def _evaluate(
        self, policy: PolicySampler, attempts: AttemptRunner, label: str, job: str = "base", version: int = 0
    ) -> None:
        self._phase(f"evaluating the held-out split {label} training")
        config = self.config
        result = evaluate(
            self._held_out,
            policy,
            attempts,
            self.folder,
            attempts=config.evaluation_attempts,
            workers=config.rollout_workers,
            label=label,
            stop=self._stop,
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


def held_out_tasks(config: TrainingConfig) -> list[Task]:
    """Return the held-out tasks that are evaluated, in their order. Raises TaskError where there are none."""
    tasks = load_tasks(config.tasks, split="held-out")
    if config.evaluation_tasks is None or config.evaluation_tasks >= len(tasks):
        return tasks
    chosen = sorted(random.Random(config.seed).sample(range(len(tasks)), config.evaluation_tasks))
    return [tasks[n] for n in chosen]


def first_client(service: PolicyService, config: TrainingConfig) -> tuple[PolicyClient, Chat]:
    """Make the first job's adapter and, with its model's tokenizer, the chat. Raises PolicyError, TemplateError."""
    client = service.create_client(0)
    chat = Chat(service.tokenizer(client), config.system_prompt)
    service.stop_tokens = chat.stop_tokens
    return client, chat
