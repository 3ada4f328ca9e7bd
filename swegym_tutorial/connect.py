"""What a run needs before it starts: its server, its model, own parts, and the settings of the run it goes on with.

Knows nothing of jobs and evaluations.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import resource
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import sandbox
from .bundled import POLICY
from .calls import in_thread
from .config import TrainingConfig
from .events import RunFolder
from .grading import name_of
from .halt import Halt, Stopped
from .policy import PolicyClient, PolicyService
from .preflight import COLD_START, check_address
from .rollout import Chat
from .session import bypass_proxy_for
from .tasks import absolute_source

if TYPE_CHECKING:
    from .server.process import LocalServer


FILES = 65_536  # open files at once
RESTARTS = 3  # of a local server that ends by itself, in one run


class RunError(RuntimeError):
    """The run cannot start or go on as it was asked; the text says why and what to do."""


def connect(
    config: TrainingConfig,
    folder: RunFolder,
    address: tuple[str, str] | None,
    halt: Halt,
    closing: contextlib.ExitStack,
    on_death: Callable[[str], None],
    log: Callable[..., None] | None = None,
) -> PolicyService:
    """Connect to the server at (URL, key), or where there is none to a local one, started and closed here.

    on_death: called with the reason where the local one ends by itself again and again. log: told of what is waited
    for; the folder's by default. Raises PreflightError, RuntimeError, Stopped.
    """
    if address is None:
        from .server.process import LocalServer

        models = {config.base_model: model_folder(config)}
        threads = max(1, (os.cpu_count() or 2) // 2)  # the other half is for sandboxes and tests
        server = LocalServer(
            models, state_dir=folder.path / "server", log_path=folder.path / "server.log", threads=threads
        )
        closing.callback(server.stop)
        if not server.start(halt):
            raise Stopped
        over = halt.child()
        watcher = threading.Thread(
            target=_watch, args=(server, over, folder, on_death), name="local-server-watch", daemon=True
        )
        watcher.start()
        closing.callback(watcher.join, 2.0)
        closing.callback(over.set)
        address = (server.url, server.key)
    else:
        bypass_proxy_for(address[0])
        check = partial(check_address, *address, config.base_model)
        in_thread(check, halt, f"asking the server at {address[0]}", COLD_START)
    service = PolicyService(config, address, halt, log or folder.log)
    closing.callback(service.close)
    return service


def _watch(
    server: LocalServer, over: threading.Event, folder: RunFolder, on_death: Callable[[str], None]
) -> None:
    """Start the local server anew where it has ended; its clients go on from their last checkpoints."""
    deaths, reason = 0, None
    while not over.wait(0.5):
        if not (reason := reason or server.death()):
            continue
        deaths += 1
        if deaths > RESTARTS:
            on_death(
                f"{reason}\nIt was started again {RESTARTS} times; --resume goes on from the last checkpoint"
            )
            return
        folder.log("note", text=f"the local server is started again: {reason.partition(';')[0]}")
        server.stop()
        try:
            server.start(over)
            reason = None
        except (RuntimeError, OSError) as error:
            reason = str(error)


def model_folder(config: TrainingConfig) -> Path:
    """Return the folder that the local server serves: the bundled policy's, or the one that base_model names."""
    if config.base_model == TrainingConfig.base_model:
        return POLICY
    folder = Path(config.base_model)
    if not (folder / "config.json").is_file():
        raise RunError(f"base_model {config.base_model!r} is no model folder: it has no config.json")
    return folder


def anywhere(config: TrainingConfig) -> TrainingConfig:
    """Return the settings with absolute paths, so that a run can be gone on with in another working folder."""
    model, tokenizer = config.base_model, config.tokenizer
    if config.preset == "laptop" and Path(model).is_dir():
        model = str(Path(model).absolute())
    if tokenizer is not None and Path(tokenizer).is_dir():
        tokenizer = str(Path(tokenizer).absolute())
    return replace(config, tasks=absolute_source(config.tasks), base_model=model, tokenizer=tokenizer)


def saved_config(folder: Path) -> TrainingConfig:
    """Return the settings of the run in a folder. Raises RunError where there are none that can be read."""
    path = folder / "config.json"
    try:
        return TrainingConfig(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RunError(f"{folder} holds no run to go on with: {path.name} cannot be read: {error}") from error


def changed_settings(saved: TrainingConfig, config: TrainingConfig) -> dict[str, list[Any]]:
    """Return what a resumed run takes over: field -> [old, new]."""
    old, new = saved.to_json(), config.to_json()
    return {name: [old[name], new[name]] for name in new if old[name] != new[name]}


def check_same(saved: TrainingConfig, config: TrainingConfig) -> None:
    """Refuse to go on with other settings where the checkpoints or the order of the tasks depend on them."""
    fixed = [
        "preset",
        "base_model",
        "tasks",
        "seed",
        "lora_rank",
        "train_unembed",
        "group_size",
        "system_prompt",
    ]
    if changed := [name for name in fixed if getattr(saved, name) != getattr(config, name)]:
        told = ", ".join(
            f"{name} was {getattr(saved, name)!r}, not {getattr(config, name)!r}" for name in changed
        )
        raise RunError(f"a run can only be resumed with what it began with: {told}")


def check_parts(config: TrainingConfig, sandboxes: object, reward: object) -> None:
    """Refuse what a run cannot use as its sandboxes or as its reward; None is the package's own. Raises RunError."""
    if sandboxes is None and config.sandbox not in sandbox.KINDS:
        raise RunError(f"no sandbox is called {config.sandbox!r}; there are {', '.join(sandbox.KINDS)}")
    if sandboxes is not None:
        _check_backend(sandboxes)
    if reward is None:
        return
    if not callable(reward):
        raise RunError(
            f"reward={reward!r:.100} is no function: it is called with the task, the attempt and its verdict"
        )
    try:
        inspect.signature(reward).bind("task", "attempt", "verdict")
    except TypeError as error:
        raise RunError(
            f"the reward {name_of(reward)} must take three arguments, the task, the attempt and its verdict: {error}"
        ) from None
    except ValueError:  # some functions that are written in C do not tell what they take
        pass


def _check_backend(sandboxes: object) -> None:
    if isinstance(sandboxes, type):
        raise RunError(
            f"sandboxes={sandboxes.__name__} is a class: give an object of it, {sandboxes.__name__}(...)"
        )
    if isinstance(sandboxes, str):
        raise RunError(
            f"sandboxes={sandboxes!r:.100} is a text: name a kind of sandbox in the settings, as in "
            f"TrainingConfig.laptop(sandbox={sandboxes!r:.100}), or give a backend"
        )
    if lacks := [
        name for name in ("open", "missing", "close") if not callable(getattr(sandboxes, name, None))
    ]:
        raise RunError(
            f"sandboxes={type(sandboxes).__name__} has no method {', '.join(lacks)}: a backend has open(task), "
            "missing(tasks) and close(), as sandbox.SandboxBackend tells"
        )
    if getattr(sandboxes, "closed", False) is True:
        raise RunError(f"sandboxes={type(sandboxes).__name__}: {sandbox.BackendClosed()}")


def server_from_environment(config: TrainingConfig) -> tuple[str, str] | None:
    if config.preset == "laptop":
        return None
    url, key = (os.environ.get(name, "").strip() for name in ("TINKER_BASE_URL", "TINKER_API_KEY"))
    if not url or not key:
        missing = " and ".join(n for n, v in (("TINKER_BASE_URL", url), ("TINKER_API_KEY", key)) if not v)
        raise RunError(
            f"the {config.preset} preset trains on your Tinker-compatible server; not set: {missing}. "
            "Export TINKER_BASE_URL='https://...' and TINKER_API_KEY='tml-...', or use --preset laptop"
        )
    return url, key


def first_client(
    service: PolicyService, config: TrainingConfig, halt: Halt | None = None
) -> tuple[PolicyClient, Chat]:
    """Return the first job's client and, with its model's tokenizer, the chat. Raises PolicyError, TemplateError."""
    client = service.client(0, halt)
    client.begin()
    chat = Chat(service.tokenizer(client), config.system_prompt)
    service.stop_tokens = chat.stop_tokens
    return client, chat


def raise_file_limit() -> None:
    """Allow as many open files as the system lets us: hundreds of sandboxes each keep connections open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
