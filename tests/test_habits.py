"""What commands tell of habits, on attempts of the bundled world and on commands as other models write them."""

import time
from dataclasses import dataclass

import pytest

from swegym_tutorial.habits import MEANINGS, Habit, habits_of, rates


@dataclass(frozen=True)
class Result:
    exit_code: int = 0
    output: str = ""
    timed_out: bool = False


@dataclass(frozen=True)
class Turn:
    commands: tuple[str, ...]
    results: tuple[Result, ...]


def habits(*commands: str | tuple[str, int] | tuple[str, Result]) -> dict[str, bool]:
    """The habits of an attempt, a command a turn; with its exit code where that is not 0, or its result."""
    turns = []
    for each in commands:
        command, result = (each, 0) if isinstance(each, str) else each
        turns.append(Turn((command,), (result if isinstance(result, Result) else Result(result),)))
    return habits_of(turns)


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
    assert habits("echo hi") == {"look": False, "act": False}
    assert habits(ALL) == {"look": False, "act": True, "line": False, "check": False}
    assert habits(LOOK, FIX, CHECK) == {"look": True, "act": True, "line": True, "check": True}
    left = habits(LOOK, ALL, (CHECK, 1))
    assert left == {"look": True, "act": True, "line": False, "check": True, "repair": False}


def test_an_edit_that_failed_was_tried_and_has_changed_nothing():
    guess = ("sed -i 's/ - / + /' src/guessed.py", 2)
    assert habits(guess) == {"look": False, "act": False, "line": False}
    assert habits(guess, CHECK) == {"look": False, "act": False, "line": False}  # nothing to be tested
    assert habits(guess, LOOK, FIX) == {"look": False, "act": True, "line": False, "check": False}
    assert habits(FIX, (CHECK, 1), guess)["repair"] is False
    # Of several commands the exit code is the last one's.
    assert habits(("sed -i 3d a.py; false", 1))["act"] is True
    assert habits(("cd src && sed -i 3d a.py", 1))["act"] is False


def test_tests_count_only_after_an_edit_and_looking_only_before_the_first():
    assert habits((CHECK, 1), FIX) == {"look": False, "act": True, "line": True, "check": False}
    assert habits(FIX, LOOK)["look"] is False
    assert habits(FIX, (CHECK, 1), LOOK, FIX)["repair"] is True
    assert habits(FIX, (CHECK, 1), LOOK)["repair"] is False
    assert habits(FIX, ALL)["line"] is False


def test_within_one_command_too():
    assert habits(f"{CHECK}; {FIX}")["check"] is False
    assert habits(f"{FIX} && {CHECK}") == {"look": False, "act": True, "line": True, "check": True}
    both = habits(f"cat src/cart.py && {FIX}")
    assert both["look"] is False  # what it shows was not known when the edit was written
    assert habits(f"{FIX}\n({CHECK})\n")["check"] is True


def test_several_commands_of_one_turn_are_taken_in_their_order():
    turn = Turn((LOOK, FIX, CHECK), (Result(), Result(), Result()))
    # What it shows was not known when the edit was written.
    assert habits_of([turn]) == {"look": False, "act": True, "line": True, "check": True}
    cut = Turn((LOOK, FIX), (Result(),))  # the second was never run
    assert habits_of([cut]) == {"look": True, "act": False}


@pytest.mark.parametrize(
    "command",
    [
        "cd src && sed -i.bak -e '3d' a.py",
        "sed -i '/def f/,/return/ s/a/b/' x.py",
        r"sed -i '\|x|s/a/b/' x.py",
        "sed -i '$ a end' x.py",
        "sed -E -n -i --expression='3,5s/a/b/p' x.py",
        "  sudo sed -i 3d a.py",
        "A=1 timeout 10 sed -i 3d a.py",
        "if true; then sed -i 3d a.py; fi",
        "{ sed -i 3d a.py; }",
        "bash -lc \"cd src && sed -i '3s/a/b/' a.py\"",
        "perl -i -pe 's/a/b/ if $. == 3' x.py",
        "# Now let's fix it\nsed -i 3d a.py",
        "sed -i -e'3s/x/y/' a.py",
        "sed -i '{3s/a/b/}' a.py",
        "sed -i '3{s/a/b/;s/c/d/}' a.py",
        "sed -i $'3s/x/y/' a.py",
        "sed -i '3s/a/b/;/def f/s/c;/d/' a.py",
        "sed -i '3a\\\n    x = 1\n' a.py",
        "sed -i '10,12d' a.py",
    ],
)
def test_edits_of_lines_are_seen(command):
    found = habits(command)
    assert found["act"] is True and found["line"] is True


@pytest.mark.parametrize(
    "command",
    [
        "sed -i 's/a/b/g' x.py",
        'sed -i "s/a/b/g" x.py',
        "sed -i -e s/a/b/ x.py",
        "sed -i '1,$s/a/b/' x.py",
        "sed -i -e '3s/a/b/' -e 's/c/d/' x.py",
        "grep -rl foo | xargs sed -i 's/a/b/g'",
        "find . -name '*.py' -exec sed -i 's/a/b/' {} \\;",
        "for f in *.py; do sed -i 's/a/b/' $f; done",
        "sed -i '1,200s/x/y/g' a.py",
        "sed -i '0~1s/x/y/g' a.py",
        "sed -i '/./s/x/y/g' a.py",
        "sed -i '1, $ s/x/y/g' a.py",
        "sed -i '0,/x/s/x/y/' a.py",
        "sed -i '3s/a/b/\ns/x/y/g' a.py",
        "sed -i '3s/a/b/;s/x/y/g' a.py",
        "sed -i $'s/x/y/' a.py",
        "sed -i ':a;N;$!ba;s/x/y/' a.py",
        "perl -pi -e 's/a/b/' x.py",
        "perl -p -i -e 's/a/b/g' x.py",
    ],
)
def test_replacements_in_whole_files_are_seen(command):
    found = habits(command)
    assert found["act"] is True and found["line"] is False and found["look"] is False


@pytest.mark.parametrize(
    "command",
    [
        "cat > x.py <<'E'\nx = 1\nsed -i s/a/b/ y.py\nE",
        "echo x >> src/a.py",
        "head -n 3 a.py | sed 's/a/b/' > b.py",
        "patch -p1 < /tmp/fix.diff",
        "git apply fix.patch",
        "git apply <<'E'\n--- a\n+++ b\nE\n",
        "printf x | tee src/a.py",
        "mv /tmp/new.py src/a.py",
        "python - <<'E'\nfrom pathlib import Path\nPath('a').write_text('x')\nE",
        "python3 -c \"open('a', 'w').write('x')\"",
        "python3 -c \"open('a', mode='a')\"",
        "python make.py > src/a.py",
        "echo 2 > a.py",
        "cp /tmp/fixed.py src/a.py",
        "git -C src apply x.patch",
        "bash <<'E'\ncat > a.py <<'F'\nx\nF\nE",
        "str_replace_editor str_replace a.py",
        "python -c \"import os; f = open(os.path.join('a', 'b.py'), 'w')\"",
        "python -c \"Path('a').open('w')\"",
        "sed -i -f x.sed a.py",
    ],
)
def test_of_other_editors_the_lines_are_not_told(command):
    assert habits(command) == {"look": False, "act": True, "check": False}


@pytest.mark.parametrize(
    "command",
    [
        "cat src/a.py",
        "sed -n 1,5p a.py",
        "ls -la",
        "git diff > /dev/null",
        "git diff > my.patch",
        "ls > files.txt",
        "grep a b 2>/dev/null",
        "grep -rn 'a > b' src",
        "git grep -n 'return a > b'",
        'grep -n "sed -i s/a/b/" notes',
        "awk '$1 > 3' f",
        "time grep x y",
        "A=1 grep x y",
        "find . -exec grep -n x {} +",
        "cat a.py > /tmp/copy",
        "cat a.py | tee /tmp/copy",
        "tree; wc -l a.py",
        "git -C src --no-pager log",
        "python -c \"print(open('a.py').read())\"",
        "python -c \"print(open('a', 'r').read())\"",
        "# Let's look\ncat a.py",
        "cat a.py  # the loop's bound",
        "echo $((1<<2))\ncat a.py",
        "echo $'it\\'s'; cat a.py",
    ],
)
def test_reading_is_no_edit(command):
    assert habits(command) == {"look": True, "act": False}


@pytest.mark.parametrize(
    "command",
    [
        "python -c 'print(1 > 0)'",
        "python -c \"import sys; sys.stdout.write('x')\"",
        "python -c \"open('/tmp/o', 'w').write('x')\"",
        "python -c \"from pathlib import Path; Path('/tmp/o').write_text('x')\"",
        "cat > reproduce.py <<'E'\nprint(1)\nE",
        "git apply --check fix.patch",
        "patch --dry-run -p1 < x",
        "perl -Ilib -MList::Util=sum -e 'print 1'",
        "# first; sed -i s/a/b/ x.py",
        "echo 'a => b'",
        "pytest > out.txt",
        "pytest 2>&1 | tee log",
        "python -m pytest > out.txt 2> err.txt",
        "echo sed -i s/a/b/ x.py",
        "cp a.py a.py.orig",
        "pip install pytest",
    ],
)
def test_what_prints_or_runs_is_no_edit_and_no_looking(command):
    assert habits(command) == {"look": False, "act": False}


@pytest.mark.parametrize(
    "command",
    [
        "python -m pytest -q tests",
        "pytest",
        "py.test -x",
        ".venv/bin/pytest",
        "make test",
        "make -C build check",
        "python -m unittest",
        "python -m django test app",
        "python -m coverage run -m pytest",
        "python tests/test_a.py",
        "python -S check.py",
        "./manage.py test",
        "python manage.py test app",
        "python runtests.py",
        "tox -e py",
        "nosetests",
        "cd src && PYTHONPATH=. timeout 60 python -m pytest 2>&1 | tail -5",
        "bash -c 'pytest -q'",
        "# Let's run the tests\npytest -q",
        "conda run -n testbed pytest",
        "uv run pytest -q",
        "coverage run -m pytest",
        "python setup.py test",
        "bin/test sympy",
        "timeout -s KILL 60 pytest",
        "env -u FOO pytest",
        "cat > a.txt <<'E'\n" + 3000 * "a line\n" + "E\npytest -q",
    ],
)
def test_test_runs_of_many_kinds_are_seen(command):
    assert habits(FIX, command)["check"] is True


@pytest.mark.parametrize(
    "command",
    [
        "cat tox.ini",
        "cat check.py",
        "grep pytest setup.cfg",
        "pip install pytest",
        "ls tests/test_a.py",
        "echo pytest",
        "make install",
        "git add tests/test_a.py",
        "ls # then; pytest",
        "pytest --version",
        "pytest --collect-only",
        "command -v pytest",
        "which pytest",
        "test -f a.py",
        ("python -m pytest", Result(1, "/usr/bin/python: No module named pytest")),
        ("cd /repo && pytest -q", Result(1, "bash: line 1: cd: /repo: No such file or directory")),
        ("pytest | tail", Result(0, "bash: line 1: pytest: command not found")),
        ("pytest -k x | tail", Result(0, "no tests ran in 0.01s")),
        ("pytest", 127),
        ("pytest tests/none", 4),
        ("pytest -k none", 5),
    ],
)
def test_what_only_names_tests_or_could_not_run_them_is_no_test_run(command):
    assert habits(FIX, command)["check"] is False


def test_in_a_chain_the_output_tells_how_far_it_came():
    missing = Result(2, "sed: can't read none.py: No such file or directory")
    assert habits((f"sed -i 3d none.py && {CHECK}", missing)) == {"look": False, "act": False, "line": True}
    failing = Result(1, "1 failed, 2 passed in 0.1s")
    found = habits((f"{FIX} && pytest", failing))
    assert found["act"] and found["check"] and found["repair"] is False
    assert habits(("git apply x.patch && echo applied", Result(1, "error: patch failed")))["act"] is False
    assert habits(FIX, ("cd src && pytest && echo well", failing))["repair"] is False
    assert habits(FIX, ("cd src && pytest && false", Result(1, "2 passed in 0.1s")))["check"] is True


def test_behind_a_pipe_the_output_tells_whether_tests_failed():
    piped = "pytest 2>&1 | tail -5"
    assert habits(FIX, (piped, Result(0, "2 failed, 3 passed in 0.1s")))["repair"] is False
    assert habits(FIX, (piped, Result(0, "FAILED tests/a.py::b")))["repair"] is False
    assert habits(FIX, ("pytest; true", Result(0, "1 error in 0.1s")), FIX)["repair"] is True
    assert "repair" not in habits(FIX, (piped, Result(0, "5 passed, 0 failed in 0.1s")))
    assert habits(FIX, (piped, Result(0, "\x1b[31m1 failed\x1b[0m in 0.1s")))["repair"] is False
    for framed in (
        "bash -c 'pytest -q' | tail -3",
        "bash -c 'pytest -q' || true",
        "bash -c 'pytest'; echo done",
    ):
        assert habits(FIX, (framed, Result(0, "1 failed in 0.1s")))["repair"] is False
    assert habits(FIX, ("make test | tail", Result(0, "make: *** [test] Error 1")))["repair"] is False
    for well in ("5 passed\nFound 2 errors in 1 file", "ERROR root: x\n5 passed in 0.1s"):
        assert "repair" not in habits(FIX, (piped, Result(0, well)))
    assert "repair" not in habits(FIX, ("pytest", Result(137, "", timed_out=True)))


@pytest.mark.parametrize(
    "piece",
    [
        "python-",
        "python ",
        "\n",
        '"',
        "'",
        "\\",
        "$(",
        "a > b ",
        "<<E\n",
        "sed -i ",
        "open(",
        "-c x ",
        "open('a',  ",
        "1 ",
    ],
)
def test_whatever_a_model_writes_is_read_in_time_proportional_to_its_length(piece):
    began = time.process_time()
    habits(piece * 60_000, "python -c '" + piece.replace("'", "") * 60_000 + "'")
    habits("sed -i '" + piece.replace("'", "") * 60_000 + "' a.py")
    habits((FIX, Result(0, piece * 60_000)), ("pytest | tail", Result(0, piece * 60_000)))
    assert (
        time.process_time() - began < 10
    )  # takes some hundredths of a second; a square or cube of it, minutes


def test_rates_count_where_a_habit_came_up():
    some = [habits(LOOK, FIX), habits(ALL), habits(LOOK), {}]
    assert rates(some) == {"look": (2, 3), "act": (2, 3), "line": (1, 2), "check": (0, 2)}
    assert set(MEANINGS) == set(Habit)
