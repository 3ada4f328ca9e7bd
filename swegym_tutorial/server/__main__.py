"""The server as a child of `LocalServer`: told on stdin what to serve, and gone when its parent is.

The first line of stdin is a JSON object; after it, stdin stays open for as long as the parent lives.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .main import serve

PATIENCE = 0.6  # seconds to end in an orderly way, once the parent is gone


def main() -> None:
    told = json.loads(sys.stdin.buffer.readline())
    parent = told["parent"]
    end: list[Callable[[], None]] = []

    def watch() -> None:
        # A forked child of the parent may hold the pipe for longer, so the parent is looked at too.
        while os.getppid() == parent:
            if select.select([0], [], [], 0.2)[0] and not os.read(0, 1024):
                break
        for call in end:
            call()
        time.sleep(PATIENCE if end else 0)
        os._exit(0)

    threading.Thread(target=watch, name="parent", daemon=True).start()
    try:
        serve(
            {name: Path(folder) for name, folder in told["models"].items()},
            api_key=told["api_key"],
            state_dir=Path(told["state_dir"]),
            launcher=end.append,
            **told["options"],
        )
    except (RuntimeError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    sys.stderr.flush()
    # The engine's thread may be in the middle of a computation that nobody waits for any more.
    os._exit(0)


if __name__ == "__main__":
    main()
