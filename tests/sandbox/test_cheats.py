"""A part of the hostile patches in containers, where files are put, run and read by other ways than in local sandboxes."""

from __future__ import annotations

import pytest
from cheats import CHEATS, patch_of

from swegym_tutorial import TrainingConfig, load_tasks
from swegym_tutorial.grading import Bench, Outcome, grade

from .conftest import opened

PART = (
    "conftest.py rewrites reports",
    "pytest.py in the root",
    "forged lines printed at exit",
    "os._exit(0) after forged lines, to the open terminal",
    "TestReport patched",
    "Function.runtest patched, for the hidden tests only",
    "the report's lines changed",
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["docker", "modal", "subprocess"])
def test_cheats_earn_nothing_in_other_sandboxes_and_the_gold_patch_is_resolved(
    kind: str, request: pytest.FixtureRequest
) -> None:
    task, config = load_tasks()[0], TrainingConfig.laptop()
    chosen = [cheat for cheat in CHEATS if cheat.name in PART]
    assert len(chosen) == len(PART)
    with opened(kind, request) as sandboxes:
        bench = Bench(sandboxes, config)
        assert grade(task, task.patch.encode(), sandboxes, config, bench).outcome is Outcome.RESOLVED
        for cheat in chosen:
            verdict = grade(task, patch_of(cheat, sandboxes, task), sandboxes, config, bench)
            assert verdict.reward == 0.0 and verdict.detail, (cheat.name, verdict)
