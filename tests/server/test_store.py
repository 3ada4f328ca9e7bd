"""Checkpoints on disk: names, immutability, and what a restart finds."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch

from swegym_tutorial.server.records import LoraSpec, UserError
from swegym_tutorial.server.store import EPHEMERAL, Address, Checkpoint, Store

CHECKPOINT = Checkpoint("tiny", LoraSpec(4, train_unembed=False, seed=3), optimizer=True)
TENSORS = {"adapter/x.A": torch.arange(6.0).reshape(2, 3), "adam/x.A/step": torch.tensor(3.0)}


def address_of(name: str = "first", kind: str = "weights") -> Address:
    return Address("0af:train:1", kind, name)


def test_a_checkpoint_is_found_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = str(address_of())
    assert path == "tinker://0af:train:1/weights/first"
    store.save(address_of(), CHECKPOINT, TENSORS)
    del store
    gc.collect()
    found, tensors = Store(tmp_path).read(Address.parse(path))
    assert found == CHECKPOINT
    assert all(torch.equal(value, tensors[key]) for key, value in TENSORS.items())


def test_it_changes_only_when_that_is_asked_for(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(address_of(), CHECKPOINT, TENSORS)
    other = {"adapter/x.A": torch.zeros(1)}
    with pytest.raises(UserError, match="tinker://0af:train:1/weights/first is there already"):
        store.save(address_of(), CHECKPOINT, other)
    assert store.read(address_of())[1].keys() == TENSORS.keys()
    store.save(address_of(), CHECKPOINT, other, overwrite=True)
    assert store.read(address_of())[1].keys() == other.keys()
    store.save(address_of(kind="sampler_weights"), CHECKPOINT, TENSORS)


@pytest.mark.parametrize(
    "name", ["", "..", "../x", "a/b", "/etc/passwd", ".hidden", "-x", "a b", "a\0b", "x" * 129]
)
def test_names_that_are_no_file_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="can't be a checkpoint's name"):
        Address("0af", "weights", name)
    with pytest.raises(UserError, match="no model's id") as raised:
        Address(name, "weights", "x")
    assert raised.value.status == 404


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    for path in ("tinker://a/weights/x", "tinker://a/sampler_weights/x"):
        with pytest.raises(UserError, match="does not exist") as raised:
            Store(tmp_path / path[-1]).read(Address.parse(path))
        assert raised.value.status == 404
        gc.collect()
    for path in ("tinker://a/ephemeral/x", "x", "tinker://a/weights", "http://a/weights/x"):
        with pytest.raises(UserError, match="no path of a checkpoint"):
            Address.parse(path)


def test_it_expires(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name, expires in (("past", time.time() - 1), ("future", time.time() + 1000)):
        store.save(address_of(name), Checkpoint("tiny", LoraSpec(4), False, expires), TENSORS)
    assert store.describe(address_of("future")).optimizer is False
    with pytest.raises(UserError, match="expired"):
        store.describe(address_of("past"))
    store.save(address_of("past"), CHECKPOINT, TENSORS)


def test_one_server_a_folder_and_leftovers_are_cleared(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(address_of(kind=EPHEMERAL), CHECKPOINT, TENSORS)
    store.save(address_of(), CHECKPOINT, TENSORS)
    (tmp_path / "0af-train-1" / "weights" / "cut.safetensors.12.part").write_bytes(b"half")
    with pytest.raises(RuntimeError, match="another server uses"):
        Store(tmp_path)
    del store
    gc.collect()
    store = Store(tmp_path)
    assert store.describe(address_of()) == CHECKPOINT
    assert {path.name for path in tmp_path.glob("*/*/*")} == {"first.safetensors"}
    store.save(address_of(kind=EPHEMERAL), CHECKPOINT, TENSORS)
    store.forget_ephemeral("0af:train:1")
    assert not list(tmp_path.glob(f"*/{EPHEMERAL}"))
