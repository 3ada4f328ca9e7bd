"""The base models of a server, the LoRA clients that train on them, and the versions to sample from.

What is done here is asked for by name: clients by the ids that HTTP gave them, versions by checkpoint. Used by one
thread. Knows nothing of queues or HTTP.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .records import ALPHA, AdamStep, Limits, LoraSpec, TrainBatch, Trained, UserError
from .sampling import BASE, Adapter, SamplingModel
from .store import Address, Checkpoint, Store
from .training import Trainer

KEPT_ADAPTERS = 8  # versions that stay in memory; the others are read again when they are asked for


class BaseModel:
    """A folder's model twice, once to train on and once to sample from; in float32, on a GPU where there is one."""

    def __init__(self, folder: Path, threads: int) -> None:
        """Raises RuntimeError or OSError where the folder holds no causal LM that can be served."""
        self.folder = folder.resolve()
        model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False)
        self.architecture = type(model).__name__
        config = model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        if not isinstance(context, int):
            raise RuntimeError(f"{folder}: its config.json tells no max_position_embeddings")
        self.limits = Limits(context, model.get_input_embeddings().weight.shape[0])
        eos = model.generation_config.eos_token_id if model.generation_config else None
        if eos is None:
            eos = config.eos_token_id
        self.eos = frozenset([eos] if isinstance(eos, int) else eos or [])
        self.sampling = SamplingModel(copy.deepcopy(model), threads)
        self.trainer = Trainer(model)

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder)


@dataclass(frozen=True)
class Version:
    """What is sampled from: a checkpoint's adapter, or with None the base model itself."""

    base: BaseModel
    address: Address | None


@dataclass(frozen=True)
class _Client:
    base: BaseModel
    name: str  # the base model's, as it was asked for
    spec: LoraSpec
    key: str  # the trainer's name of its adapter


class Models:
    """Raises UserError for what can't be done as asked."""

    def __init__(self, folders: Mapping[str, Path], store: Store, threads: int) -> None:
        """Load the models; names that share a folder share its model. Raises RuntimeError or OSError.

        threads: of torch, for one computation.
        """
        loaded = {
            folder: BaseModel(folder, threads) for folder in {f.resolve(): None for f in folders.values()}
        }
        self.bases = {name: loaded[folder.resolve()] for name, folder in folders.items()}
        self.store = store
        self._threads = threads
        self._clients: dict[str, _Client] = {}
        self._adapters: OrderedDict[Address, Adapter] = OrderedDict()

    def base(self, name: str) -> BaseModel:
        if name not in self.bases:
            raise UserError(f"unknown model {name!r}: this server has {', '.join(self.bases)}", 404)
        return self.bases[name]

    def create(self, id: str, name: str, spec: LoraSpec) -> None:
        base = self.base(name)
        key = id.replace(".", "_")
        base.trainer.create(key, spec)
        self._clients[id] = _Client(base, name, spec, key)

    def create_from(self, id: str, name: str, address: Address, optimizer: bool) -> None:
        """Create a client in the shape of a checkpoint, and load it."""
        self.create(id, name, self.store.describe(address).spec)
        try:
            self.load(id, address, optimizer)
        except UserError:
            self.release(id)
            raise

    def release(self, id: str) -> None:
        """Forget a client. Its named checkpoints stay."""
        client = self._clients.pop(id, None)
        if client:
            client.base.trainer.delete(client.key)
            self.store.forget_ephemeral(id)

    def train(self, id: str, batch: TrainBatch) -> Trained:
        client = self._client(id)
        torch.set_num_threads(self._threads)
        return client.base.trainer.run(client.key, batch)

    def step(self, id: str, adam: AdamStep) -> dict[str, float]:
        client = self._client(id)
        return client.base.trainer.step(client.key, adam)

    def save(
        self,
        id: str,
        address: Address,
        *,
        optimizer: bool,
        overwrite: bool = False,
        expires: float | None = None,
    ) -> None:
        """Write a client's adapter, and with optimizer its AdamW's state, to the store."""
        client = self._client(id)
        trainer = client.base.trainer
        tensors = {f"adapter/{key}": value for key, value in trainer.weights(client.key).items()}
        if optimizer:
            tensors |= {f"adam/{key}": value for key, value in trainer.optimizer_state(client.key).items()}
        checkpoint = Checkpoint(client.name, client.spec, optimizer, expires)
        self.store.save(address, checkpoint, tensors, overwrite=overwrite)
        self._adapters.pop(address, None)

    def load(self, id: str, address: Address, optimizer: bool) -> None:
        """Replace a client's weights, and with optimizer its AdamW's state; without it, AdamW starts afresh."""
        client = self._client(id)
        found, tensors = self.store.read(address)
        if optimizer and not found.optimizer:
            raise UserError(f"{address} holds no optimizer state: load a path that save_state returned")
        if found.base_model in self.bases and self.bases[found.base_model] is not client.base:
            raise UserError(
                f"{address} was trained on {found.base_model}, and this client trains {client.name}"
            )
        state = _beginning("adam/", tensors) if optimizer else None
        client.base.trainer.load(client.key, _beginning("adapter/", tensors), state)

    def adapter(self, version: Version) -> Adapter:
        """Return a version's adapter, from memory or the store."""
        address = version.address
        if address is None:
            return BASE
        if address not in self._adapters:
            found, tensors = self.store.read(address)
            weights = _beginning("adapter/", tensors)
            names = [key.removesuffix(".A") for key in weights if key.endswith(".A")]
            layers = {name: (weights[f"{name}.A"], weights[f"{name}.B"]) for name in names}
            self._adapters[address] = Adapter(str(address), ALPHA / found.spec.rank, layers)
            while len(self._adapters) > KEPT_ADAPTERS:
                self._adapters.popitem(last=False)
        self._adapters.move_to_end(address)
        return self._adapters[address]

    def _client(self, id: str) -> _Client:
        if id not in self._clients:
            raise UserError(f"the model {id} is gone: its creation failed, or its session has ended")
        return self._clients[id]


def _beginning(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
