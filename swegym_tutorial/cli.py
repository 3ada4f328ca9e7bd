"""The `swegym-tutorial` command. Knows only how to read arguments and whom to call."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .arguments import make_parser
from .config import TrainingConfig
from .tasks import Task, TaskError, load_tasks

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed, 2 usage, 130 interrupted."""
    parser = make_parser()
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # busy-waiting threads slow everything beside them
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    signal.signal(signal.SIGTERM, _interrupt)
    from .sandbox import SandboxError

    try:
        return COMMANDS[args.command](args, parser)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has had enough, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (TaskError, SandboxError, OSError, RuntimeError) as error:
        print(f"swegym-tutorial: {error}", file=sys.stderr)
        return FAILED


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


# -- train -----------------------------------------------------------------------------------------


def _train(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from rich.console import Console

    from .connect import RunError
    from .run import TrainingRun
    from .terminal import evaluation_lines, fault_lines, reward_line, summarise, watch

    if args.resume and (args.output is None or not (args.output / "config.json").is_file()):
        parser.error("--resume goes on with a run: name its folder with --output")
    config = _config(args, parser)
    if args.smoke_test:
        return _smoke_test(config, parser)
    output = args.output or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    try:
        evaluated = args.resume and any(e.label == "before" for e in summarise(output).evaluations)
        run = TrainingRun(config, output, evaluate=args.evaluate or evaluated, resume=args.resume)
    except RunError as error:
        parser.error(str(error))
    console = Console()
    console.print(
        f"{config.preset} run in {output} (Ctrl-C stops it)", highlight=False, soft_wrap=True, markup=False
    )
    run.start()
    try:
        summary = watch(run, console)
    except KeyboardInterrupt:
        return _stop(run)
    run.wait()
    if not console.is_terminal:
        for line in (*evaluation_lines(summary), *fault_lines(summary)):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
    for line in reward_line(summary):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    console.print(f"figure: {output / 'reward_time.png'}", highlight=False, soft_wrap=True, markup=False)
    return DONE


def _smoke_test(config: TrainingConfig, parser: argparse.ArgumentParser) -> int:
    from .connect import RunError
    from .trials import smoke_test

    try:
        count = smoke_test(config)
    except RunError as error:
        parser.error(str(error))
    print(f"smoke ok: generated {count} tokens")
    return DONE


def _stop(run: Any) -> int:
    """Stop after Ctrl-C; a second one leaves at once, and the children clean up."""
    print("stopping: the last checkpoint stands (Ctrl-C again leaves at once)", file=sys.stderr)
    run.stop()
    try:
        run.join(20)
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    if run.folder.checkpoint(0).exists():
        command = f"swegym-tutorial train --resume --output {shlex.quote(str(run.folder.path))}"
        print(f"stopped; go on with: {command}", file=sys.stderr)
    else:
        print("stopped before the first checkpoint", file=sys.stderr)
    return INTERRUPTED


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
            changes["completed_group_buffer"] = max(1, min(config.completed_group_buffer, groups))
            if config.max_groups_per_batch is not None:
                changes["max_groups_per_batch"] = groups
        return TrainingConfig(**{**config.to_json(), **changes}).with_settings(args.set or [])
    except (ValueError, RunError) as error:
        parser.error(str(error))


# -- evaluate, show, tasks, serve, doctor ----------------------------------------------------------


def _show(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from rich.console import Console

    from .plots import save_reward_time
    from .terminal import progress_line, reward_line, summarise, table

    if not (args.run_folder / "events.jsonl").exists():
        parser.error(f"{args.run_folder} is no run folder: it has no events.jsonl")
    console = Console()
    if args.episode:
        return _show_episode(args.run_folder, args.episode, console)
    summary = summarise(args.run_folder)
    console.print(table(summary))
    for line in reward_line(summary):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    state = summary.status + (f": {summary.reason}" if summary.reason else "")
    console.print(f"{state}; {progress_line(summary)}", highlight=False, soft_wrap=True, markup=False)
    console.print(
        f"figure: {save_reward_time(args.run_folder, args.png)}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
    return DONE


def _show_episode(folder: Path, name: str, console: Any) -> int:
    from .events import read_episode

    found = sorted(folder.glob(f"episodes/*/*/{name}/*.json.gz"))
    if not found:
        raise TaskError(
            f"{folder} has no episode {name}; they are named like g000003-a2, in {folder / 'episodes'}"
        )
    for path in sorted({p.parent for p in found}):
        episode = read_episode(path)
        verdict = episode.get("verdict", {})
        console.rule(f"{path.relative_to(folder)}  {episode['instance_id']}")
        for n, turn in enumerate(episode["turns"], 1):
            console.print(f"turn {n}", style="bold")
            console.print(turn["text"], markup=False, highlight=False)
            for call in turn["calls"]:
                console.print(f"exit code {call['exit_code']}", style="dim", highlight=False)
                console.print(call["output"], markup=False, highlight=False, style="dim")
        console.print((path / "prediction.patch").read_text(errors="replace"), markup=False, highlight=False)
        tests = ", ".join(f"{test} {status}" for test, status in verdict.get("tests", {}).items())
        console.print(
            f"ended: {episode['ending']}; verdict: {verdict.get('outcome', 'not graded')} {verdict.get('detail', '')}"
        )
        if tests:
            console.print(tests, highlight=False, markup=False)
    return DONE


def _evaluate(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from .trials import evaluate_policy

    if bool(args.run_folder) == args.base:
        parser.error("name a run folder, or --base for the policy that training starts from")
    result = evaluate_policy(args.run_folder, split=args.split, attempts=args.attempts, seed=args.seed)
    for task, rewards in sorted(result.rewards.items()):
        print(f"{task:44} {sum(rewards):.0f} of {len(rewards)}")
    line = f"{result.split}: {result.rate:.3f} ({result.resolved} of {result.attempts} attempts resolved)"
    most = max(map(len, result.rewards.values()), default=0)
    ks = [k for k in (1, 2, 4, 8, 16) if k <= most]
    print(line, *(f"pass@{k} {result.pass_at(k):.3f}" for k in ks), sep="; ")
    if result.lost:
        print(f"{result.lost} attempts lost to infrastructure faults, and left out")
    return DONE


def _tasks_list(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from .task_text import listing

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in listing(load_tasks(args.tasks, split=args.split), width):
        print(line)
    return DONE


def _tasks_show(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from .task_text import describe

    print(describe(_task(args.tasks, args.id)))
    return DONE


def _task(source: str, name: str) -> Task:
    """Find a task in the source; one that the bundled set lacks may be a SWE-Gym task."""
    try:
        return load_tasks(source, ids=[name])[0]
    except TaskError:
        from .swegym_tasks import cached_path

        if source != "bundled" or not cached_path().is_file():
            raise
        return load_tasks("swegym", ids=[name])[0]


def _tasks_validate(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from .sandbox import backend
    from .validation import validate

    tasks = load_tasks(args.tasks, ids=args.ids or None, split=None)
    sandboxes = backend(args.sandbox)
    bad = 0
    try:
        for n, (task, fault) in enumerate(validate(tasks, sandboxes, TrainingConfig.laptop(), args.times), 1):
            bad += fault is not None
            print(
                f"{n:4} of {len(tasks)} {task.instance_id:36} {'valid' if fault is None else 'BROKEN: ' + fault}"
            )
    finally:
        sandboxes.close()
    print(f"{len(tasks) - bad} valid, {bad} broken")
    return FAILED if bad else DONE


def _sandboxes_list(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    found = _find_sandboxes(args)
    for each in found:
        age = "" if each.age is None else f"{each.age / 60:7.1f} min"
        state = {True: "its run is gone", False: "its run is alive", None: ""}[each.orphan]
        print(f"{each.kind:7} {each.name:44} {each.run or '-':32} {age:12} {state}".rstrip())
    print(f"{len(found)} sandboxes" + ("; `sandboxes reap` ends those whose run is gone" if found else ""))
    return DONE


def _sandboxes_reap(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from .sandbox.leftovers import end

    found = _find_sandboxes(args)
    chosen = [each for each in found if args.run is not None or args.all or each.orphan]
    failed = 0
    for each, why in end(chosen):
        failed += why is not None
        print(f"{each.kind} {each.name}: {'ended' if why is None else 'NOT ended: ' + why}")
    print(f"{len(chosen) - failed} sandboxes ended")
    if left := len(found) - len(chosen):
        print(f"{left} more are of runs that may be alive: --run RUN ends one run's, --all all of them")
    return FAILED if failed else DONE


def _find_sandboxes(args: argparse.Namespace) -> list[Any]:
    """Ask every kind that was named, or all; one that cannot be asked is told, and stops no other."""
    from .sandbox import SandboxUnavailable
    from .sandbox.leftovers import ASKED, find

    run = args.run
    if run is not None and (Path(run) / "events.jsonl").is_file():
        run = _run_ids(Path(run))
    runs = run if isinstance(run, list) else [run]
    found = []
    for kind in [args.sandbox] if args.sandbox else ASKED:
        try:
            found += [each for one in runs for each in find(kind, one)]
        except SandboxUnavailable as error:
            if args.sandbox:
                raise
            print(f"{kind}: not asked: {error}", file=sys.stderr)
    return found


def _run_ids(folder: Path) -> list[str]:
    from .events import EventReader

    events = EventReader(folder).read()
    return [event["run"] for event in events if event.get("event") == "run_start" and event.get("run")]


def _serve(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from .bundled import POLICY

    model = args.model or POLICY
    if not (model / "config.json").is_file():
        parser.error(f"{model} is no model folder: it has no config.json")
    from .server import serve

    if not 0 <= args.port < 65_536:
        parser.error(f"a port lies between 0 and 65535, not {args.port}")
    names = args.name or [TrainingConfig.laptop().base_model]
    serve(dict.fromkeys(names, model), port=args.port, state_dir=args.state, api_key=args.api_key)
    return DONE


def _doctor(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from .doctor import report

    return DONE if report() else FAILED


COMMANDS = {
    "show": _show,
    "evaluate": _evaluate,
    "tasks_list": _tasks_list,
    "tasks_show": _tasks_show,
    "tasks_validate": _tasks_validate,
    "sandboxes_list": _sandboxes_list,
    "sandboxes_reap": _sandboxes_reap,
    "serve": _serve,
    "doctor": _doctor,
    "train": _train,
}

if __name__ == "__main__":
    sys.exit(main())
