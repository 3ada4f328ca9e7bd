"""The rates of the habits, from a run's events to the figure."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import Events

from swegym_tutorial.batches import Batch
from swegym_tutorial.events import dumps
from swegym_tutorial.grading import Episode, Outcome, Verdict
from swegym_tutorial.habit_plot import habit_figure, habit_text
from swegym_tutorial.habits import IN_SHORT, MEANINGS, Habit, rates
from swegym_tutorial.lines import habit_lines, habit_rates
from swegym_tutorial.minibatch import Group, fate_of
from swegym_tutorial.plots import DPI, HEIGHT, WIDTH
from swegym_tutorial.policy import Update
from swegym_tutorial.records import StepResult
from swegym_tutorial.rollout import Ending, Rollout
from swegym_tutorial.summary import RunSummary


def summary(steps: int = 4, told: bool = True) -> RunSummary:
    """A run in which an attempt of step n looks if n is not 0, and never repairs where it came up: in every fourth."""
    found = RunSummary()
    for event in Events(steps=steps, evaluations=("before",)):
        if event["event"] == "step_done" and told:
            attempts = event["attempts"]
            looked = attempts if event["step"] else 0
            event["habits"] = {
                "look": [looked, attempts], "act": [attempts, attempts], "repair": [0, attempts // 4]
            }  # fmt: skip
        found.update([event])
    assert found.odd_events == 0
    return found


def test_rates_are_of_those_attempts_of_a_step_in_which_a_habit_came_up():
    run = summary()
    rates = habit_rates(run)
    assert rates[Habit.LOOK] == [(1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0)]
    assert rates[Habit.ACT] == [(step, 1.0) for step in range(1, 5)]
    first = run.steps["train-job0"][0]
    assert first.habits["look"] == (0, first.attempts)
    assert first.habits["repair"] == (0, first.attempts // 4)
    assert Habit.LINE not in rates


@pytest.mark.parametrize(
    "odd", [
        {"look": 3}, {"look": [1, 2, 3]}, {"look": [True, 2]}, {"look": [-1, 2]}, ["look"], {"look": [0, 0]},
        {"look": [5, 1]}, {"look": [10**400, 1]}, {"look": [10**400, 10**400]}, {"look": [0, 65]}, {"look": [0.5, 1]},
    ],
)  # fmt: skip
def test_odd_habits_make_an_odd_event_and_no_error(odd):
    run = RunSummary()
    for event in Events(steps=1, evaluations=()):
        run.update([event | ({"habits": odd} if event["event"] == "step_done" else {})])
    assert run.odd_events == 1 and not run.steps
    assert habit_lines(run) == [] and habit_text(run) == ""


def attempt(reward: int, habits: dict[str, bool]) -> Episode:
    """A graded attempt with these habits."""
    tokens, mask = np.array([1, 2], np.int32), np.array([False, True])
    rollout = Rollout("task", tokens, mask, -mask.astype(np.float32), (), Ending.FINAL, b"", 1.0)
    return Episode(rollout, Verdict(Outcome.RESOLVED if reward else Outcome.UNRESOLVED), habits)


HABITS = st.dictionaries(st.sampled_from([str(habit) for habit in Habit]), st.booleans())


@given(st.lists(st.lists(st.tuples(st.integers(0, 1), HABITS), max_size=4), max_size=4), st.data())
def test_what_a_batch_tells_is_always_taken(groups, data):
    batch = Batch(began=0.0, filled=1.0)
    for number, drawn in enumerate(groups):
        group = Group(number, "task", 0, tuple(attempt(*each) for each in drawn))
        batch.take(group, fate_of(group, 0, 2))
    for place, group in enumerate(batch.kept):  # whose recordings can't be read
        lost = data.draw(st.lists(st.sampled_from(range(len(group.episodes))), unique=True))
        batch._lose(place, lost)
    told = batch.result(0, 1, Update("tinker://a", "tinker://b", 1, {}, 1.0, 1.0), 3.0)
    line = json.loads(dumps({"time": 1.0, "event": "step_done", "job": "train-job0", **told}))
    step = StepResult.of(line)
    assert step.habits == rates(batch.habits) and step.attempts == len(batch.rewards) == len(batch.habits)


def test_an_older_log_tells_of_no_habits():
    run = summary(told=False)
    assert habit_rates(run) == {} and habit_text(run) == "" and habit_lines(run) == []
    (axes,) = habit_figure(run).axes
    assert not axes.lines and any("no batch tells of habits" in text.get_text() for text in axes.texts)


def test_text_and_figure_name_each_habit_in_words():
    run = summary()
    assert f"{MEANINGS[Habit.LOOK]} 0%, then 100%" in habit_text(run)
    (axes,) = habit_figure(run).axes
    texts = [text.get_text() for text in axes.texts]
    assert MEANINGS[Habit.REPAIR] in texts and "0.00 at first, 1.00 in the last batch" in texts
    curves = [line for line in axes.lines if len(line.get_xdata()) > 1]
    assert [list(line.get_xdata()) for line in curves] == [[1, 2, 3, 4]] * 3
    assert list(curves[0].get_ydata()) == [0.0, 1.0, 1.0, 1.0]


def test_a_line_tells_the_first_step_and_the_last():
    (line,) = habit_lines(summary())
    assert line.startswith("habits: looks first 0.00 to 1.00, edits 1.00 to 1.00, repairs 0.00")
    (line,) = habit_lines(summary(steps=1))
    assert line.startswith("habits: looks first 0.00, edits 1.00") and " to " not in line
    assert list(IN_SHORT) == list(MEANINGS) == list(Habit)


@pytest.mark.parametrize(
    "options", [{}, {"steps": 1}, {"steps": 100}, {"clients": 3}, {"steps": 0, "planned": 9}]
)
def test_every_text_is_inside_the_picture_and_on_no_other(options):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    run = RunSummary()
    run.update(Events(habits=True, **options))
    figure = habit_figure(run)
    FigureCanvasAgg(figure).draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    for box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= WIDTH * DPI and box.y1 <= HEIGHT * DPI
    for a, b in itertools.combinations(boxes, 2):
        assert min(a.x1, b.x1) - max(a.x0, b.x0) <= 1 or min(a.y1, b.y1) - max(a.y0, b.y0) <= 3
