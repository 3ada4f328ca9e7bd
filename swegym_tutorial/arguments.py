"""What the `swegym-tutorial` command takes, and what its `--help` says. Knows nothing of what it does."""

from __future__ import annotations

import argparse
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .config import TrainingConfig
from .sandbox import KINDS

SPLITS = "train, held-out, held-out-phrasings and held-out-families (both bundled only), or a split that your file names"
SOURCES = "bundled, swegym (31 tasks), swegym:all, swegym:OWNER/REPO, swegym:ID,ID, or a JSONL file"


def _at_least_zero(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, not {text}")
    return value


def _positive(kind: Any) -> Any:
    def read(text: str) -> Any:
        value = kind(text)
        if value <= 0:
            raise argparse.ArgumentTypeError(f"must be positive, not {text}")
        return value

    read.__name__ = kind.__name__
    return read


def _png(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(
            f"what is drawn is a PNG: name a file that ends in .png, not {text!r}"
        )
    return path


def _setting(text: str) -> str:
    name, equals, _ = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"FIELD=VALUE is wanted, as in steps=10, not {text!r}")
    names = [field.name for field in fields(TrainingConfig)]
    if name not in names and (close := get_close_matches(name, names)):
        raise argparse.ArgumentTypeError(
            f"no setting is called {name!r}: did you mean {' or '.join(close)}? All are fields of TrainingConfig"
        )
    return text


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="swegym-tutorial",
        description="Train a coding agent with reinforcement learning: on this machine in minutes, or on a "
        "Tinker-compatible server for real.",
        epilog="Start with `swegym-tutorial doctor`, then `swegym-tutorial train --evaluate`.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _train_arguments(
        commands.add_parser(
            "train",
            help="run the whole loop",
            description="Train. The laptop preset needs no account, GPU or network. The spindle preset is the "
            "published run: Qwen3.5-9B on 31 SWE-Gym tasks in Modal Sandboxes, eight LoRA clients on the "
            "Tinker-compatible server that TINKER_BASE_URL and TINKER_API_KEY name. Begin it with --smoke-test, "
            "then with --clients 1 --steps 1 --groups-per-batch 1.",
        )
    )

    show = commands.add_parser("show", help="show a run: its steps, its figure, one of its attempts")
    show.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder")
    show.add_argument(
        "--episode", metavar="NAME", help="only an attempt, like g000003-a2: its turns, patch and tests"
    )
    show.add_argument(
        "--png", type=_png, metavar="FILE", help="where the figure goes (default: RUN/reward_time.png)"
    )
    show.add_argument(
        "--timeline",
        type=_png,
        metavar="FILE",
        help="also draw what went on at the same time (attempts, grading, training) as a PNG: the last ten steps",
    )
    show.add_argument(
        "--habits",
        type=_png,
        metavar="FILE",
        help="also draw what became of the habits over training (looking before an edit, running the tests) as a PNG",
    )
    show.set_defaults(command="show")

    evaluate = commands.add_parser(
        "evaluate",
        help="measure a policy: resolve rate and pass@k",
        description="Measure the last checkpoint of a run on its own tasks, server and sandboxes; or with --base the "
        "bundled policy that the laptop preset starts from. Each attempt is sampled anew and graded.",
    )
    evaluate.add_argument(
        "run_folder", type=Path, nargs="?", metavar="RUN", help="a run: its last checkpoint"
    )
    evaluate.add_argument("--base", action="store_true", help="the bundled policy, before training")
    evaluate.add_argument("--split", default="held-out", help=f"{SPLITS} (default held-out)")
    evaluate.add_argument("--attempts", type=_positive(int), default=8, help="attempts a task (default 8)")
    evaluate.add_argument("--seed", type=int, default=0, help="decides the sampling (default 0)")
    evaluate.set_defaults(command="evaluate")

    tasks = commands.add_parser("tasks", help="list, show and validate tasks")
    kinds = tasks.add_subparsers(required=True, metavar="COMMAND")
    listing = kinds.add_parser(
        "list", help="one line a task, with what validation has found: - where that is nothing"
    )
    listing.add_argument("--split", help=f"{SPLITS} (default: all of the selection)")
    listing.set_defaults(command="tasks_list")
    one = kinds.add_parser("show", help="a task's issue, gold patch and tests")
    one.add_argument("id", metavar="ID")
    one.set_defaults(command="tasks_show")
    check = kinds.add_parser(
        "validate",
        help="base must fail, the gold patch must pass",
        description="Try each task's base and gold patch, several times at once, and keep what is found: training "
        "leaves out what is broken or flaky. Exit code 0 where all are valid.",
    )
    check.add_argument("ids", nargs="*", metavar="ID", help="default: all")
    check.add_argument(
        "--times",
        type=_positive(int),
        default=3,
        metavar="N",
        help="how often each is tried (default 3: one try shows no flaky test)",
    )
    check.add_argument("--sandbox", choices=KINDS, default="auto", help="where the tests run (default auto)")
    check.add_argument(
        "--table", type=Path, metavar="FILE", help="where the table goes (default: the cache folder)"
    )
    check.set_defaults(command="tasks_validate")
    for command in (listing, one, check):
        command.add_argument(
            "--tasks", default="bundled", metavar="SOURCE", help=f"{SOURCES} (default bundled)"
        )

    sandboxes = commands.add_parser("sandboxes", help="find and end what killed runs left behind")
    kinds = sandboxes.add_subparsers(required=True, metavar="COMMAND")
    there = kinds.add_parser("list", help="the sandboxes that are there now, and their runs")
    there.set_defaults(command="sandboxes_list")
    reap = kinds.add_parser("reap", help="end those whose run is gone")
    reap.add_argument("--all", action="store_true", help="also those whose run may be alive")
    reap.set_defaults(command="sandboxes_reap")
    for command in (there, reap):
        command.add_argument("--run", metavar="RUN", help="of this run alone: its folder, or its id")
        command.add_argument(
            "--sandbox", choices=("local", "docker", "modal"), help="of this kind alone (default: all)"
        )

    serve = commands.add_parser("serve", help="serve a model folder to tinker clients on this machine")
    serve.add_argument("--port", type=int, default=0, help="default: a free one")
    serve.add_argument(
        "--model", type=Path, metavar="PATH", help="a causal LM's folder (default: the bundled policy)"
    )
    serve.add_argument(
        "--name", action="append", help="the base_model name it answers to; may be given again"
    )
    serve.add_argument(
        "--state", type=Path, default=Path("runs/server"), help="where checkpoints go (default: runs/server)"
    )
    serve.add_argument("--api-key", help="default: the TINKER_API_KEY in the environment, else a random one")
    serve.set_defaults(command="serve")

    doctor = commands.add_parser(
        "doctor", help="tell what works on this machine, and how to mend what doesn't"
    )
    doctor.set_defaults(command="doctor")
    return parser


def _train_arguments(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--preset", choices=("laptop", "spindle"), help="default: spindle where TINKER_BASE_URL is set"
    )
    train.add_argument("--output", type=Path, metavar="DIR", help="the run's folder (default: runs/<time>)")
    train.add_argument(
        "--resume", action="store_true", help="go on from the checkpoints in the output folder"
    )
    train.add_argument(
        "--from-step",
        type=_at_least_zero,
        metavar="N",
        help="with --resume: go back to the checkpoint after so many steps, one of the last that `show` lists",
    )
    train.add_argument(
        "--smoke-test",
        action="store_true",
        help="only make an adapter on the server, publish it and sample from it once",
    )
    train.add_argument("--evaluate", action="store_true", help="measure the held-out splits before and after")
    train.add_argument("--clients", type=_positive(int), metavar="N", help="LoRA adapters side by side")
    train.add_argument("--steps", type=_positive(int), metavar="N", help="batches a client")
    train.add_argument(
        "--groups-per-batch", type=_positive(int), metavar="N", help="tasks that one update learns from"
    )
    train.add_argument(
        "--hours",
        type=_positive(float),
        metavar="H",
        help="training ends after these many hours since the start, or the resume",
    )
    train.add_argument(
        "--seed", type=int, metavar="N", help="decides the order of tasks, the adapter's start, the sampling"
    )
    train.add_argument("--tasks", metavar="SOURCE", help=SOURCES)
    train.add_argument(
        "--sandbox",
        choices=KINDS,
        help="where commands run: local is bubblewrap, auto is local or else docker; subprocess isolates nothing",
    )
    train.add_argument(
        "--base-model", metavar="NAME", help="the server's name for the model; on a laptop, or its folder"
    )
    train.add_argument(
        "--tokenizer", metavar="NAME", help="a path or hub name (default: what the server says)"
    )
    train.add_argument(
        "--set",
        action="append",
        type=_setting,
        metavar="FIELD=VALUE",
        help="any other setting of TrainingConfig; may be given again",
    )
    train.set_defaults(command="train")
