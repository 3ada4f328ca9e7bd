"""Hostile patches earn nothing, in real sandboxes with real pytest, and the verdict says why."""

from __future__ import annotations

import pytest
from cheats import CHEATS, UNHELD, Cheat, patch_of

from swegym_tutorial.grading import Bench, Outcome, grade

TOLD = (Outcome.TAMPERED, Outcome.UNRESOLVED, Outcome.TESTS_CRASHED)


@pytest.fixture(scope="module")
def bench(sandboxes, config):
    return Bench(sandboxes, config)


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.name.replace(" ", "-"))
def test_a_cheat_earns_nothing_and_is_told(cheat: Cheat, task, sandboxes, config, bench):
    verdict = grade(task, patch_of(cheat, sandboxes, task), sandboxes, config, bench)
    assert verdict.reward == 0.0 and verdict.outcome in TOLD and verdict.detail, verdict


@pytest.mark.parametrize("cheat", UNHELD, ids=lambda cheat: cheat.name.replace(" ", "-"))
def test_what_cannot_be_held_is_known(cheat: Cheat, task, sandboxes, config, bench):
    # docs/threat-model.md lists these. One that is held from now on belongs to the others.
    assert grade(task, patch_of(cheat, sandboxes, task), sandboxes, config, bench).reward == 1.0
