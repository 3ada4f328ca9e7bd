"""Answers to exercises: right, wrong, missing, and of another kind."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from swegym_tutorial.exercises import check
from swegym_tutorial.verdicts import Outcome


@pytest.mark.parametrize(
    ("answer", "expected", "told"),
    [
        (None, 1.0, "Not answered yet."),
        (0.334, 1 / 3, "Right."),
        (Fraction(1, 3), 1 / 3, "Right."),
        (0.4, 1 / 3, "Not yet: 0.4"),
        ((1.5, -0.5), np.array([1.5, -0.5]), "Right."),
        ([1.5], [1.5, -0.5], "Not yet: [1.5]"),
        ("a word", 1.0, "Not yet: 'a word'"),
        ("resolved", Outcome.RESOLVED, "Right."),
        ([True, False], [True, False], "Right."),
        (7, lambda n: n > 3, "Right."),
        (2, lambda n: n > 3, "Not yet: 2"),
        (2, lambda n: n > 3 or "it must be larger", "Not yet: it must be larger"),
        ("x", lambda n: n > 3, "Not yet: 'x' (TypeError: "),
        (2, lambda n: next(iter(())), "Not yet: 2 (StopIteration: "),
    ],
)
def test_an_answer_is_told_for_what_it_is(
    answer: Any, expected: Any, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check(answer, expected)
    assert capsys.readouterr().out.startswith(told)


def test_a_tolerance_is_relative_where_numbers_are_large(capsys: pytest.CaptureFixture[str]) -> None:
    check(1200.0, 1195.0)
    check(1200.0, 1195.0, rtol=0.02)
    assert capsys.readouterr().out.splitlines() == ["Not yet: 1200.0", "Right."]
