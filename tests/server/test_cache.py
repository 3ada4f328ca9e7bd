"""Rows of keys and values that come and go, against a plain record of what was written for each."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from swegym_tutorial.server import cache as module
from swegym_tutorial.server.cache import RowCache
from swegym_tutorial.server.prefixes import NOTHING, Prefix

LAYERS, HEADS, SIZE = 2, 3, 4
MOST = 2**17  # tokens


class Model:
    """Writes numbers of its own into a cache, and remembers which belong to which row."""

    def __init__(self, cache: RowCache) -> None:
        self.cache = cache
        self.rows: list[torch.Tensor] = []  # each (layers, heads, tokens, size)
        torch.manual_seed(0)

    def forward(self) -> None:
        """Do what a model's layers do, and look at what they are shown."""
        cache = self.cache
        view = cache.view
        start, new = view.rows.start or 0, view.new
        count = view.rows.stop - start
        made = torch.randn(LAYERS, count, HEADS, new, SIZE)
        for n in range(count):
            size = int(cache.sizes[start + n])
            own = made[:, n, :, -min(size, new) :]
            if start + n == len(self.rows):
                self.rows.append(own)
            else:
                self.rows[start + n] = torch.cat([self.rows[start + n], own], dim=2)
            assert self.rows[start + n].shape[2] == size
        for layer in range(LAYERS):
            keys, values = cache.update(made[layer], made[layer] + 0.5, layer)
            assert keys.shape == values.shape == (count, HEADS, view.width, SIZE)
            for n in range(count):
                own = self.rows[start + n][layer]
                assert torch.equal(keys[n, :, view.width - own.shape[1] :], own)
                assert torch.equal(values[n, :, view.width - own.shape[1] :], own + 0.5)
            assert torch.isfinite(keys).all() and torch.isfinite(values).all()
        self.check()

    def open(self, *sizes: int) -> None:
        self.cache.open(np.array(sizes), [NOTHING] * len(sizes))
        self.forward()

    def step(self) -> None:
        self.cache.extend()
        self.forward()

    def keep(self, *places: int) -> None:
        order = self.cache.keep(list(places))
        assert sorted(order) == sorted(places)
        self.rows = [self.rows[place] for place in order]
        self.check()

    def check(self) -> None:
        assert self.cache.sizes.tolist() == [row.shape[2] for row in self.rows]
        for n, row in enumerate(self.rows):
            for (keys, values), own in zip(self.cache.row(n, row.shape[2]), row, strict=True):
                assert torch.equal(keys, own) and torch.equal(values, own + 0.5)


@pytest.mark.parametrize("room", [1, 3, 64])
def test_rows_come_grow_and_go(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr(module, "ROOM", room)
    model = Model(RowCache(MOST))
    model.open(3, 7)
    for _ in range(5):
        model.step()
    model.open(20)  # longer than all that is there
    model.step()
    model.open(1, 1, 1, 2)
    for _ in range(40):
        model.step()
    model.keep(0, 4, 6)
    model.step()
    model.keep(2)
    model.open(2, 90)
    for _ in range(3):
        model.step()
    model.keep(0, 1, 2)


def test_rows_at_random() -> None:
    random = np.random.default_rng(0)
    model = Model(RowCache(MOST))
    for _ in range(300):
        count = len(model.rows)
        move = random.integers(6)
        if not count or (move == 0 and count < 12):
            model.open(*random.integers(1, 30, random.integers(1, 4)).tolist())
        elif move == 1:
            model.keep(*sorted(random.choice(count, random.integers(1, count + 1), replace=False).tolist()))
        elif move == 2 and count < 12:
            row = int(random.integers(count))
            model.cache.copy(row)
            model.rows.append(model.rows[row])
            model.check()
        else:
            model.step()


@pytest.mark.parametrize("there", [0, 5])
def test_known_beginnings_are_put_in_place_and_only_the_rest_is_read(there: int) -> None:
    torch.manual_seed(1)
    model = Model(RowCache(MOST))
    if there:
        model.open(there)
    known = torch.randn(LAYERS, HEADS, 9, SIZE)
    prefix = Prefix(9, [(layer, layer + 0.5) for layer in known])
    # Rows of 12, 10 and 2 tokens, of which 9, 9 and none are known: three of each are read, or all.
    new = model.cache.open(np.array([12, 10, 2]), [prefix, prefix, NOTHING])
    assert new.tolist() == [3, 3, 2] and model.cache.view.new == 3
    model.rows += [known, known[:, :, :7]]
    model.forward()
    for _ in range(70):
        model.step()


def test_buffers_are_not_made_anew_for_each_token() -> None:
    model = Model(RowCache(MOST))
    model.open(5, 5)
    buffers = set()
    for _ in range(100):
        model.step()
        buffers.add(model.cache.view.capacity)
    assert len(buffers) <= 3


def test_buffers_are_not_as_large_as_the_most_rows_times_the_longest() -> None:
    model = Model(RowCache(MOST))
    model.open(*[3] * 40)
    model.keep(7)
    for _ in range(200):
        model.step()
    rows, columns = model.cache.view.capacity
    assert rows == 1 and columns < 300


@pytest.mark.parametrize("copies", [0, 63])
def test_buffers_hold_no_more_than_they_may(copies: int) -> None:
    """Rows that come one after the other and grow: with room to spare at first, and without it at the end."""
    most = 64 * (300 + module.ROOM)
    model = Model(RowCache(most))
    model.cache.open(np.array([150]), [NOTHING], copies)
    model.forward()
    capacities = [model.cache.view.capacity]

    def look() -> None:
        if model.cache.view.capacity != capacities[-1]:
            capacities.append(model.cache.view.capacity)

    for _ in range(63):
        model.cache.copy(0)
        model.rows.append(model.rows[0])
        look()
    assert len(capacities) == 1 if copies else len(capacities) > 1
    for _ in range(150):
        model.step()
        look()
    assert len(model.rows) == 64 and model.cache.sizes.max() == 300
    model.keep(3)
    model.open(*[40] * 30)
    look()
    assert all(rows * columns <= most for rows, columns in capacities)
    assert len(capacities) < 25


def test_buffers_go_with_their_cache() -> None:
    """At once, and not when circles of references are looked for."""
    model = Model(RowCache(MOST))
    model.open(5)
    layers = [weakref.ref(layer) for layer in model.cache.layers]
    gc.disable()
    try:
        del model
        assert [layer() for layer in layers] == [None, None]
    finally:
        gc.enable()
