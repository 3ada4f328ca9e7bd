"""The `swegym-tutorial` command. Knows only how to read arguments and whom to call."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import commands
from .arguments import make_parser
from .commands import DONE, FAILED, INTERRUPTED
from .config import TrainingConfig
from .tasks import TaskError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed, 2 usage, 130 interrupted."""
    parser = make_parser()
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # busy-waiting threads slow everything beside them
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    signal.signal(signal.SIGTERM, _interrupt)
    from .sandbox import SandboxError
    from .swegym_grading import GradingUnavailable

    try:
        return COMMANDS[args.command](args, parser)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has had enough, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (TaskError, GradingUnavailable, SandboxError, OSError, RuntimeError) as error:
        print(f"swegym-tutorial: {_told(error)}", file=sys.stderr)
        return FAILED


def _told(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


# -- train -----------------------------------------------------------------------------------------


def _train(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from rich.console import Console

    from .connect import RunError
    from .lines import so_far_line
    from .run import TrainingRun
    from .terminal import (
        evaluation_lines,
        fault_lines,
        habit_lines,
        resume_points,
        reward_line,
        summarise,
        watch,
    )

    if args.resume and args.output is None:
        parser.error("--resume goes on with a run: name its folder with --output")
    if args.resume and not (args.output / "config.json").is_file():
        parser.error(f"{args.output} holds no run to go on with: it has no config.json")
    if args.from_step is not None and not args.resume:
        parser.error("--from-step says where to go on: it needs --resume")
    config = _config(args, parser)
    if config.preset == "laptop" and os.environ.get("TINKER_BASE_URL", "").strip():
        print(
            "TINKER_BASE_URL is set and not used: the preset laptop starts its own server",
            file=sys.stderr,
            flush=True,
        )
    if args.smoke_test:
        return _smoke_test(config, parser)
    output = args.output or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    if output.exists() and not output.is_dir():
        parser.error(f"--output names the run's folder, and {output} is none")
    try:
        run = TrainingRun(
            config,
            output,
            evaluate=args.evaluate or None,
            resume=args.resume,
            from_step=args.from_step,
        )
    except RunError as error:
        parser.error(str(error))
    console = Console(emoji=False, markup=False)
    console.print(
        f"{config.preset} run in {output} (Ctrl-C stops it)", highlight=False, soft_wrap=True, markup=False
    )
    earlier = summarise(output) if args.resume and not console.is_terminal else None
    points = resume_points(output) if args.resume else {}
    if line := so_far_line(points, config.steps, config.clients, args.from_step):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    run.start()
    try:
        summary = watch(run, console, earlier)
    except KeyboardInterrupt:
        return _stop(run)
    run.wait()
    if not console.is_terminal:
        for line in (*evaluation_lines(summary), *habit_lines(summary), *fault_lines(summary)):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
    for line in reward_line(summary):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    console.print(f"figure: {output / 'reward_time.png'}", highlight=False, soft_wrap=True, markup=False)
    return DONE


def _smoke_test(config: TrainingConfig, parser: argparse.ArgumentParser) -> int:
    from .connect import RunError, server_from_environment
    from .trials import smoke_test

    if config.preset != "laptop":
        print("asking the training server; a cold one takes minutes to start", file=sys.stderr, flush=True)
    try:
        address = server_from_environment(config)
        count = smoke_test(config)
    except RunError as error:
        parser.error(str(error))
    where = f"the server at {address[0]}" if address else "a local server"
    print(f"smoke ok: generated {count} tokens with {config.base_model} on {where} (preset {config.preset})")
    return DONE


def _stop(run: Any) -> int:
    """Stop after Ctrl-C; a second one leaves at once, whenever it comes, and the children clean up."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    print("stopping: the last checkpoint stands (Ctrl-C again leaves at once)", file=sys.stderr)
    run.stop()
    run.join(20)
    if run.folder.checkpoint(0).exists():
        command = f"swegym-tutorial train --resume --output {shlex.quote(str(run.folder.path))}"
        print(f"stopped; go on with: {command}", file=sys.stderr)
    else:
        print("stopped before the first checkpoint; --resume begins anew in the folder", file=sys.stderr)
    if not run.closed(0.5) and run.left is None:
        print("ending the sandboxes", file=sys.stderr)
        run.closed(40)
    return INTERRUPTED


def _leave(signum: int, frame: Any) -> None:
    os._exit(INTERRUPTED)


def _config(args: argparse.Namespace, parser: argparse.ArgumentParser) -> TrainingConfig:
    from .connect import RunError, saved_config

    named = "clients steps groups_per_batch hours seed tasks sandbox base_model tokenizer"
    changes = {name: getattr(args, name) for name in named.split() if getattr(args, name) is not None}
    try:
        if args.resume:
            config = saved_config(args.output)
            if args.preset not in (None, config.preset):
                parser.error(f"{args.output} is a run of the {config.preset} preset")
        else:
            preset = args.preset or ("spindle" if os.environ.get("TINKER_BASE_URL") else "laptop")
            config = TrainingConfig.spindle() if preset == "spindle" else TrainingConfig.laptop()
        if "groups_per_batch" in changes:
            groups = changes["groups_per_batch"]
            changes["inflight_groups"] = max(1, min(config.inflight_groups, groups))
            if config.max_groups_per_batch is not None:
                changes["max_groups_per_batch"] = groups
        given = {*changes, *(setting.partition("=")[0] for setting in args.set or [])}
        changed = TrainingConfig(**{**config.to_json(), **changes}).with_settings(args.set or [])
        return changed if args.resume else _own_tokenizer(config, changed, given)
    except (ValueError, RunError) as error:
        parser.error(str(error))


def _own_tokenizer(preset: TrainingConfig, config: TrainingConfig, given: Collection[str]) -> TrainingConfig:
    """Drop what the preset says of its own model's tokenizer where another model or tokenizer is given."""
    if config.base_model != preset.base_model and "tokenizer" not in given:
        config = replace(config, tokenizer=None)
    if config.tokenizer != preset.tokenizer and "tokenizer_revision" not in given:
        config = replace(config, tokenizer_revision=None)
    return config


COMMANDS = {
    "show": commands.show,
    "evaluate": commands.evaluate,
    "tasks_list": commands.tasks_list,
    "tasks_show": commands.tasks_show,
    "tasks_validate": commands.tasks_validate,
    "sandboxes_list": commands.sandboxes_list,
    "sandboxes_reap": commands.sandboxes_reap,
    "serve": commands.serve,
    "doctor": commands.doctor,
    "train": _train,
}

if __name__ == "__main__":
    sys.exit(main())
