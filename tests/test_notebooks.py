"""The notebooks: what is committed is fit to be read, and they run from top to bottom with every exercise solved."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS_A_CELL = 400  # for nbmake, which ends a cell that hangs
SECONDS_FOR_ALL = 900

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def test_there_are_notebooks() -> None:
    assert FOLDER / "00_quickstart.ipynb" in NOTEBOOKS


# GitHub shows no notebook with widget metadata: jupyter-widgets/ipywidgets has many reports of it.
@every_notebook
def test_case_43_no_widget_state_is_in_the_file(path: Path) -> None:
    assert "widgets" not in read(path).metadata
    assert "vnd.jupyter.widget" not in path.read_text(encoding="utf-8")


@every_notebook
def test_outputs_are_there_without_errors_and_in_order(path: Path) -> None:
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), (
        "run it from top to bottom"
    )
    kinds = {output.output_type for cell in cells for output in cell.outputs}
    assert "error" not in kinds
    assert not [o.text for c in cells for o in c.outputs if o.get("name") == "stderr"]
    assert any("image/png" in o.get("data", {}) for c in cells for o in c.outputs), "a notebook has a figure"


@every_notebook
def test_no_path_of_the_machine_that_made_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"/(?:home|root|tmp|usr|work|Users|var|private)/[^\"\\ ]*", text)
    assert not re.findall(r"[A-Z]:\\\\", text)


@every_notebook
def test_it_is_small(path: Path) -> None:
    assert path.stat().st_size < 200_000


@every_notebook
def test_cells_are_short_and_told_before(path: Path) -> None:
    cells = read(path).cells
    lines = [len(cell.source.splitlines()) for cell in cells if cell.cell_type == "code"]
    assert max(lines) <= 25 and statistics.median(lines) <= 8
    assert 12 <= len(lines) <= 20
    for before, cell in itertools.pairwise(cells):
        checked = "check" in cell.metadata.get("tags", [])
        assert cell.cell_type != "code" or before.cell_type == "markdown" or checked, cell.source


@every_notebook
def test_it_says_what_a_reader_wants_to_know(path: Path) -> None:
    prose = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    for word in ("**Goal**", "**You need**", "**Time**", "**Cost**", "What you should see", "## Summary"):
        assert word in prose, word
    assert prose.count("<summary>Solution</summary>") == 3
    tags = [tag for cell in code_cells(path) for tag in cell.metadata.get("tags", [])]
    assert sorted(tags) == ["check"] * 3 + ["exercise"] * 3 + ["parameters"]


@every_notebook
def test_its_twin_says_the_same(path: Path) -> None:
    twin = jupytext.read(path.with_suffix(".py"))
    ours, theirs = (
        [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in book.cells]
        for book in (read(path), twin)
    )
    assert ours == theirs, "run: jupytext --sync notebooks/*.py"


def solved(path: Path, into: Path) -> Path:
    """Copy a notebook without outputs, each exercise's answer taken from the solution in the text before it."""
    book = read(path)
    answer = ""
    for cell in book.cells:
        if cell.cell_type == "markdown":
            if found := re.search(
                r"<summary>Solution</summary>.*?```python\n(.*?)```", cell.source, re.DOTALL
            ):
                answer = found[1]
            continue
        cell.outputs, cell.execution_count = [], None
        if "exercise" in cell.metadata.get("tags", []):
            cell.source = answer
    copy = into / path.name
    nbformat.write(book, copy)
    return copy


@pytest.fixture(scope="session")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of all notebooks, solved and run by nbmake with a limit a cell and one for all (case 44)."""
    folder = tmp_path_factory.mktemp("notebooks")
    for path in NOTEBOOKS:
        solved(path, folder)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--nbmake",
        "--overwrite",
        "-n2",  # two at a time
        f"--nbmake-timeout={SECONDS_A_CELL}",
    ]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)],
        env={**outside, "SWEGYM_TUTORIAL_QUICK": "1"},
        cwd=folder,
        timeout=SECONDS_FOR_ALL,
        capture_output=True,
        text=True,
    )
    if artifacts := os.environ.get("SWEGYM_TUTORIAL_ARTIFACTS"):  # also of a failure
        kept = FOLDER.parent / artifacts / "notebooks"
        kept.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.ipynb"):
            shutil.copy(path, kept)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    yield folder
    shutil.rmtree(folder / "runs", ignore_errors=True)


# A cell that hangs stops CI for hours, jupyter/nbclient#312.
@pytest.mark.slow
@every_notebook
def test_case_44_it_runs_from_top_to_bottom_in_bounded_time(executed: Path, path: Path) -> None:
    cells = code_cells(executed / path.name)
    assert all(cell.execution_count for cell in cells)
    checks = [cell for cell in cells if "check" in cell.metadata.get("tags", [])]
    # A kernel may send a line in two parts.
    assert ["".join(output.text for output in cell.outputs) for cell in checks] == ["Right.\n"] * 3


@pytest.mark.slow
def test_a_hanging_cell_is_ended(tmp_path: Path) -> None:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import time; time.sleep(600)")])
    book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(book, tmp_path / "hangs.ipynb")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--nbmake",
            "--nbmake-timeout=3",
            "--rootdir",
            str(tmp_path),
            ".",
        ],
        cwd=tmp_path,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "3" in done.stdout and "imeout" in done.stdout


@every_notebook
def test_it_is_named_in_the_readme(path: Path) -> None:
    assert f"notebooks/{path.name}" in (FOLDER.parent / "README.md").read_text(encoding="utf-8")


def test_a_notebook_is_valid_json_of_format_4() -> None:
    for path in NOTEBOOKS:
        nbformat.validate(nbformat.from_dict(json.loads(path.read_text(encoding="utf-8"))))
