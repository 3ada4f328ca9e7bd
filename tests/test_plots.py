"""The figure of a run, and the run in words: right numbers, nothing cut off, readable for all."""

from __future__ import annotations

import base64
import io
import itertools
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from synthetic import Events, write_run

from swegym_tutorial.plots import (
    DPI,
    HEIGHT,
    WIDTH,
    picture,
    png_bytes,
    reward_time_figure,
    save_reward_time,
    spread,
)
from swegym_tutorial.summary import RunSummary
from swegym_tutorial.terminal import table
from swegym_tutorial.words import alt_text, duration, mean_rewards, phase_seconds, summary_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

RUNS: dict[str, dict[str, Any]] = {
    "done": {},
    "under way": {"steps": 9, "planned": 30, "evaluations": ("before",), "end": ""},
    "nothing yet": {"steps": 0, "planned": 30, "evaluations": (), "end": ""},
    "one step": {"steps": 1},
    "failed at the start": {"steps": 0, "planned": 30, "evaluations": (), "end": "run_failed"},
    "flat": {"last": 0.25},
    "perfect": {"first": 1.0, "last": 1.0},
    "hundred steps": {"steps": 100},
    "batches of two minutes": {"slowness": 20.0},
    "batches of half an hour": {"slowness": 300.0, "clients": 8},
    "eight clients": {"steps": 40, "clients": 8},
    "three splits": {"splits": ("held-out", "held-out-phrasings", "held-out-families")},
    "eight clients under way": {"steps": 3, "planned": 100, "clients": 8, "evaluations": (), "end": ""},
}


def summary_of(**options: Any) -> RunSummary:
    summary = RunSummary()
    summary.update(Events(1, **options))
    return summary


def drawn(summary: RunSummary) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = reward_time_figure(summary)
    FigureCanvasAgg(figure).draw()
    return figure


def texts_of(axes: Axes) -> list[Text]:
    """All texts that a panel shows: head, labels, axis label, the ticks within its range."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    x = [label for label in axes.get_xticklabels() if left <= label.get_position()[0] <= right]
    y = [label for label in axes.get_yticklabels() if low <= label.get_position()[1] <= high]
    return [*axes.texts, axes.xaxis.label, *x, *y]


@pytest.mark.parametrize("name", RUNS)
def test_every_text_is_large_enough_and_inside_the_picture(name: str) -> None:
    figure = drawn(summary_of(**RUNS[name]))
    for text in itertools.chain.from_iterable(map(texts_of, figure.axes)):
        assert text.get_fontsize() >= 9, text
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= WIDTH * DPI and box.y1 <= HEIGHT * DPI, text


@pytest.mark.parametrize("name", RUNS)
def test_no_text_lies_on_another(name: str) -> None:
    no_overlap(drawn(summary_of(**RUNS[name])))


def no_overlap(figure: Figure) -> None:
    texts = list(itertools.chain.from_iterable(map(texts_of, figure.axes)))
    for one, other in itertools.combinations(texts, 2):
        a, b = one.get_window_extent(), other.get_window_extent()
        overlap = min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 3
        assert not overlap, (one, other)


def test_lines_and_bands_show_the_log_s_numbers() -> None:
    summary = summary_of(steps=12)
    reward, seconds = reward_time_figure(summary).axes
    steps = summary.steps["train-job0"]
    curve = next(line for line in reward.lines if len(line.get_xdata()) == 12)
    assert list(curve.get_xdata()) == list(range(1, 13))
    assert list(curve.get_ydata()) == [s.reward_mean for s in steps]
    before, after = summary.evaluations
    points = {
        float(line.get_xdata()[0]): float(line.get_ydata()[0])
        for line in reward.lines
        if line.get_marker() == "D"
    }
    assert points == {0.0: before.rate, 13.0: after.rate}
    assert reward.get_ylim() == (-0.02, 1.02)
    tops = seconds.patches[-1].get_data().values
    assert list(tops) == pytest.approx([s.batch_seconds for s in steps], abs=0.002)


def test_phases_add_up_to_the_whole_batch() -> None:
    summary = summary_of(steps=5, clients=3)
    steps, parts = phase_seconds(summary)
    assert steps == [1, 2, 3, 4, 5]
    for n, step in enumerate(steps):
        whole = [s[step - 1].batch_seconds for s in summary.steps.values()]
        assert sum(values[n] for values in parts.values()) == pytest.approx(sum(whole) / 3, abs=0.002)


def test_long_batches_are_told_in_minutes() -> None:
    _, seconds = reward_time_figure(summary_of(steps=3)).axes
    _, minutes = reward_time_figure(summary_of(steps=3, slowness=60.0)).axes
    assert [axes.texts[0].get_text() for axes in (seconds, minutes)] == ["Seconds a batch", "Minutes a batch"]
    tops = [axes.patches[-1].get_data().values for axes in (seconds, minutes)]
    assert list(tops[0]) == pytest.approx(list(tops[1]), abs=0.01)


def test_several_clients_are_thin_lines_and_one_bold_mean() -> None:
    reward, _ = reward_time_figure(summary_of(steps=4, clients=8)).axes
    curves = [line for line in reward.lines if len(line.get_xdata()) == 4]
    assert len(curves) == 9
    *thin, bold = curves
    assert bold.get_linewidth() > 2 * max(line.get_linewidth() for line in thin)
    for n in range(4):
        assert bold.get_ydata()[n] == pytest.approx(sum(line.get_ydata()[n] for line in thin) / 8)


def with_steps(*done: int, planned: int = 10, ended: dict[int, str] | None = None) -> RunSummary:
    """A run in which client n has done done[n] steps, with the mean reward n / 10 + step / 100."""
    events = Events(planned=planned, clients=len(done))
    summary = RunSummary()
    summary.update([events.event("run_start", steps=planned, clients=len(done))])
    summary.update([events.event("phase", name="training")])
    for step in range(max(done)):
        for n in [n for n, count in enumerate(done) if step < count]:
            batch = [e for e in events.batch(f"train-job{n}", step) if e["event"] == "step_done"]
            summary.update([{**batch[0], "reward_mean": n / 10 + (step + 1) / 100}])
    for n, name in (ended or {}).items():
        summary.update([events.event(name, job=f"train-job{n}", reason="PolicyError: gone")])
    assert summary.odd_events == 0
    return summary


def bold_of(summary: RunSummary) -> tuple[list[tuple[float, float]], list[Text]]:
    """The points of the bold line, and the labels beside it."""
    reward, _ = drawn(summary).axes
    (line,) = [each for each in reward.lines if each.get_color() == "#0072B2"] or [None]
    points = list(zip(line.get_xdata(), line.get_ydata(), strict=True)) if line else []
    return points, [text for text in reward.texts if text.get_text().startswith("mean ")]


def test_a_mean_needs_every_client_that_goes_on() -> None:
    assert mean_rewards(with_steps(2, 1)) == [(1, pytest.approx(0.06))]
    waiting = with_steps(2, 1, 0)
    assert mean_rewards(waiting) == [] and bold_of(waiting) == ([], [])
    assert dict(summary_table(waiting))["mean reward"] == "no step is done by all clients yet"
    assert "no step is done by all clients yet" in alt_text(waiting)


@pytest.mark.parametrize("end", ["job_failed", "out_of_time"])
@pytest.mark.parametrize("steps", [2, 0])
def test_the_mean_goes_on_without_a_client_that_has_ended(end: str, steps: int) -> None:
    summary = with_steps(10, 10, steps, ended={2: end})
    points, (label,) = bold_of(summary)
    with_all = [(n, 0.1 + n / 100) for n in range(1, steps + 1)]
    assert points == [
        pytest.approx(p) for p in (*with_all, *((n, 0.05 + n / 100) for n in range(steps + 1, 11)))
    ]
    assert label.get_text() == "mean 0.15" and tuple(label.xy) == pytest.approx((10, 0.15), abs=0.01)
    told = dict(summary_table(summary))["mean reward"]
    assert told.endswith("in the last 5 steps, 0.15 in step 10 of the clients that got so far")
    assert told in alt_text(summary)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table(summary))
    assert [row.split()[2] for row in console.export_text().splitlines() if row.startswith("all ")] == [
        "0.150"
    ]
    no_overlap(drawn(summary))
    assert any("mean of those that got so far" in text.get_text() for text in drawn(summary).axes[0].texts)


def test_the_mean_s_label_stands_at_its_own_end() -> None:
    points, (label,) = bold_of(with_steps(10, 3))
    assert len(points) == 3 and label.xy[0] == 3 and label.get_text() == "mean 0.08"


def ticks(axes: Axes) -> list[float]:
    return [float(value) for value in axes.get_xticks()]


def test_only_steps_are_numbered_and_0_where_the_rate_before_them_is() -> None:
    reward, seconds = drawn(summary_of(steps=3)).axes
    assert ticks(reward) == [0, 1, 2, 3] and ticks(seconds) == [1, 2, 3]
    for count in (1, 3, 7, 30, 100):
        for axes in drawn(summary_of(steps=count, evaluations=())).axes:
            assert min(ticks(axes)) >= 1 and max(ticks(axes)) <= count


def test_the_names_of_phases_stand_beside_the_axis_of_a_run_that_is_done() -> None:
    _, seconds = drawn(summary_of(steps=3)).axes
    edge = seconds.get_window_extent().x1
    labels = [text for text in seconds.texts if text.get_text().startswith(("sampling", "publishing"))]
    assert len(labels) == 2 and all(text.get_window_extent().x0 > edge for text in labels)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.05, 0.2)), max_size=5))
def test_spread_labels_do_not_overlap_and_keep_their_order(labels: list[tuple[float, float]]) -> None:
    heights, sizes = [h for h, _ in labels], [s for _, s in labels]
    moved = spread(heights, sizes)
    order = sorted(range(len(labels)), key=lambda i: heights[i])
    for below, above in itertools.pairwise(order):
        assert moved[above] - moved[below] >= (sizes[above] + sizes[below]) / 2 - 1e-9
    assert all(m + s / 2 <= 1 + 1e-9 for m, s in zip(moved, sizes, strict=True))


def test_the_reader_s_own_style_does_not_reach_in() -> None:
    import matplotlib.style

    summary = summary_of(steps=3)
    plain = png_bytes(reward_time_figure(summary))
    with matplotlib.style.context(
        [
            "dark_background",
            {"font.size": 20, "lines.linewidth": 9, "axes.grid": True, "figure.constrained_layout.use": True},
            {"xtick.top": True, "xtick.labelbottom": False, "ytick.left": False, "ytick.labelright": True},
            {"xtick.minor.visible": True, "xtick.major.pad": 20, "axes.labelweight": "bold"},
        ]
    ):
        assert png_bytes(reward_time_figure(summary)) == plain


def test_the_background_is_white_so_that_dark_pages_show_it() -> None:
    from PIL import Image

    image = Image.open(io.BytesIO(png_bytes(reward_time_figure(summary_of(steps=3))))).convert("RGBA")
    assert image.size == (WIDTH * DPI, HEIGHT * DPI)
    corners = [image.getpixel((x, y)) for x in (0, image.width - 1) for y in (0, image.height - 1)]
    assert corners == [(255, 255, 255, 255)] * 4


def test_the_saved_figure_says_in_words_what_it_shows(tmp_path: Path) -> None:
    from PIL import Image

    folder = write_run(tmp_path / "run", steps=10)
    path = save_reward_time(folder)
    assert path == folder / "reward_time.png"
    assert "resolved" in Image.open(path).info["Description"]
    assert save_reward_time(folder, tmp_path / "other.png") == tmp_path / "other.png"
    assert (tmp_path / "other.png").read_bytes() == path.read_bytes()


def test_a_resumed_run_s_repeated_step_counts_once() -> None:
    events = list(Events(1, steps=3, end=""))
    again = [event for event in events if event["event"] == "step_done"][-1]
    summary = RunSummary()
    summary.update([*events, {**again, "reward_mean": 1.0}])
    reward, _ = reward_time_figure(summary).axes
    curve = next(line for line in reward.lines if len(line.get_xdata()) == 3)
    assert curve.get_ydata()[-1] == 1.0


def test_words_tell_the_numbers() -> None:
    summary = summary_of(steps=20)
    rewards = [s.reward_mean for s in summary.steps["train-job0"]]
    before, after = summary.evaluations
    rows = dict(summary_table(summary))
    assert rows["steps done"] == "20 of 20"
    assert rows["mean reward"] == (
        f"{sum(rewards[:5]) / 5:.2f} in the first 5 steps, {sum(rewards[-5:]) / 5:.2f} in the last 5 steps"
    )
    assert rows["held-out resolved"] == (
        f"{before.resolved / 256:.0%} of 256 attempts before training, "
        f"{after.resolved / 256:.0%} of 256 attempts after training"
    )
    kept = sum(s.groups["kept"] for s in summary.steps["train-job0"])
    assert f"{kept} kept, {160 - kept} uniform, 0 stale, 0 failed" == rows["groups"]
    assert rows["mean reward"] in alt_text(summary) and rows["held-out resolved"] in alt_text(summary)


def test_each_held_out_split_has_a_row_and_the_figure_shows_the_first() -> None:
    splits = ("held-out", "held-out-phrasings")
    summary = summary_of(steps=4, splits=splits, clients=2)
    summary.update([Events().event("evaluation", label="train-2026", job="base", split="train", policy_version=4,
                                   attempts=8, resolved=8, lost=0)])  # fmt: skip
    rows = dict(summary_table(summary))
    assert [name for name in rows if name.endswith(" resolved")] == [f"{split} resolved" for split in splits]
    first, second = ({e for e in summary.evaluations if e.split == split} for split in splits)
    for name, of in (("held-out", first), ("held-out-phrasings", second)):
        after = sum(e.resolved for e in of if e.label == "after")
        assert rows[f"{name} resolved"].endswith(f", {after / 512:.0%} of 512 attempts after training")
    reward, _ = reward_time_figure(summary).axes
    shown = [float(line.get_ydata()[0]) for line in reward.lines if line.get_marker() == "D"]
    before = next(e for e in first if e.label == "before")
    assert shown == [before.rate, sum(e.resolved for e in first if e.label == "after") / 512]
    assert rows["held-out resolved"] in alt_text(summary)
    assert rows["held-out-phrasings resolved"] not in alt_text(summary)


def test_habits_have_a_row_where_the_log_tells_of_them_and_leave_the_figure_as_it_is() -> None:
    plain, telling = summary_of(steps=4), summary_of(steps=4, habits=True)
    assert "habits" not in dict(summary_table(plain))
    first, last = (telling.steps["train-job0"][n].habits["look"] for n in (0, -1))
    told = dict(summary_table(telling))["habits"]
    assert told.startswith(
        f"looks first {first[0] / first[1]:.2f} to {last[0] / last[1]:.2f}, edits 1.00 to "
    )
    assert png_bytes(reward_time_figure(telling)) == png_bytes(reward_time_figure(plain))


def test_words_tell_the_age_of_the_last_event_while_a_run_is_live() -> None:
    summary = summary_of(steps=1, planned=30, end="")
    assert summary.last_event is not None
    assert dict(summary_table(summary, now=summary.last_event + 200))["last event"] == "3 min 20 s ago"
    assert "last event" not in dict(summary_table(summary_of(steps=1)))


def test_words_tell_why_a_run_failed() -> None:
    assert "the server did not answer" in dict(summary_table(summary_of(steps=1, end="run_failed")))["status"]


def test_durations_have_two_units_at_most() -> None:
    assert [duration(s) for s in (0.2, 59.4, 200, 7500)] == ["0 s", "59 s", "3 min 20 s", "2 h 5 min"]


def test_importing_does_not_load_matplotlib() -> None:
    code = (
        "import sys, swegym_tutorial.plots, swegym_tutorial.dashboard; sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_drawing_leaves_pyplot_alone() -> None:
    code = (
        "import sys; from swegym_tutorial.plots import *; from swegym_tutorial.summary import RunSummary\n"
        "png_bytes(reward_time_figure(RunSummary())); sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_picture_shows_itself_in_a_notebook_with_its_words_and_is_saved(tmp_path: Path) -> None:
    from PIL import Image

    made = picture(reward_time_figure(summary_of(steps=3)), "what it shows")
    data, metadata = made._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]) == made.png and data["text/plain"] == "what it shows"
    assert metadata == {
        "image/png": {"alt": "what it shows", "width": 96 * WIDTH, "height": round(96 * HEIGHT)}
    }
    assert Image.open(made.save(tmp_path / "figure.png")).info["Description"] == "what it shows"
    assert "what it shows" in repr(made) and len(repr(made)) < 200
    with pytest.raises(ValueError, match=r"figure.pdf: a figure is written as PNG"):
        made.save(tmp_path / "figure.pdf")
