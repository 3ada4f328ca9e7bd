"""The rates of the habits, from a run's events to the figure."""

from synthetic import Events

from swegym_tutorial.habit_plot import habit_figure, habit_rates, habit_text
from swegym_tutorial.habits import MEANINGS, Habit
from swegym_tutorial.summary import RunSummary


def summary(steps: int = 4, told: bool = True) -> RunSummary:
    """A run in which an attempt of step n looks if n is not 0, and repairs where it came up: in every fourth."""
    found = RunSummary()
    for number, event in enumerate(Events(steps=steps, evaluations=("before",))):
        if event["event"] == "episode" and told:
            looks = not event["phase"].startswith("evaluation") and event["policy_version"] > 0
            event["habits"] = {"look": looks, "act": True} | ({"repair": False} if number % 4 == 0 else {})
        found.update([event])
    assert found.odd_events == 0
    return found


def test_rates_are_of_a_steps_own_attempts_and_of_those_in_which_a_habit_came_up():
    run = summary()
    rates = habit_rates(run)
    assert rates[Habit.LOOK] == [(1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0)]
    assert rates[Habit.ACT] == [(step, 1.0) for step in range(1, 5)]
    first = run.steps["train-job0"][0]
    assert first.habits["look"] == (0, first.attempts)
    assert 0 < first.habits["repair"][1] < first.attempts
    assert Habit.LINE not in rates


def test_an_older_log_tells_of_no_habits():
    run = summary(told=False)
    assert habit_rates(run) == {} and habit_text(run) == ""
    assert habit_figure(run).axes


def test_text_and_figure_name_each_habit_in_words():
    run = summary()
    assert f"{MEANINGS[Habit.LOOK]} 0%, then 100%" in habit_text(run)
    texts = [text.get_text() for text in habit_figure(run).axes[0].texts]
    assert any(text.startswith(MEANINGS[Habit.REPAIR]) for text in texts)
    assert len(habit_figure(run).axes[0].lines) == 3
