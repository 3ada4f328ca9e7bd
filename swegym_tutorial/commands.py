"""The commands beside `train`. Each takes the arguments that were read, and returns the exit code."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import trust
from .config import TrainingConfig
from .events import write_atomically
from .tasks import Task, TaskError, load_tasks

if TYPE_CHECKING:
    from .plots import Picture
    from .summary import RunSummary
    from .validation import Validation
    from .validation_view import ValidationView

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def show(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from rich.console import Console

    from .lines import habit_rates
    from .plots import save_reward_time
    from .terminal import summarise, table

    if not (args.run_folder / "events.jsonl").exists():
        parser.error(f"{args.run_folder} is no run folder: it has no events.jsonl")
    if args.episode is not None:
        if not args.episode.strip():
            parser.error("--episode wants the name of an attempt, like g000003-a2")
        if args.png or args.timeline or args.habits:
            parser.error(
                "--episode prints one attempt and draws nothing: leave out --png, --timeline and --habits"
            )
        return _show_episode(args.run_folder, args.episode)
    summary = summarise(args.run_folder)
    if args.habits is not None and not habit_rates(summary):
        print(f"--habits: no finished batch of {args.run_folder} tells of habits", file=sys.stderr)
        return FAILED
    pictures = _pictures(args, summary)  # before anything is printed or saved: one may be impossible to draw
    told = _state_lines(args.run_folder, summary)
    console = Console(emoji=False, markup=False)
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    console.print(table(summary))
    for line in told:
        say(line)
    say(f"figure: {save_reward_time(args.run_folder, args.png)}")
    for name, picture, path in pictures:
        say(picture.words)
        say(f"{name}: {picture.save(path)}")
    return DONE


def _state_lines(folder: Path, summary: RunSummary) -> list[str]:
    """Return what stands under the table of `show`; finds out whether the run's process is gone."""
    from .events import RunFolder
    from .lines import ENDED, progress_line, resume_command, resume_lines, reward_line
    from .terminal import resume_points

    over = summary.status in ENDED
    summary.gone = not over and not RunFolder(folder).written()
    state = summary.status + (f": {summary.reason}" if summary.reason else "")
    if summary.gone:
        state = f"its process is gone; go on with: {resume_command(folder)}\nit was {state}"
    if summary.status == "stopped" and summary.phase:
        state += f" while {summary.phase}"
    told = state if over else f"{state}; {progress_line(summary)}"
    return [*reward_line(summary), *resume_lines(resume_points(folder)), told]


def _pictures(args: argparse.Namespace, summary: RunSummary) -> list[tuple[str, Picture, Path]]:
    """Draw what was asked for beside the run's figure: its name, the picture, and where it goes."""
    from .habit_plot import habit_figure, habit_text
    from .plots import picture
    from .timeline import timeline

    drawn = []
    if args.timeline is not None:
        drawn.append(("timeline", timeline(args.run_folder), args.timeline))
    if args.habits is not None:
        drawn.append(("habits", picture(habit_figure(summary), habit_text(summary)), args.habits))
    return drawn


def _show_episode(folder: Path, name: str) -> int:
    from .viewer.episodes import EpisodeList
    from .viewer.page import find_decoder, load_page, read_config
    from .viewer.text import episode_text

    episodes, config = EpisodeList(folder), read_config(folder)
    try:
        page = load_page(episodes, episodes.find(name), config)
    except LookupError as error:
        raise TaskError(str(error)) from None
    print(episode_text(page, find_decoder(config)[0], whole=True))
    return DONE


def evaluate(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from .trials import evaluate_policy

    if args.run_folder and args.base:
        parser.error(f"only one is measured at a time: leave out --base, or the run folder {args.run_folder}")
    if not args.run_folder and not args.base:
        parser.error("name a run folder, or --base for the policy that training starts from")
    if args.run_folder and not (args.run_folder / "config.json").exists():
        parser.error(f"there is no run in {args.run_folder}: it has no config.json")
    say = partial(print, file=sys.stderr, flush=True)
    result = evaluate_policy(
        args.run_folder, split=args.split, attempts=args.attempts, seed=args.seed, say=say
    )
    for task, rewards in sorted(result.rewards.items()):
        print(f"{task:44} {sum(rewards):.0f} of {len(rewards)}")
    line = f"{result.split}: {result.rate:.3f} ({result.resolved} of {result.attempts} attempts resolved)"
    most = max(map(len, result.rewards.values()), default=0)
    ks = [k for k in (1, 2, 4, 8, 16) if k <= most]
    print(line, *(f"pass@{k} {result.pass_at(k):.3f}" for k in ks), sep="; ")
    if result.lost:
        print(f"{result.lost} attempts lost to infrastructure faults, and left out")
    return DONE


def tasks_list(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from .task_text import listing

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    tasks = load_tasks(args.tasks, split=args.split)
    known = {name: record.status for name, record in trust.recall_all(tasks).items()}
    for line in listing(tasks, width, known):
        print(line)
    return DONE


def tasks_show(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
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


def tasks_validate(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from rich.console import Console

    from .grading import check_graders
    from .sandbox import backend
    from .validation import Status, Validation, validate
    from .validation_view import ValidationView

    tasks = load_tasks(args.tasks, ids=args.ids or None, split=None)
    check_graders(tasks)
    config = TrainingConfig.spindle() if any(task.image for task in tasks) else TrainingConfig.laptop()
    view = ValidationView(Console(emoji=False, markup=False), len(tasks), args.times)
    sandboxes = backend(args.sandbox, config, run="validate", say=view.say)
    done: list[Validation] = []
    try:
        missing = sandboxes.missing(tasks)
        there = [task for task in tasks if task.instance_id not in missing]
        workers = config.grading_workers if sandboxes.name == "modal" else None
        with view:
            for task in tasks:
                if task.instance_id in missing:
                    done.append(Validation(task, Status.UNCHECKED, missing[task.instance_id]))
                    view.on_task(done[-1])
            for found in validate(there, sandboxes, config, args.times, workers, view.on_try):
                done.append(found)
                view.on_task(found)
                trust.keep(found, sandboxes.name, view.say)
    finally:
        sandboxes.close()
        if done:  # also what an interrupt has left
            order = {task.instance_id: n for n, task in enumerate(tasks)}
            done.sort(key=lambda found: order[found.task.instance_id])
            _report(done, sandboxes.name, args, view)
    return DONE if all(each.valid for each in done) else FAILED


def _report(done: Sequence[Validation], sandbox: str, args: argparse.Namespace, view: ValidationView) -> None:
    """Show the table, and write it to a file."""
    view.table(done)
    path = args.table or trust.table_path(args.tasks)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, trust.table_text(done, sandbox, args.times))
    except OSError as error:
        view.say(f"the table could not be written to {path}: {error}")
    else:
        view.say(f"table: {path}")


def sandboxes_list(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    found = _find_sandboxes(args)
    for each in found:
        age = "" if each.age is None else f"{each.age / 60:7.1f} min"
        state = {True: "its run is gone", False: "its run is alive", None: ""}[each.orphan]
        print(f"{each.kind:7} {each.name:44} {each.run or '-':32} {age:12} {state}".rstrip())
    print(_count(len(found)) + ("; `sandboxes reap` ends those whose run is gone" if found else ""))
    return DONE


def sandboxes_reap(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from .sandbox.leftovers import end

    found = _find_sandboxes(args)
    chosen = [each for each in found if args.run is not None or args.all or each.orphan]
    failed = 0
    for each, why in end(chosen):
        failed += why is not None
        print(f"{each.kind} {each.name}: {'ended' if why is None else 'NOT ended: ' + why}")
    print(f"{_count(len(chosen) - failed)} ended")
    if left := len(found) - len(chosen):
        print(f"{left} more are of runs that may be alive: --run RUN ends one run's, --all all of them")
    return FAILED if failed else DONE


def _count(number: int) -> str:
    return f"{number} sandbox{'' if number == 1 else 'es'}"


def _find_sandboxes(args: argparse.Namespace) -> list[Any]:
    """Ask every kind that was named, or all; one that cannot be asked is told, and stops no other."""
    from .sandbox import SandboxUnavailable
    from .sandbox.leftovers import ASKED, find

    run = args.run
    if run is not None and (Path(run) / "events.jsonl").is_file():
        run = _run_ids(Path(run))
    elif run is not None and os.sep in run:
        raise FileNotFoundError(f"there is no run in {run}: it has no events.jsonl")
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
    from .events import scan

    return [event["run"] for event in scan(folder, ["run_start"]) if event.get("run")]


def serve(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
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


def doctor(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from .doctor import report

    return DONE if report() else FAILED
