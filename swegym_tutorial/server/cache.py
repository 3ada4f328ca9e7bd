"""The keys and values of the rows that are decoded side by side, in buffers that are not copied for each token.

All rows end at one column, so that a token of each is written at once; what lies before a row's own tokens is
padding. A row that goes leaves its place to the last one. Knows nothing of requests, or of what is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from .prefixes import KeysValues, Prefix

ROOM = 64  # free columns at least when the buffers are made, so that they are made seldom


@dataclass
class View:
    """What the next forward sees: some rows, so many columns before `end`, of which it writes the `new` last."""

    capacity: tuple[int, int] = (0, 0)  # rows and columns of the buffers
    end: int = 0  # the column behind the last token of every row
    rows: slice = field(default_factory=lambda: slice(0, 0))
    width: int = 0
    new: int = 0


class _Layer(DynamicLayer):
    """One layer's buffers (rows, heads, columns, size), of which a model sees the view."""

    def __init__(self, view: View) -> None:
        super().__init__()
        self._view = view

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, columns = self._view.capacity
        self.keys, self.values = (
            kind.new_zeros(rows, kind.shape[1], columns, kind.shape[3]) for kind in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what the model has made of its new tokens, and return it behind what was there."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        view, layer = self._view, cast(Any, self)
        columns = slice(view.end - view.width, view.end)
        keys, values = layer.keys[view.rows, :, columns], layer.values[view.rows, :, columns]
        keys[:, :, -view.new :] = key_states
        values[:, :, -view.new :] = value_states
        return keys, values

    def get_seq_length(self) -> int:
        return self._view.width - self._view.new


class RowCache(Cache):
    """A cache that a model fills, for rows that come and go.

    Buffers hold zeros or what was written, as padding takes part in sums, with a weight of 0.
    """

    def __init__(self, most: int) -> None:
        """most: tokens that the buffers have room for, where the rows' own and ROOM more of each fit into that.

        While larger buffers are made, one layer's are there twice.
        """
        # Layers know the view and not the cache: a circle would hold the buffers until it is collected.
        self.view = View()
        layer: Any = partial(_Layer, self.view)
        super().__init__(layer_class_to_replicate=layer)
        self.sizes = np.empty(0, np.int64)  # of each row's tokens
        self._most = most

    def extend(self) -> None:
        """Make room for one more token of every row, which the next forward writes."""
        self.sizes = self.sizes + 1
        count, width = self.sizes.size, int(self.sizes.max())
        if self.view.end == self.view.capacity[1]:
            self._make(count, width - 1, width - 1)
        self.view.end += 1
        self.view.rows, self.view.width, self.view.new = slice(0, count), width, 1

    def open(self, sizes: np.ndarray, known: Sequence[Prefix], copies: int = 0) -> np.ndarray:
        """Add rows of so many tokens, which the next forward reads, but for the beginnings that are known.

        copies: of these rows that will be added, for which there is room then.
        Returns how many tokens of each row it must read: the same number for all, or the whole row where it has
        fewer. Thus a row's tokens stand side by side, though a little that is known is read again.
        """
        old = np.array([prefix.size for prefix in known])
        new, width = int((sizes - old).max()), int(sizes.max())
        count = self.sizes.size
        self._grow(count + sizes.size + copies, width)
        self.sizes = np.concatenate([self.sizes, sizes])
        for row, (size, prefix) in enumerate(zip(sizes.tolist(), known, strict=True), count):
            if size <= new:
                continue
            place = slice(self.view.end - size, self.view.end - new)
            while len(self.layers) < len(prefix.layers):
                self.layers.append(_Layer(self.view))
            for layer, (keys, values) in zip(self._buffers(), prefix.layers, strict=True):
                if not layer.is_initialized:
                    layer.lazy_initialization(keys[None], values[None])
                layer.keys[row, :, place] = keys[:, : size - new]
                layer.values[row, :, place] = values[:, : size - new]
        self.view.rows, self.view.width, self.view.new = slice(count, self.sizes.size), width, new
        return np.minimum(sizes, new)

    def copy(self, row: int) -> None:
        """Add a row like one that is there."""
        count, size = self.sizes.size, int(self.sizes[row])
        self._grow(count + 1, size)
        self.sizes = np.append(self.sizes, size)
        self._move(row, count)

    def keep(self, places: Sequence[int]) -> list[int]:
        """Let all other rows go. Returns the places that the rows had, in their new order."""
        count = len(places)
        kept = set(places)
        behind = [place for place in places if place >= count]
        order = [place if place in kept else behind.pop() for place in range(count)]
        for place, old in enumerate(order):
            if old != place:
                self._move(old, place)
        self.sizes = self.sizes[order]
        return order

    def row(self, row: int, size: int) -> KeysValues:
        """Return the keys and values of a row's last tokens, each (heads, tokens, size)."""
        place = slice(self.view.end - size, self.view.end)
        return [(layer.keys[row, :, place], layer.values[row, :, place]) for layer in self._buffers()]

    def _buffers(self) -> list[Any]:
        return self.layers

    def _move(self, row: int, to: int) -> None:
        place = slice(self.view.end - int(self.sizes[row]), self.view.end)
        for layer in self._buffers():
            layer.keys[to, :, place] = layer.keys[row, :, place]
            layer.values[to, :, place] = layer.values[row, :, place]

    def _grow(self, rows: int, width: int) -> None:
        """Have so many rows, and so many columns before the end."""
        used = int(self.sizes.max()) if self.sizes.size else 0
        if rows > self.view.capacity[0] or width > self.view.end:
            self._make(rows, max(width, used), used)

    def _make(self, rows: int, end: int, used: int) -> None:
        """Make buffers for so many rows that end at this column, and take over the columns in use."""
        count, view = self.sizes.size, self.view
        # Some more than is needed now, as it comes one after the other; fewer rows than before where most are gone.
        columns = end + max(ROOM, min(end // 4, self._most // rows - end))
        view.capacity = max(rows, min(rows + rows // 4, self._most // columns)), columns
        for layer in self._buffers():
            old = layer.keys, layer.values
            layer.lazy_initialization(*old)
            for before, after in zip(old, (layer.keys, layer.values), strict=True):
                after[:count, :, end - used : end] = before[:count, :, view.end - used : view.end]
        view.end = end
