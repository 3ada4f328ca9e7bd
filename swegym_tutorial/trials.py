"""What is done on a training server without a run: the smoke test, and measuring a policy.

Both close all that they opened, like a run does.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from . import preflight, sandbox
from .attempts import AttemptRunner
from .config import TrainingConfig
from .connect import RunError, connect, saved_config, server_from_environment
from .evaluate import Evaluation, evaluate
from .events import RunFolder
from .grading import Grader, check_graders
from .job import read_checkpoint
from .policy import Stopped
from .run import first_client, held_out_tasks
from .tasks import load_tasks


def smoke_test(config: TrainingConfig) -> int:
    """Make an adapter, publish it and sample from it once; returns the number of tokens. Opens no sandbox.

    Raises RunError and PolicyError with what the server lacks.
    """
    stop = threading.Event()
    reasons: list[str] = []

    def ended(reason: str) -> None:
        reasons.append(reason)
        stop.set()

    with contextlib.ExitStack() as closing, _told(reasons):
        run_folder = RunFolder(closing.enter_context(tempfile.TemporaryDirectory()))
        service = connect(config, run_folder, server_from_environment(config), stop, closing, ended)
        client, chat = first_client(service, config)
        return preflight.smoke_test(service, client, chat.encode("Hello"))


def evaluate_policy(
    folder: Path | None, *, split: str = "held-out", attempts: int = 8, seed: int = 0
) -> Evaluation:
    """Measure the last checkpoint of a run's first job; or with folder None, the base of the laptop preset.

    The attempts are recorded in the run's folder, or for the base in one that is deleted again.
    Raises RunError where the folder has no checkpoint.
    """
    stop = threading.Event()
    reasons: list[str] = []

    def ended(reason: str) -> None:
        reasons.append(reason)
        stop.set()

    with contextlib.ExitStack() as closing, _told(reasons):
        if folder is None:
            config = TrainingConfig.laptop()
            run_folder = RunFolder(closing.enter_context(tempfile.TemporaryDirectory()))
            path = None
        else:
            run_folder = RunFolder(folder)
            config = saved_config(folder)
            if not run_folder.checkpoint(0).exists():
                raise RunError(f"{folder} has no checkpoint to evaluate yet: no step is done")
            path = read_checkpoint(run_folder.checkpoint(0))["sampler"]
        tasks = held_out_tasks(config) if split == "held-out" else load_tasks(config.tasks, split=split)
        config = replace(config, seed=seed)  # of the sampling: the tasks are the run's own
        check_graders(tasks)
        run_folder.open()
        closing.callback(run_folder.close)
        sandboxes = sandbox.backend(config.sandbox, config, run=f"evaluation-{secrets.token_hex(3)}")
        closing.callback(sandboxes.close)
        service = connect(config, run_folder, server_from_environment(config), stop, closing, ended)
        closing.callback(stop.set)
        _, chat = first_client(service, config)
        sampler = service.base_sampler() if path is None else service.sampler(path)
        runner = AttemptRunner(chat, sandboxes, Grader(sandboxes, config), run_folder, config, stop)
        return evaluate(
            tasks,
            sampler,
            runner,
            run_folder,
            attempts=attempts,
            workers=config.rollout_workers,
            label=f"{split}-{time.strftime('%Y%m%d-%H%M%S')}",
            stop=stop,
        )


@contextlib.contextmanager
def _told(reasons: list[str]) -> Iterator[None]:
    """Say why the work was stopped, where something ended it."""
    try:
        yield
    except Stopped:
        raise RunError(reasons[0] if reasons else "stopped") from None
