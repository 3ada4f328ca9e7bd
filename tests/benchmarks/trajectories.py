"""An attempt's files, against gzipped JSON as it was written before: seconds, bytes, and how they are read.

    python tests/benchmarks/trajectories.py [--repeats 5]

Goal: written in a third of the time, and no larger. Both ways write an attempt twice, before and after its grading.
The large attempt has 131,072 tokens in 20 turns with outputs of 20,000 characters; its ids are this package's own
source in the bundled tokenizer, or drawn as words are (Zipf) from a vocabulary of 248,000, where the text is not what
they say. The best of the repeats: in this process's own time, and by the clock.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from recorded import rollout_to_json

import swegym_tutorial
from swegym_tutorial import episode_files
from swegym_tutorial.attempt_json import dumps, verdict_to_json
from swegym_tutorial.bundled import POLICY
from swegym_tutorial.episode_files import Recording, read_episode, write_graded, write_ungraded
from swegym_tutorial.events import IN_MEMORY
from swegym_tutorial.grading import Outcome, Verdict
from swegym_tutorial.rollout import Ending, Rollout, Turn
from swegym_tutorial.sandbox import CommandResult

VERDICT = Verdict(Outcome.RESOLVED, {f"tests/test_{n}.py::test_case": "PASSED" for n in range(200)})
LEVELS = (1, 2, 3, 4, 6, 9)


def attempt(tokens: int, turns: int, printed: int, sampled: int, zipf: bool) -> Rollout:
    """Return an attempt of so many turns; printed, sampled: characters and tokens of each."""
    from transformers import AutoTokenizer

    draw = np.random.default_rng(0)
    text = "".join(p.read_text() for p in sorted(Path(swegym_tutorial.__file__).parent.rglob("*.py")))
    text *= -(-(printed + 4 * sampled) * turns // len(text))
    if zipf:
        ids = draw.permutation(248_000)[draw.zipf(1.2, tokens) % 248_000].astype(np.int32)
    else:
        encoded = AutoTokenizer.from_pretrained(POLICY).encode(text[: 4 * tokens], add_special_tokens=False)
        ids = np.resize(np.array(encoded, np.int32), tokens)
    mask, logprobs, made = np.zeros(tokens, bool), np.zeros(tokens, np.float32), []
    for n in range(turns):
        end = (n + 1) * tokens // turns
        mask[end - sampled : end] = True
        sure = draw.random(sampled) < 0.6  # most tokens are all but certain
        values = np.where(sure, 10 ** draw.uniform(-6, -2, sampled), draw.exponential(0.8, sampled))
        logprobs[end - sampled : end] = -values
        at = n * (printed + 4 * sampled)
        said, output = text[at : at + 4 * sampled], text[at + 4 * sampled :][:printed]
        result = CommandResult(0, output, False, 0, 0.123)
        made.append(Turn(said, sampled, ("sed -n 1,200p a.py",), (result,), (), 3.2, 0.13))
    return Rollout("some__task-1", ids, mask, logprobs, tuple(made), Ending.FINAL, b"", 300.0)


def gzipped(folder: Path, rollout: Rollout, verdict: Verdict | None) -> None:
    """Write an attempt as it was written before."""
    told = {} if verdict is None else {"verdict": verdict_to_json(verdict)}
    text = dumps({**rollout_to_json(rollout), **told}).encode("utf-8", "backslashreplace")
    path = folder / ("ungraded.json.gz" if verdict is None else "trajectory.json.gz")
    part = path.with_name(f".{path.name}")
    part.write_bytes(gzip.compress(text, compresslevel=1, mtime=0))
    part.replace(path)


def best(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return milliseconds: of this process's own time, and by the clock."""
    told = []
    for _ in range(repeats):
        own, clock = time.process_time(), time.perf_counter()
        call()
        told.append((time.process_time() - own, time.perf_counter() - clock))
    own, clock = (1000 * min(column) for column in zip(*told, strict=True))
    return own, clock


def row(what: str, old: tuple[float, float], new: tuple[float, float]) -> None:
    times = [f"{own:.1f} ({clock:.1f})" for own, clock in (old, new)]
    print(f"| {what} | {times[0]} | {times[1]} | {new[0] / old[0]:.2f} |")


def compare(name: str, rollout: Rollout, repeats: int) -> None:
    print(f"\n| {name} | gzipped JSON | .npz | ratio |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        old, new = Path(a), Path(b)

        def twice_old() -> None:
            gzipped(old, rollout, None)
            gzipped(old, rollout, VERDICT)

        def twice_new() -> None:
            write_ungraded(new, rollout)
            write_graded(new, rollout, VERDICT)

        row(
            "write, ungraded: ms, own time (by the clock)",
            best(lambda: gzipped(old, rollout, None), repeats),
            best(lambda: write_ungraded(new, rollout), repeats),
        )

        def twice_from_disk() -> None:
            write_ungraded(new, rollout)
            write_graded(new, replace(rollout.bare(), read=Recording(new, {})), VERDICT)

        (new / "prediction.patch").write_bytes(rollout.patch)
        both_old = best(twice_old, repeats)
        if len(rollout.tokens) > IN_MEMORY:
            row("write, both, kept on disk alone meanwhile", both_old, best(twice_from_disk, repeats))
        row("write, both, kept in memory", both_old, best(twice_new, repeats))
        size_old, size_new = (
            path.stat().st_size for path in (old / "trajectory.json.gz", new / "trajectory.npz")
        )
        print(f"| bytes, graded | {size_old:,} | {size_new:,} | {size_new / size_old:.2f} |")
        left_old, left_new = (sum(p.stat().st_size for p in path.iterdir()) for path in (old, new))
        print(f"| bytes that stay on disk | {left_old:,} | {left_new:,} | {left_new / left_old:.2f} |")

        def load() -> None:
            with np.load(new / "trajectory.npz") as file:
                json.loads(bytes(file["attempt"]))
                assert len(file["tokens"]) == len(file["mask"]) == len(file["logprobs"])

        read_old = best(lambda: read_episode(old), repeats)
        row("read, as lists", read_old, best(lambda: read_episode(new), repeats))
        row("read, as arrays by numpy", read_old, best(load, repeats))


def levels(rollout: Rollout, repeats: int) -> None:
    print("\n| level of compression | write, graded: ms | bytes |\n|---|---|---|")
    chosen = episode_files.LEVEL
    with tempfile.TemporaryDirectory() as folder:
        for level in LEVELS:
            episode_files.LEVEL = level
            own, _ = best(lambda: write_graded(Path(folder), rollout, VERDICT), repeats)
            size = (Path(folder) / "trajectory.npz").stat().st_size
            print(f"| {level}{', which is taken' if level == chosen else ''} | {own:.1f} | {size:,} |")
    episode_files.LEVEL = chosen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    large = {
        "131,072 tokens of source, 1,500 sampled a turn": attempt(131_072, 20, 20_000, 1500, False),
        "131,072 ids of 248,000, 1,500 sampled a turn": attempt(131_072, 20, 20_000, 1500, True),
        "131,072 ids of 248,000, 5,000 sampled a turn": attempt(131_072, 20, 4000, 5000, True),
    }
    for name, rollout in large.items():
        compare(name, rollout, args.repeats)
    compare("1,000 tokens of source, in 3 turns", attempt(1000, 3, 600, 80, False), 20 * args.repeats)
    for rollout in list(large.values())[:2]:
        levels(rollout, args.repeats)


if __name__ == "__main__":
    main()
