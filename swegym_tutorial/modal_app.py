"""The driver as a Modal app, so that a run needs no machine of one's own.

    modal run -m swegym_tutorial.modal_app --smoke-test              ask the training server for four tokens
    modal run -m swegym_tutorial.modal_app --clients 1 --steps 1     one small batch, the results are thrown away
    modal run --detach -m swegym_tutorial.modal_app::full --name first --clients 8 --steps 100 --hours 23

`full` is the real run. Its folder lies on the Modal Volume RUNS and is committed after every step, so it
outlives the container, and the same call again, with the same name, goes on with it: after a day, which is the
longest that Modal runs a function, and by itself where Modal moves it to another machine. With --detach the run
goes on when the terminal closes (`modal app logs swegym-tutorial-training` shows it, `modal app stop` ends it).
At any time `modal volume get swegym-tutorial-runs first runs/` copies the folder down, and
`swegym-tutorial show runs/first`, the dashboard and --resume work on it.

Whatever else `swegym-tutorial train` takes goes into --options, as one text: --options "--tasks swegym:all --set
kl_coef=0". Own tasks come by the volume, which the first run makes: `modal volume put swegym-tutorial-runs
tasks.jsonl`, and then --options "--tasks /runs/tasks.jsonl".

The Modal Secret SECRET has to hold TINKER_BASE_URL and TINKER_API_KEY:
`modal secret create spindle TINKER_BASE_URL=https://... TINKER_API_KEY=tml-...`. Other names are read from the
environment: SWEGYM_TUTORIAL_SECRET and SWEGYM_TUTORIAL_VOLUME. The sandboxes are opened with the container's own
rights, so no Modal token goes in. Only this module imports modal at the top.
"""

from __future__ import annotations

import os
import shlex
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import modal

from .cli import main as command
from .events import EventReader

PACKAGE = Path(__file__).resolve().parent
SECRET = os.environ.get("SWEGYM_TUTORIAL_SECRET", "spindle")
RUNS = os.environ.get("SWEGYM_TUTORIAL_VOLUME", "swegym-tutorial-runs")
MOUNT = "/runs"  # where the volume lies in the container
DAY = 24 * 60 * 60  # seconds: Modal's limit for one function call
COMMITTED = {"step_done", "evaluation"}  # events after which the folder is committed
COMMIT_EVERY = 10.0  # seconds between two looks at the events

REQUIREMENTS = (
    "modal==1.5.5",
    "tinker==0.24.1",
    "numpy==2.4.6",
    "transformers[chat-template]==5.17.0",
    "swegym @ git+https://github.com/SWE-Gym/SWE-Bench-Package.git@16dd480cce9b27bf111a362d280881c6def5d2a7",
    "matplotlib>=3.9",
    "rich>=13",
    "psutil>=5.9",
    "httpx>=0.27",
    "pytest>=8",
)

image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("git")
    .uv_pip_install(*REQUIREMENTS)
    .add_local_dir(PACKAGE, f"/root/{PACKAGE.name}", ignore=["**/__pycache__"])
)
app = modal.App("swegym-tutorial-training")
# Of the second kind: a full run has a million files, and the first kind holds half as many.
volume = modal.Volume.from_name(RUNS, create_if_missing=True, version=2)
secret = modal.Secret.from_name(SECRET, required_keys=["TINKER_BASE_URL", "TINKER_API_KEY"])


def run_command(arguments: Sequence[str]) -> None:
    """Run `swegym-tutorial` with these arguments. Raises RuntimeError where its exit code is not 0."""
    try:
        code: object = command(arguments)
    except SystemExit as end:  # argparse ends so
        code = end.code
    if code:
        raise RuntimeError(f"`swegym-tutorial {' '.join(arguments)}` ended with exit code {code}: see above")


def keep(folder: Path, commit: Callable[[], None], work: Callable[[], None]) -> None:
    """Do the work, which is a run in this folder, and commit after each of its steps and at the end.

    A commit that fails is told and tried again with the next step; the last one raises what it raises.
    """
    ended = threading.Event()

    def watch() -> None:
        events = EventReader(folder / "events.jsonl")
        while not ended.wait(COMMIT_EVERY):
            new = {event.get("event") for event in events.stream()}
            if new & COMMITTED:
                try:
                    commit()
                except Exception as error:
                    print(f"the run's folder could not be committed, which is tried again: {error}")

    watcher = threading.Thread(target=watch, name="commits", daemon=True)
    watcher.start()
    try:
        work()
    finally:
        ended.set()
        watcher.join()
        commit()


@app.function(image=image, secrets=[secret], cpu=4, memory=8192, timeout=25 * 60)
def run_training(clients: int, steps: int, groups_per_batch: int, smoke_test: bool = False) -> None:
    """Train a little, or with smoke_test only ask the server for a few tokens; nothing is kept."""
    numbers = {"--clients": clients, "--steps": steps, "--groups-per-batch": groups_per_batch}
    arguments = [text for name, number in numbers.items() for text in (name, str(number))]
    with tempfile.TemporaryDirectory() as folder:
        output = ["--output", str(Path(folder, "run"))]
        run_command(["train", *arguments, *output, *(["--smoke-test"] if smoke_test else [])])


@app.function(image=image, secrets=[secret], volumes={MOUNT: volume}, cpu=4, memory=8192, timeout=DAY)
def full(
    name: str,
    clients: int = 8,
    steps: int = 100,
    groups_per_batch: int = 32,
    hours: float = 23.0,
    options: str = "",
) -> None:
    """Train for real in the folder `name` of the volume; goes on with the run that is there.

    options: more of `swegym-tutorial train`'s, as they are written in a shell.
    """
    train(Path(MOUNT), volume.commit, name, clients, steps, groups_per_batch, hours, shlex.split(options))


def train(
    runs: Path,
    commit: Callable[[], None],
    name: str,
    clients: int,
    steps: int,
    groups_per_batch: int,
    hours: float,
    options: Sequence[str] = (),
) -> None:
    """Train in the folder `name` of `runs`, or go on with the run that is there. Raises ValueError for a name with folders."""
    if Path(name).name != name or name in ("", ".", ".."):
        raise ValueError(f"a run's name is one word without slashes, not {name!r}")
    folder = runs / name
    numbers = {
        "--clients": clients,
        "--steps": steps,
        "--groups-per-batch": groups_per_batch,
        "--hours": hours,
    }
    arguments = [text for option, number in numbers.items() for text in (option, str(number))]
    resume = ["--resume"] if (folder / "config.json").is_file() else []
    whole = ["train", *arguments, *options, "--output", str(folder), *resume]
    keep(folder, commit, lambda: run_command(whole))


@app.local_entrypoint()
def test(clients: int = 1, steps: int = 1, groups_per_batch: int = 1, smoke_test: bool = False) -> None:
    run_training.remote(clients, steps, groups_per_batch, smoke_test)
