"""The benchmark of the sandboxes runs, names every kind that it was asked for, and leaves nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from swegym_tutorial.sandbox import root

from .conftest import gone

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "sandbox.py"


@pytest.mark.slow
def test_a_short_run_prints_a_row_for_each_kind_and_leaves_nothing(tmp_path: Path) -> None:
    arguments = (
        "--rounds 2 --files 12 --at-once 2 --memory 8 --threads 2 --busy --kinds local,subprocess,lcoal"
    )
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments.split()],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:]]
    assert {len(row) for row in rows} == {8}
    assert [row[0] for row in rows[2:]] == ["bash -c", "local", "subprocess", "lcoal"]
    assert rows[-1][1].startswith("not measured: no sandbox is called 'lcoal'")
    for _, *cells in rows[3:5]:
        assert len([float(cell.removesuffix(" ms")) for cell in cells[:-1]]) == 6
        assert cells[-1].endswith("/s")
    assert not list(tmp_path.iterdir()) and gone(str(tmp_path))  # a watchdog may end a little later
    assert not root.leftovers(tmp_path)
