"""What commands tell of habits, on attempts of the bundled world and on commands as other models write them."""

from dataclasses import dataclass

import pytest

from swegym_tutorial.habits import MEANINGS, Habit, habits_of, rates


@dataclass(frozen=True)
class Result:
    exit_code: int


@dataclass(frozen=True)
class Turn:
    commands: tuple[str, ...]
    results: tuple[Result, ...]


def habits(*commands: str | tuple[str, int]) -> dict[str, bool]:
    """The habits of an attempt, a command a turn; with its exit code where that is not 0."""
    pairs = [(each, 0) if isinstance(each, str) else each for each in commands]
    return habits_of([Turn((command,), (Result(code),)) for command, code in pairs])


LOOK = 'git grep -nW --heading "def get_price("'
FIX = "sed -i '12s/ - / + /' src/cart.py"
ALL = "sed -i 's/ - / + /' src/cart.py"
CHECK = "python -S check.py"


def test_the_whole_careful_plan():
    found = habits(LOOK, FIX, (CHECK, 1), "sed -i '20s/ - / + /' src/cart.py")
    assert found == {"look": True, "act": True, "line": True, "check": True, "repair": True}


def test_only_what_came_up_is_told():
    assert habits() == {"act": False}
    assert habits(LOOK) == {"look": True, "act": False}
    assert habits(ALL) == {"look": False, "act": True, "line": False, "check": False}
    assert habits(LOOK, FIX, CHECK) == {"look": True, "act": True, "line": True, "check": True}
    left = habits(LOOK, ALL, (CHECK, 1))
    assert left == {"look": True, "act": True, "line": False, "check": True, "repair": False}


def test_tests_count_only_after_an_edit_and_looking_only_before_the_first():
    assert habits((CHECK, 1), FIX) == {"look": False, "act": True, "line": True, "check": False}
    assert habits(FIX, LOOK)["look"] is False
    assert habits(FIX, (CHECK, 1), LOOK, FIX)["repair"] is True
    assert habits(FIX, (CHECK, 1), LOOK)["repair"] is False
    assert habits(FIX, ALL)["line"] is False


def test_several_commands_of_one_turn_are_taken_in_their_order():
    turn = Turn((LOOK, FIX, CHECK), (Result(0), Result(0), Result(0)))
    assert habits_of([turn]) == {"look": True, "act": True, "line": True, "check": True}
    cut = Turn((LOOK, FIX), (Result(0),))  # the second was never run
    assert habits_of([cut]) == {"look": True, "act": False}


@pytest.mark.parametrize(
    "command",
    [
        "perl -pi -e 's/a/b/' x.py",
        "cat > x.py <<'E'\nx = 1\nE",
        "echo x >> src/a.py",
        "patch -p1 < /tmp/fix.diff",
        "git apply fix.patch",
        "printf x | tee src/a.py",
        "python - <<'E'\nfrom pathlib import Path\nPath('a').write_text('x')\nE",
        "python3 -c \"open('a', 'w').write('x')\"",
        "cd src && sed -i.bak -e '3d' a.py",
        "sed -i '/def f/,/return/ s/a/b/' x.py",
    ],
)
def test_edits_of_many_kinds_are_seen(command):
    assert habits(command)["act"] is True
    assert habits(command)["line"] is True


@pytest.mark.parametrize(
    "command",
    [
        "cat src/a.py",
        "sed -n 1,5p a.py",
        "ls -la",
        "python -m pytest 2>&1 | tail",
        "git diff > /dev/null",
        "grep a b 2>/dev/null",
    ],
)
def test_reading_is_no_edit(command):
    assert habits(command)["act"] is False


@pytest.mark.parametrize(
    "command", ["python -m pytest -q tests", "pytest", "make test", "python -m unittest", "tox -e py"]
)
def test_test_runs_of_many_kinds_are_seen(command):
    assert habits(FIX, command)["check"] is True


def test_a_replacement_in_a_whole_file_names_no_line():
    assert habits('sed -i "s/a/b/g" x.py')["line"] is False
    assert habits("sed -i -e s/a/b/ x.py")["line"] is False


def test_rates_count_where_a_habit_came_up():
    some = [habits(LOOK, FIX), habits(ALL), habits(LOOK), {}]
    assert rates(some) == {"look": (2, 3), "act": (2, 3), "line": (1, 2), "check": (0, 2)}
    assert set(MEANINGS) == set(Habit)
