"""The rates of the habits, from a run's events to the figure."""

import itertools

import pytest
from synthetic import Events

from swegym_tutorial.habit_plot import habit_figure, habit_text
from swegym_tutorial.habits import IN_SHORT, MEANINGS, Habit
from swegym_tutorial.lines import habit_lines, habit_rates
from swegym_tutorial.plots import DPI, HEIGHT, WIDTH
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
    "odd", [{"look": 3}, {"look": [1, 2, 3]}, {"look": [True, 2]}, {"look": [-1, 2]}, ["look"]]
)
def test_odd_habits_make_an_odd_event_and_no_error(odd):
    run = RunSummary()
    for event in Events(steps=1, evaluations=()):
        run.update([event | ({"habits": odd} if event["event"] == "step_done" else {})])
    assert run.odd_events == 1 and not run.steps


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
