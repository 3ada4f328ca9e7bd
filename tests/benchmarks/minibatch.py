"""Prepare a minibatch of long attempts: numpy against a plain loop over tokens, and the SDK's own share.

    python tests/benchmarks/minibatch.py [--episodes 64] [--tokens 32768] [--repeats 5]

Goal: masks, advantages and shifts in numpy at least 50 times as fast as a plain loop that comes to the same numbers,
measured in the same run. `prepare_minibatch` also packs its arrays as the SDK wants them, tokens as lists: what that
takes is told beside it. The best of the repeats, in this process's own time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from swegym_tutorial.grading import Episode, Outcome, Verdict
from swegym_tutorial.minibatch import Group, advantages, datum, prepare_minibatch, token_advantages
from swegym_tutorial.rollout import Ending, Rollout

KL = 1e-4
Arrays = tuple[list[int], list[int], list[float], list[float]]


def made_up(episodes: int, tokens: int) -> list[Group]:
    """Return groups of eight attempts of which about a third of the tokens were sampled, in turns of 200."""
    random = np.random.default_rng(0)
    groups = []
    for start in range(0, episodes, 8):
        made = []
        for n in range(min(8, episodes - start)):
            mask = np.arange(tokens) // 200 % 3 == 1
            logprobs = np.where(mask, -random.exponential(0.5, tokens), 0.0).astype(np.float32)
            arrays = random.integers(0, 150_000, tokens, dtype=np.int32), mask, logprobs
            rollout = Rollout("made-up", *arrays, (), Ending.FINAL, b"", 1.0)
            made.append(Episode(rollout, Verdict(Outcome.RESOLVED if n % 2 else Outcome.UNRESOLVED)))
        groups.append(Group(start // 8, "made-up", 0, tuple(made)))
    return groups


def in_numpy(groups: list[Group], references: list[list[np.ndarray]]) -> list[tuple[np.ndarray, ...]]:
    """What `prepare_minibatch` computes before it packs."""
    generated = sum(int(episode.rollout.mask.sum()) for group in groups for episode in group.episodes)
    made = []
    for group, known in zip(groups, references, strict=True):
        for episode, advantage, reference in zip(
            group.episodes, advantages(group.rewards), known, strict=True
        ):
            r = episode.rollout
            weights = token_advantages(r.mask, r.logprobs, float(advantage), generated, reference, KL)
            made.append((r.tokens[:-1], r.tokens[1:].astype(np.int64), r.logprobs[1:], weights[1:]))
    return made


def token_by_token(groups: list[Group], references: list[list[np.ndarray]]) -> list[Arrays]:
    """The same with a plain loop; the groups' arrays are lists, over which Python's loops are quickest."""
    generated = 0
    for group in groups:
        for episode in group.episodes:
            for sampled in episode.rollout.mask:
                generated += 1 if sampled else 0
    made = []
    for group, known in zip(groups, references, strict=True):
        for episode, advantage, reference in zip(
            group.episodes, advantages(group.rewards).tolist(), known, strict=True
        ):
            r, inputs, targets, logprobs, weights = episode.rollout, [], [], [], []
            for t in range(len(r.tokens) - 1):
                inputs.append(r.tokens[t])
                targets.append(r.tokens[t + 1])
                logprobs.append(r.logprobs[t + 1])
                value = advantage - KL * (r.logprobs[t + 1] - reference[t + 1])
                weights.append(value / generated if r.mask[t + 1] else 0.0)
            made.append((inputs, targets, logprobs, weights))
    return made


def as_lists(groups: list[Group]) -> list[Group]:
    """Return the groups with plain lists for arrays, over which Python's loops are quickest."""
    return [
        Group(g.number, g.task_id, g.policy_version, tuple(_listed(e) for e in g.episodes)) for g in groups
    ]


def _listed(episode: Episode) -> Episode:
    r = episode.rollout
    lists: Any = (r.tokens.tolist(), r.mask.tolist(), r.logprobs.tolist())
    return Episode(Rollout(r.task_id, *lists, r.turns, r.ending, r.patch, r.seconds), episode.verdict)


def best(call: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Return the least seconds of several calls, and what the last one returned."""
    seconds, result = [], None
    for _ in range(repeats):
        began = time.process_time()
        result = call()
        seconds.append(time.process_time() - began)
    return min(seconds), result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32_768, help="of each episode")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    groups = made_up(args.episodes, args.tokens)
    references = [[each.rollout.logprobs * 0.9 for each in group.episodes] for group in groups]
    plain, listed = as_lists(groups), [[each.tolist() for each in group] for group in references]
    slow, loop = best(lambda: token_by_token(plain, listed), 2)
    quick, arrays = best(lambda: in_numpy(groups, references), args.repeats)
    for ours, theirs in zip(arrays, loop, strict=True):
        assert all(np.allclose(a, b, rtol=1e-5, atol=1e-12) for a, b in zip(ours, theirs, strict=True))
    whole, data = best(lambda: prepare_minibatch(groups, references, KL), args.repeats)
    rollouts = [episode.rollout for group in groups for episode in group.episodes]
    packing, _ = best(lambda: [datum(r.tokens, r.logprobs, r.logprobs) for r in rollouts], args.repeats)
    assert len(data) == args.episodes
    print(f"{args.episodes} episodes of {args.tokens:,} tokens\n")
    rows = [
        ("a plain loop over tokens", f"{slow:.3f}", ""),
        ("the same in numpy", f"{quick:.4f}", f"{slow / quick:.0f} times as fast; goal 50"),
        ("prepare_minibatch, all of it", f"{whole:.3f}", f"{slow / whole:.0f} times as fast"),
        ("of that, packing for the SDK", f"{packing:.3f}", f"{packing / whole:.0%}"),
    ]
    for what, seconds, told in rows:
        print(f"| {what:30}| {seconds:>8} s | {told}")


if __name__ == "__main__":
    main()
