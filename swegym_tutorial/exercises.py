"""What the notebooks' exercises are checked with."""

from __future__ import annotations

from typing import Any


def check(answer: Any, expected: Any, *, rtol: float = 1e-5, atol: float = 0.01) -> None:
    """Print whether an answer to an exercise is right. None is no answer yet.

    expected: what it should be equal to, numbers within `rtol` and `atol`; or a function that takes the answer and
    returns whether it is right, or in words why not. An answer of the wrong kind is told as such, and raises nothing.
    """
    if answer is None:
        print("Not answered yet.")
        return
    try:
        found = expected(answer) if callable(expected) else _equal(answer, expected, rtol, atol)
    except Exception as error:  # whatever a reader's own code raises
        found = f"{answer!r:.200} ({type(error).__name__}: {error})"
    if isinstance(found, str):
        print(f"Not yet: {found:.500}")
    else:
        print("Right." if found else f"Not yet: {answer!r:.200}")


def _equal(answer: Any, expected: Any, rtol: float, atol: float) -> bool:
    import numpy as np

    try:
        ours, theirs = np.asarray(answer, dtype=float), np.asarray(expected, dtype=float)
    except (TypeError, ValueError):  # not numbers
        return bool(answer == expected)
    return ours.shape == theirs.shape and np.allclose(ours, theirs, rtol=rtol, atol=atol)
