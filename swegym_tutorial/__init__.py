"""Reinforcement learning of coding agents, step by step.

    from swegym_tutorial import Dashboard, TrainingConfig, TrainingRun, load_tasks

Three roles make a run, and each can be replaced by anything that fits its protocol: a sandbox
(`swegym_tutorial.sandbox.SandboxBackend`), a policy to sample from (`swegym_tutorial.rollout.Sampler`) and a
Tinker-compatible training server. What is named here is imported when it is first used, so that importing the
package is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "TrainingConfig": "config",
    "Task": "tasks",
    "load_tasks": "tasks",
    "generate_rollout": "rollout",
    "grade": "grading",
    "advantages": "minibatch",
    "prepare_minibatch": "minibatch",
    "TrainingRun": "run",
    "Dashboard": "dashboard",
    "EpisodeViewer": "viewer",
}
__all__ = [
    "Dashboard",
    "EpisodeViewer",
    "Task",
    "TrainingConfig",
    "TrainingRun",
    "advantages",
    "generate_rollout",
    "grade",
    "load_tasks",
    "prepare_minibatch",
]

if TYPE_CHECKING:
    from .config import TrainingConfig
    from .dashboard import Dashboard
    from .grading import grade
    from .minibatch import advantages, prepare_minibatch
    from .rollout import generate_rollout
    from .run import TrainingRun
    from .tasks import Task, load_tasks
    from .viewer import EpisodeViewer


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
