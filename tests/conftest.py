"""What many tests share: a tiny task, real sandboxes, the bundled policy's chat."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import hypothesis.strategies  # before any thread runs: pytest's parsing of imports is not thread-safe on Python 3.11
import pytest

from swegym_tutorial import TrainingConfig, load_tasks
from swegym_tutorial.bundled import POLICY
from swegym_tutorial.rollout import Chat, Sample
from swegym_tutorial.sandbox import SandboxBackend, backend
from swegym_tutorial.tasks import Task

# How long an example takes, or is drawn for, says how busy the machine is and nothing of what is tested.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")

# A job in the background starts with Ctrl-C ignored, and so would the processes of these tests.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests that run beside each other (`-n`): those of a file follow one another in one process, and so do those of all
# files that need the container engine. The longest begin first, so that none is left alone at the end.
LONGEST = (
    "containers",
    "tests/browser/test_notebooks_in_a_browser.py",
    "tests/test_run.py",
    "tests/test_chaos.py",
)


def group_of(nodeid: str) -> str:
    file = nodeid.split("::")[0]
    contained = "/sandbox/" in file and not file.endswith(("test_local.py", "test_modal.py"))
    return "containers" if contained else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(group_of(item.nodeid), len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


@pytest.fixture(scope="session")
def sandboxes() -> Iterator[SandboxBackend]:
    opened = backend("local")
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def task() -> Task:
    """The first bundled training task."""
    return load_tasks()[0]


@pytest.fixture(scope="session")
def config() -> TrainingConfig:
    """The laptop's, with patience for commands on a busy machine."""
    return TrainingConfig.laptop(tool_timeout=60.0)


@pytest.fixture(scope="session")
def chat(config: TrainingConfig) -> Chat:
    from transformers import AutoTokenizer

    return Chat(AutoTokenizer.from_pretrained(POLICY), config.system_prompt)


class Script:
    """A policy that says what it is given, turn by turn, and remembers its prompts."""

    def __init__(self, chat: Chat, *turns: str | list[int], stopped: bool = True) -> None:
        self.chat = chat
        self.turns = list(turns)
        self.stopped = stopped
        self.prompts: list[list[int]] = []
        self.said: list[list[int]] = []

    def sample(self, prompt: list[int], max_tokens: int, seed: int | None) -> Sample:
        self.prompts.append(list(prompt))
        turn = self.turns.pop(0)
        tokens = turn if isinstance(turn, list) else self.chat.encode(turn) + self.chat.stop_tokens
        self.said.append(tokens)
        return Sample(tokens, [-0.5] * len(tokens), self.stopped)


def tool_call(command: str) -> str:
    return (
        "Look first.\n</think>\n\n<tool_call>\n<function=bash>\n<parameter=command>\n"
        f"{command}\n</parameter>\n</function>\n</tool_call>"
    )


FINAL = "Done.\n</think>\n\nFixed the bug."
