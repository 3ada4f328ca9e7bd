"""Keys and values of sequences that one version has read lately, so that a common beginning isn't read again.

The turns of an attempt begin with its earlier turns, the attempts of a group with one prompt, and all of them with
one system prompt. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

MAX_BYTES = 64 * 2**20  # of keys and values,
MAX_SEQUENCES = 256  # and the sequences that they belong to

KeysValues = list[tuple[torch.Tensor, torch.Tensor]]  # by layer; each (heads, tokens, size)


@dataclass(frozen=True)
class Prefix:
    """The first `size` tokens of a sequence that was read."""

    size: int
    layers: KeysValues


NOTHING = Prefix(0, [])


class Prefixes:
    """Sequences by their tokens; the one that wasn't of use for longest goes first."""

    def __init__(self) -> None:
        self._tokens = np.full(
            (MAX_SEQUENCES, 0), -1, np.int64
        )  # padded at the right with -1, which is no token
        self._layers: list[KeysValues] = [[] for _ in range(MAX_SEQUENCES)]
        self._used = np.zeros(MAX_SEQUENCES, np.int64)  # by the clock; 0: a free place
        self._bytes = np.zeros(MAX_SEQUENCES, np.int64)
        self._clock = 0

    def find(self, tokens: np.ndarray) -> Prefix:
        """Return the longest beginning that is known; never all tokens, since the last one's logits are needed."""
        place, size = self._longest(tokens[:-1])
        if not size:
            return NOTHING
        self._touch(place)
        return Prefix(size, self._layers[place])

    def keep(self, tokens: np.ndarray, layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Remember a sequence's keys and values, which are copied; in the place of one that it goes on from."""
        place, size = self._longest(tokens)
        if size == tokens.size:
            self._touch(place)
            return
        if not size or size < (self._tokens[place] >= 0).sum():
            place = int(self._used.argmin())
        if tokens.size > self._tokens.shape[1]:
            wider = np.full((MAX_SEQUENCES, tokens.size - self._tokens.shape[1]), -1, np.int64)
            self._tokens = np.concatenate([self._tokens, wider], axis=1)
        copies = [(keys.clone(), values.clone()) for keys, values in layers]  # first, as memory may run out
        self._forget(place)
        self._tokens[place, : tokens.size] = tokens
        self._layers[place] = copies
        self._bytes[place] = sum(keys.nbytes + values.nbytes for keys, values in layers)
        self._touch(place)
        while self._bytes.sum() > MAX_BYTES:
            self._forget(int(np.where(self._used > 0, self._used, self._clock + 1).argmin()))

    def _longest(self, tokens: np.ndarray) -> tuple[int, int]:
        """Return the place that shares the longest beginning with the tokens, and its length."""
        width = min(tokens.size, self._tokens.shape[1])
        if not width:
            return 0, 0
        differs = self._tokens[:, :width] != tokens[:width]
        sizes = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        place = int(sizes.argmax())
        return place, int(sizes[place])

    def _touch(self, place: int) -> None:
        self._clock += 1
        self._used[place] = self._clock

    def _forget(self, place: int) -> None:
        self._tokens[place] = -1
        self._layers[place] = []
        self._used[place] = self._bytes[place] = 0
