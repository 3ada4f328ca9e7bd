"""Run the server in a process of its own: `python -m modal_server`, with `tests` on the path.

It prints the variables that lead a client to it as one JSON line, and ends when its stdin ends. A line on stdin
is a JSON list, answered by a line: ["throttle", 3] calls a method of the server, ["=", "create_seconds", 0.5]
sets one of its values, ["?", "running"] asks for one.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from .server import ModalServer


def answer(server: ModalServer, line: str) -> Any:
    what, *arguments = json.loads(line)
    if what == "?":
        return getattr(server, arguments[0])
    if what == "=":
        return setattr(server, arguments[0], arguments[1])
    return getattr(server, what)(*arguments)


def main() -> None:
    with ModalServer() as server:
        print(json.dumps(server.settings), flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(server, line), default=str), flush=True)


if __name__ == "__main__":
    main()
