"""Serving a model folder to `tinker` clients until a signal ends it.

Needs the extra `local` (torch, peft, starlette, uvicorn), which is imported when `serve` is called.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

NEEDED = ("torch", "peft", "safetensors", "starlette", "uvicorn")
SESSION_PATIENCE = 15 * 60.0  # seconds without a heartbeat after which a session ends


def check_extras() -> None:
    """Raise RuntimeError that tells what to install where a needed package is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f'the local server needs {", ".join(missing)}: pip install "swegym_tutorial[local]"'
        )


def serve(
    models: Mapping[str, Path],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    api_key: str | None = None,
    state_dir: Path,
    threads: int | None = None,
    session_patience: float = SESSION_PATIENCE,
    launcher: Callable[[Callable[[], None]], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, and tell on stdout how to connect.

    models: the base_model names and the folders that they stand for; several names may share one. port: 0 takes a
    free one. api_key: default TINKER_API_KEY, else a random one. state_dir: where checkpoints go. threads: of torch;
    default two, or the cores where they are fewer. launcher: set where another process started this one; it is
    called with a function that ends the server, and its reader gets one line of JSON instead of a text. Raises
    RuntimeError for missing packages, a state_dir in use or a model that can't be loaded; OSError for the address.
    """
    check_extras()
    # Threads that wait by spinning slow everything beside them on few cores; read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    import uvicorn

    from .engine import Engine
    from .http import make_app
    from .models import Models
    from .records import ALPHA
    from .store import Store

    key = api_key or os.environ.get("TINKER_API_KEY") or f"tml-{secrets.token_urlsafe(24)}"
    if not key.startswith("tml-"):
        raise RuntimeError("the API key must begin with tml-: the tinker SDK takes no other")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    loaded = Models(models, Store(Path(state_dir)), threads or min(2, os.cpu_count() or 1))
    engine = Engine(loaded)
    engine.start()
    config = uvicorn.Config(
        make_app(loaded, engine, key, session_patience),
        log_level="warning",
        access_log=False,
        timeout_keep_alive=120,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)

    def end() -> None:
        server.should_exit = True

    told = {"url": _url(host, listener), "api_key": key, "models": list(models), "alpha": ALPHA}
    if launcher:
        launcher(end)
        print(json.dumps(told), flush=True)
        # The launcher reads no further; what is still printed goes with the log.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    else:
        print(_words(told), flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn raises a signal again that ended it; by then it has been answered.
        signal.signal(number, lambda number, frame: None)
    server.run(sockets=[listener])
    engine.stop()


def _url(host: str, listener: socket.socket) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def _words(told: dict[str, Any]) -> str:
    return (
        f"serving {', '.join(told['models'])} (LoRA alpha {told['alpha']:g}); Ctrl-C ends it. Connect with\n"
        f"export TINKER_BASE_URL={told['url']}\nexport TINKER_API_KEY={told['api_key']}"
    )
