"""The notebooks as people meet them: JupyterLab in a browser, with buttons that are pressed and figures that change."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import pytest

from swegym_tutorial.events import EventReader

from .lab import AS_SAVED, ROOT, Lab, wait_until
from .pages import NotebookPage, Observer

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Locator

pytestmark = pytest.mark.slow

# Cells that 00 doesn't have: one that waits without `await`, the methods' twins, and the viewer.
WATCHING = (
    """
from swegym_tutorial import Dashboard, EpisodeViewer, TrainingConfig, TrainingRun
config = TrainingConfig.laptop(steps=30)
first = TrainingRun(config, "runs/first").start()
dashboard = Dashboard(first)
""",
    "first.wait()",
    'viewer = EpisodeViewer("runs/first")',
    """
second = TrainingRun(config, "runs/second").start()
twins = Dashboard(second)
""",
    """
twins.pause()
twins.resume()
twins.stop()
second.wait()
""",
)


def open_notebook(context: BrowserContext, lab: Lab, name: str) -> NotebookPage:
    book = nbformat.read(lab.notebooks / name, as_version=4)
    return NotebookPage(context, lab, name, sum(cell.cell_type == "code" for cell in book.cells))


def write_notebook(path: Path, cells: tuple[str, ...]) -> None:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
    book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(book, path)


def row(cell: Locator, name: str) -> str:
    """The value of a row of a dashboard's table; empty where there is no such row."""
    rows = cell.locator("table tr").all_text_contents()
    return next((text.removeprefix(name) for text in rows if text.startswith(name)), "")


def stands_still(cell: Locator) -> bool:
    """Whether a dashboard tells that nothing has happened for some seconds."""
    return bool(re.search(r"([3-9]|\d\d) s|min", row(cell, "last event")))


def events(folder: Path) -> list[dict[str, Any]]:
    return list(EventReader(folder).read()) if (folder / "events.jsonl").exists() else []


def has(folder: Path, name: str) -> bool:
    return any(event["event"] == name for event in events(folder))


def attempts(folder: Path) -> tuple[int, int]:
    """Return how many attempts have begun, and how many of them have not ended yet."""
    count = Counter(event["event"] for event in events(folder))
    return count["rollout_start"], count["rollout_start"] - count["episode"]


def saved_outputs(path: Path, status: str) -> list[Any]:
    """Return the dashboard's outputs as they are saved, once they tell of this status; widgets have no state there."""
    with contextlib.suppress(ValueError):  # half written
        book = nbformat.read(path, as_version=4)
        outputs = next(cell.outputs for cell in book.cells if "Dashboard(run)" in cell.source)
        if any(status in output.get("data", {}).get("text/plain", "") for output in outputs):
            assert "widgets" not in book.metadata
            return list(outputs)
    return []


# Output lost from threads, jupyter-widgets/ipywidgets#4020; buttons dead while a cell runs, ipywidgets#3468; and
# GitHub shows no notebook with widget metadata.
def test_case_40_43_and_47_quickstart_runs_while_it_is_watched_paused_resumed_and_saved(
    lab: Lab, context: BrowserContext, observer: Observer, artifacts: Path
) -> None:
    notebook = open_notebook(context, lab, "00_quickstart.ipynb")
    shown, waiting = notebook.cell("dashboard = Dashboard(run)"), notebook.cell("await dashboard")
    notebook.menu("Run", "Run All Cells")

    wait_until(lambda: list(lab.notebooks.glob("runs/quickstart-*/events.jsonl")), "the run has a log")
    (folder,) = lab.notebooks.glob("runs/quickstart-*")
    wait_until(lambda: attempts(folder)[0], "an attempt begins")
    notebook.buttons(shown, "Pause").click()
    wait_until(lambda: "paused" in row(shown, "status"), "the table tells of the pause")
    wait_until(lambda: stands_still(shown) and not attempts(folder)[1], "all that had begun has ended")
    begun, _ = attempts(folder)
    assert notebook.waits(waiting)
    notebook.save_pictures(artifacts, "paused", shown)
    assert stands_still(shown) and attempts(folder) == (begun, 0)
    notebook.buttons(shown, "Resume").click()
    wait_until(lambda: "paused" not in row(shown, "status"), "the table tells that the run goes on")
    wait_until(lambda: attempts(folder)[0] > begun, "another attempt begins")

    seen = {notebook.picture_source(shown)}

    def over() -> bool:
        source, waits = notebook.picture_source(shown), notebook.waits(waiting)
        seen.update([source] if waits else [])
        return not waits

    wait_until(over, "the run is done")
    assert len(seen) >= 3, "the figure did not change while the cell after it waited"
    wait_until(notebook.finished, "all cells have run")
    assert not notebook.errors()
    assert row(shown, "status").startswith("done after")
    assert not notebook.buttons(shown).count()
    notebook.save_pictures(artifacts, "00_quickstart")

    notebook.menu("File", "Save Notebook")
    saved = wait_until(
        lambda: saved_outputs(lab.notebooks / "00_quickstart.ipynb", row(shown, "status")), "it is saved"
    )
    figure, table, *rest = saved
    assert set(figure.data) == {"image/png", "text/plain"} and set(table.data) == {"text/html", "text/plain"}
    assert "".join(figure.data["image/png"].split()) in str(notebook.picture_source(shown))
    assert [output.data for output in rest] in (
        [],
        [{"text/plain": ""}],
    )  # the buttons' place, which it may leave out
    assert not observer.complaints and not observer.outside


# Buttons dead while a cell runs, jupyter-widgets/ipywidgets#3468: here one that waits without `await`.
def test_case_47_stop_by_button_and_by_method_and_another_episode_is_chosen(
    lab: Lab, context: BrowserContext, observer: Observer, artifacts: Path
) -> None:
    write_notebook(lab.notebooks / "watching.ipynb", WATCHING)
    notebook = open_notebook(context, lab, "watching.ipynb")
    shown, waiting = notebook.cell("Dashboard(first)"), notebook.cell("first.wait()")
    runs = lab.notebooks / "runs"
    notebook.menu("Run", "Run All Cells")

    wait_until(lambda: has(runs / "first", "group"), "a group is graded")
    assert notebook.waits(waiting)
    notebook.buttons(shown, "Stop").click()
    wait_until(lambda: row(shown, "status").startswith("stopped after"), "the table says that it is stopped")
    wait_until(notebook.finished, "all cells have run")
    assert not notebook.errors()
    asked = [
        e["event"] for e in events(runs / "second") if e["event"] in ("paused", "unpaused", "run_stopped")
    ]
    assert asked == ["paused", "unpaused", "run_stopped"]
    for cell in (shown, notebook.cell("Dashboard(second)")):
        wait_until(lambda cell=cell: not notebook.buttons(cell).count(), "the buttons are gone")  # type: ignore[misc]
        assert row(cell, "status").startswith("stopped after")
    notebook.save_pictures(artifacts, "stopped", shown)

    viewer = notebook.cell("viewer = EpisodeViewer")
    episode, chosen = viewer.locator(".jp-RenderedHTML"), viewer.locator("select").last
    names = [text.split()[0] for text in chosen.locator("option").all_text_contents()]
    assert names[0] in str(episode.text_content()) and len(names) > 2
    chosen.select_option(index=1)
    wait_until(lambda: names[1] in str(episode.text_content()), "the chosen episode is shown")
    notebook.save_pictures(artifacts, "viewer", viewer)
    notebook.buttons(viewer, "Next").click()
    wait_until(lambda: names[2] in str(episode.text_content()), "the next episode is shown")
    assert not observer.complaints and not observer.outside


def test_notebooks_look_well_as_they_are_saved(
    lab: Lab, context: BrowserContext, observer: Observer, artifacts: Path
) -> None:
    """Before a cell has run, and before their outputs are trusted."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = open_notebook(context, lab, f"{AS_SAVED}/{path.name}")
        broken = "[...document.images].filter(image => image.complete && !image.naturalWidth).length"
        assert notebook.page.evaluate(broken) == 0, path.name
        assert not notebook.errors(), path.name
        notebook.save_pictures(artifacts, f"saved-{path.stem}")
        notebook.page.close()
        assert not observer.complaints and not observer.outside, path.name
