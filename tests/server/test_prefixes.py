"""What is remembered of sequences that were read, and what is let go."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from swegym_tutorial.server import prefixes
from swegym_tutorial.server.prefixes import NOTHING, Prefixes


def layers_of(tokens: np.ndarray) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values that tell which tokens they belong to."""
    keys = torch.from_numpy(tokens).float().reshape(1, -1, 1).repeat(2, 1, 4)
    return [(keys, keys + 0.5), (keys + 1000, keys + 1000.5)]


def check(known: Prefixes, tokens: np.ndarray, size: int) -> None:
    prefix = known.find(tokens)
    assert prefix.size == size
    for (keys, values), (k, v) in zip(prefix.layers, layers_of(tokens) if size else [], strict=True):
        assert torch.equal(keys[:, :size], k[:, :size]) and torch.equal(values[:, :size], v[:, :size])


def test_the_longest_beginning_is_found() -> None:
    known, tokens = Prefixes(), np.arange(10)
    assert known.find(tokens) is NOTHING
    known.keep(tokens[:6], layers_of(tokens[:6]))
    other = np.array([0, 1, 2, 7, 7, 7, 7, 7])
    known.keep(other, layers_of(other))
    check(known, tokens, 6)
    check(known, tokens[:6], 5)  # the last token is always read, for its logits
    check(known, np.array([0, 1, 2, 7, 7, 9]), 5)
    check(known, np.array([0, 5, 5]), 1)
    check(known, np.array([5, 5]), 0)
    check(known, np.array([0]), 0)


def test_a_sequence_takes_the_place_of_the_one_it_goes_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.arange(50)
    monkeypatch.setattr(prefixes, "MAX_SEQUENCES", 2)
    known = Prefixes()
    for size in (5, 20, 50, 30):
        known.keep(tokens[:size], layers_of(tokens[:size]))
    known.keep(tokens + 100, layers_of(tokens + 100))
    check(known, np.arange(60), 50)
    check(known, tokens + 100, 49)
    known.keep(tokens + 200, layers_of(tokens + 200))  # in the place of the one not used for longest
    check(known, np.arange(60), 0)
    check(known, tokens + 100, 49)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.arange(10)
    size = sum(keys.nbytes + values.nbytes for keys, values in layers_of(tokens))
    monkeypatch.setattr(prefixes, "MAX_BYTES", 3 * size)
    known = Prefixes()
    for n in range(5):
        known.keep(tokens + 100 * n, layers_of(tokens))
    assert [known.find(tokens + 100 * n).size for n in range(5)] == [0, 0, 9, 9, 9]
    large = np.arange(1000, 1100)
    known.keep(large, layers_of(large))  # more than all that may be kept
    assert known.find(large) is NOTHING


def test_what_could_not_be_copied_is_not_known() -> None:
    def out_of_memory() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from layers_of(np.arange(6))[:1]
        raise MemoryError

    known, tokens = Prefixes(), np.arange(6)
    known.keep(tokens[:4], layers_of(tokens[:4]))
    with pytest.raises(MemoryError):
        known.keep(tokens, out_of_memory())  # type: ignore[arg-type]
    check(known, np.arange(9), 4)
