"""What is done on a training server without a run: the smoke test, and measuring a policy.

Both close all that they opened, like a run does.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from . import preflight, sandbox
from .attempts import AttemptRunner
from .checkpoints import read_checkpoint
from .config import TrainingConfig
from .connect import RunError, connect, first_client, saved_config, server_from_environment
from .evaluate import Evaluation, evaluate
from .events import RunFolder
from .grading import check_graders
from .halt import Halt, Stopped
from .selection import held_out_tasks, is_held_out
from .tasks import Task, load_tasks
from .trust import Trust, make_grader, trust_in


def smoke_test(config: TrainingConfig) -> int:
    """Make an adapter, publish it and sample from it once; returns the number of tokens. Opens no sandbox.

    Raises RunError and PolicyError with what the server lacks.
    """
    with contextlib.ExitStack() as closing, _told() as (halt, ended):
        run_folder = RunFolder(closing.enter_context(tempfile.TemporaryDirectory()))
        service = connect(config, run_folder, server_from_environment(config), halt, closing, ended)
        client, chat = first_client(service, config)
        return preflight.smoke_test(service, client, chat.encode("Hello"))


def evaluate_policy(
    folder: Path | None,
    *,
    split: str = "held-out",
    attempts: int = 8,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Measure the last checkpoint of a run's first job; or with folder None, the base of the laptop preset.

    The attempts are recorded in the run's folder, or for the base in one that is deleted again. say: told of what is
    waited for. Raises RunError where the folder has no checkpoint.
    """
    with contextlib.ExitStack() as closing, _told() as (halt, ended):
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
        tasks = held_out_tasks(config, split) if is_held_out(split) else load_tasks(config.tasks, split=split)
        config = replace(config, seed=seed)  # of the sampling: the tasks are the run's own
        check_graders(tasks)
        run_folder.open()
        closing.callback(run_folder.close)
        trust = trust_in(tasks)
        tasks = _usable(tasks, trust, config, run_folder)
        sandboxes = sandbox.backend(config.sandbox, config, run=f"evaluation-{secrets.token_hex(3)}")
        closing.callback(sandboxes.close)
        log = partial(_logged, run_folder, say)
        service = connect(config, run_folder, server_from_environment(config), halt, closing, ended, log)
        closing.callback(halt.set)
        _, chat = first_client(service, config)
        sampler = service.base_sampler() if path is None else service.sampler(path)
        runner = AttemptRunner(chat, sandboxes, make_grader(sandboxes, config, trust), run_folder, config)
        return evaluate(
            tasks,
            sampler,
            runner,
            run_folder,
            attempts=attempts,
            workers=config.rollout_workers,
            label=f"{split}-{time.strftime('%Y%m%d-%H%M%S')}",
            halt=halt,
        )


def _logged(folder: RunFolder, say: Callable[[str], None], event: str, **fields: Any) -> None:
    folder.log(event, **fields)
    if event == "waiting":
        say(f"waiting {fields['seconds']:.0f} s for the server ({fields['what']}): {fields['reason']}")


def _usable(tasks: list[Task], trust: Trust, config: TrainingConfig, folder: RunFolder) -> list[Task]:
    """Return the tasks that are not known to be broken or flaky, as a run does. Raises RunError where none is."""
    if not config.only_valid or not trust.not_valid:
        return tasks
    folder.log("tasks_left_out", tasks=trust.not_valid)
    if len(trust.not_valid) == len(tasks):
        why = next(iter(trust.not_valid.values()))
        raise RunError(f"none of the {len(tasks)} tasks can be used: {why}")
    return [task for task in tasks if task.instance_id not in trust.not_valid]


@contextlib.contextmanager
def _told() -> Iterator[tuple[Halt, Callable[[str], None]]]:
    """Yield what stops the work, and what stops it with a reason; raise RunError with the reason where it was."""
    halt = Halt()
    reasons: list[str] = []

    def ended(reason: str) -> None:
        reasons.append(reason)
        halt.set()

    try:
        yield halt, ended
    except Stopped:
        raise RunError(reasons[0] if reasons else "stopped") from None
