"""Memory: what is freed goes back to the system, and the benchmark that measures a full run's."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from swegym_tutorial import heap

SCRIPT = Path(__file__).parent / "benchmarks" / "memory.py"
# Prints how many blocks of 4 MB, made after one of 8 MB was freed, are mappings of their own. Only those are given back.
MAPPED = """
import ctypes
from swegym_tutorial.heap import give_back

class Told(ctypes.Structure):
    _fields_ = [(f"f{n}", ctypes.c_int) for n in range(10)]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
libc.mallinfo.restype = Told
give_back()
libc.free(libc.malloc(8 << 20))
before = libc.mallinfo().f3
blocks = [libc.malloc(4 << 20) for _ in range(4)]
print(libc.mallinfo().f3 - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt as it is used here")
@pytest.mark.parametrize(
    "own, mapped",
    [
        ({}, 4),
        ({"MALLOC_MMAP_THRESHOLD_": str(16 << 20)}, 0),
        ({"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={16 << 20}"}, 0),
    ],
)
def test_large_blocks_go_back_to_the_system_unless_the_user_has_set_it_otherwise(
    own: dict[str, str], mapped: int
) -> None:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", MAPPED]
    told = subprocess.check_output(command, env=ours | own, cwd=SCRIPT.parents[2], timeout=60)
    assert int(told) == mapped


@pytest.mark.parametrize("missing", [OSError("no library"), TypeError("no name"), None])
def test_where_there_is_no_such_function_nothing_happens(
    missing: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Bare:
        """A library without `mallopt`."""

        def __getattr__(self, name: str) -> None:
            asked.append(name)
            raise AttributeError(name)

    def library(name: None) -> Bare:
        if missing is not None:
            asked.append("library")
            raise missing
        return Bare()

    for name in ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", library)
    heap.give_back()
    assert asked == ["mallopt" if missing is None else "library"]


@pytest.mark.slow
def test_a_small_run_of_the_benchmark_prints_a_row_for_each_moment(tmp_path: Path) -> None:
    arguments = "--clients 1 --attempts 2 --tokens 17500"
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments.split()],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[4:]]
    assert [row[0] for row in rows] == ["attempts"] * 6 + ["minibatch"] * 7
    assert all(20 < float(value.replace(",", "")) < 5000 for _, what, value in rows if what != "seconds")
    assert not list(tmp_path.iterdir())
