"""The one thread that owns torch: it trains adapters and samples from them, in turn.

Work of one client keeps its order; clients take turns; and a piece of training and a batch of sampling take turns
too, so that neither waits long for the other. All sampling requests for one version that wait together are decoded
together, and nothing waits for more to come. Knows nothing of HTTP.
"""

from __future__ import annotations

import copy
import sys
import threading
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from .records import ALPHA, AdamStep, Limits, LoraSpec, SampleJob, Samples, TrainBatch, Trained, UserError
from .sampling import BASE, Adapter, Sampler
from .store import Address, Checkpoint, Store
from .training import Trainer

BATCH_ROWS = 64  # sequences decoded at once,
BATCH_TOKENS = 2**17  # and the tokens that they may come to,
BATCH_LOGITS = 2**28  # and the logits, where prompts are scored
KEPT_ADAPTERS = 8  # versions that stay in memory; the others are read again when they are asked for

Outcome = Samples | Trained | dict[str, Any] | Exception
Done = Callable[[Outcome], None]


class BaseModel:
    """A folder's model twice, once to train on and once to sample from."""

    def __init__(self, folder: Path) -> None:
        """Raises RuntimeError where the folder holds no causal LM that can be served."""
        self.folder = folder.resolve()
        model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False)
        self.architecture = type(model).__name__
        config = model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        if not isinstance(context, int):
            raise RuntimeError(f"{folder}: its config.json tells no max_position_embeddings")
        self.limits = Limits(context, model.get_input_embeddings().weight.shape[0])
        eos = GenerationConfig.from_model_config(model.config).eos_token_id
        if model.generation_config is not None and model.generation_config.eos_token_id is not None:
            eos = model.generation_config.eos_token_id
        self.eos = frozenset([eos] if isinstance(eos, int) else eos or [])
        self.sampler = Sampler(copy.deepcopy(model), context, self.eos, lambda: self._tokenizer)
        self.trainer = Trainer(model)

    @cached_property
    def _tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder)


@dataclass(frozen=True)
class Client:
    """One LoRA client. name: the base model's, as it was asked for; key: the trainer's name of its adapter."""

    id: str
    base: BaseModel
    name: str
    spec: LoraSpec
    key: str


@dataclass(frozen=True)
class Version:
    """What is sampled from: a checkpoint's adapter, or with None the base model itself."""

    base: BaseModel
    address: Address | None


@dataclass(frozen=True)
class _Waiting:
    number: int  # counts arrivals
    job: SampleJob
    done: Done


class Engine:
    """`submit` and `sample` may be called from any thread; `done` is called in the engine's own."""

    def __init__(self, models: Mapping[str, Path], store: Store, threads: int) -> None:
        """Load the models. Raises RuntimeError or OSError where one can't be."""
        torch.set_num_threads(threads)
        folders = {folder.resolve() for folder in models.values()}
        loaded = {folder: BaseModel(folder) for folder in sorted(folders)}
        self.models = {name: loaded[folder.resolve()] for name, folder in models.items()}
        self.store = store
        self._clients: dict[str, Client] = {}
        self._adapters: OrderedDict[Address, Adapter] = OrderedDict()
        self._wake = threading.Condition()
        self._work: OrderedDict[str, deque[tuple[Callable[[], Outcome], Done]]] = OrderedDict()
        self._samples: OrderedDict[tuple[Version, bool], deque[_Waiting]] = OrderedDict()
        self._arrivals = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish what is being computed, for at most a moment, and begin nothing more."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=0.3)

    def base(self, name: str) -> BaseModel:
        if name not in self.models:
            raise UserError(f"unknown model {name!r}: this server has {', '.join(self.models)}", 404)
        return self.models[name]

    def submit(self, client: str, work: Callable[[], Outcome], done: Done) -> None:
        """Queue work behind what its client asked for before."""
        with self._wake:
            self._work.setdefault(client, deque()).append((work, done))
            self._wake.notify()

    def sample(self, version: Version, job: SampleJob, done: Done) -> None:
        with self._wake:
            self._arrivals += 1
            queue = self._samples.setdefault((version, job.scores_prompt), deque())
            queue.append(_Waiting(self._arrivals, job, done))
            self._wake.notify()

    # -- what is submitted; runs in the engine's thread -------------------------------------------------

    def create(self, id: str, name: str, spec: LoraSpec) -> dict[str, Any]:
        base = self.base(name)
        key = id.replace(".", "_")
        base.trainer.create(key, spec)
        self._clients[id] = Client(id, base, name, spec, key)
        return {"type": "create_model", "model_id": id}

    def create_from(self, id: str, address: Address, name: str | None, optimizer: bool) -> dict[str, Any]:
        """Create a client in the shape of a checkpoint, and load it."""
        found = self.store.describe(address)
        self.create(id, name or found.base_model, found.spec)
        try:
            return self.load(id, address, optimizer) | {"model_id": id}
        except UserError:
            self.release(id)
            raise

    def release(self, id: str) -> dict[str, Any]:
        """Forget a client. Its checkpoints stay."""
        client = self._clients.pop(id, None)
        if client:
            client.base.trainer.delete(client.key)
            self.store.forget_ephemeral(id)
        return {"type": "unload_model", "model_id": id}

    def train(self, id: str, batch: TrainBatch) -> Trained:
        client = self._client(id)
        return client.base.trainer.run(client.key, batch)

    def step(self, id: str, adam: AdamStep) -> dict[str, Any]:
        client = self._client(id)
        return {"type": "optim_step", "metrics": client.base.trainer.step(client.key, adam)}

    def save(
        self,
        id: str,
        address: Address,
        *,
        optimizer: bool,
        overwrite: bool = False,
        expires: float | None = None,
    ) -> None:
        client = self._client(id)
        trainer = client.base.trainer
        tensors = {f"adapter/{key}": value for key, value in trainer.weights(client.key).items()}
        if optimizer:
            tensors |= {f"adam/{key}": value for key, value in trainer.optimizer_state(client.key).items()}
        self.store.save(
            address, Checkpoint(client.name, client.spec, optimizer, expires), tensors, overwrite=overwrite
        )
        self._adapters.pop(address, None)

    def load(self, id: str, address: Address, optimizer: bool) -> dict[str, Any]:
        client = self._client(id)
        found, tensors = self.store.read(address)
        if optimizer and not found.optimizer:
            raise UserError(f"{address} holds no optimizer state: load a path that save_state returned")
        weights = {
            key.removeprefix("adapter/"): v for key, v in tensors.items() if key.startswith("adapter/")
        }
        state = {key.removeprefix("adam/"): v for key, v in tensors.items() if key.startswith("adam/")}
        client.base.trainer.load(client.key, weights, state if optimizer else None)
        return {"type": "load_weights", "path": str(address)}

    def _client(self, id: str) -> Client:
        if id not in self._clients:
            raise UserError(f"the model {id} is gone: its creation failed, or its session has ended")
        return self._clients[id]

    # -- the thread -------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._work or self._samples)
                if self._stopping:
                    return
                batch = self._next_batch()
                work = self._next_work()
            if batch:
                self._decode(*batch)
            if work:
                call, done = work
                try:
                    outcome = call()
                except Exception as error:
                    outcome = _told(error)
                done(outcome)

    def _next_work(self) -> tuple[Callable[[], Outcome], Done] | None:
        """Take the first piece of the client whose turn it is."""
        if not self._work:
            return None
        client, queue = self._work.popitem(last=False)
        work = queue.popleft()
        if queue:
            self._work[client] = queue
        return work

    def _next_batch(self) -> tuple[Version, list[_Waiting]] | None:
        """Take what fits into a batch from the requests for the version that has waited longest."""
        if not self._samples:
            return None
        key = min(self._samples, key=lambda key: self._samples[key][0].number)
        version, scored = key
        queue = self._samples[key]
        limit = BATCH_TOKENS if not scored else min(BATCH_TOKENS, BATCH_LOGITS // version.base.limits.vocab)
        batch: list[_Waiting] = []
        rows = longest = 0
        while queue:
            job = queue[0].job
            rows += job.num_samples
            longest = max(longest, job.prompt.size + (job.max_tokens or version.base.limits.context // 2))
            if batch and (rows > BATCH_ROWS or rows * longest > limit):
                break
            batch.append(queue.popleft())
        if not queue:
            del self._samples[key]
        return version, batch

    def _decode(self, version: Version, batch: list[_Waiting]) -> None:
        answered = set()

        def deliver(n: int, samples: Samples) -> None:
            answered.add(n)
            batch[n].done(samples)

        try:
            version.base.sampler.activate(self._adapter(version))
            version.base.sampler.run([waiting.job for waiting in batch], deliver)
        except Exception as error:
            outcome = _told(error)
            for n, waiting in enumerate(batch):
                if n not in answered:
                    waiting.done(outcome)

    def _adapter(self, version: Version) -> Adapter:
        address = version.address
        if address is None:
            return BASE
        if address not in self._adapters:
            found, tensors = self.store.read(address)
            layers = {
                key.removeprefix("adapter/").removesuffix(".A"): (
                    tensors[key],
                    tensors[key.removesuffix("A") + "B"],
                )
                for key in tensors
                if key.startswith("adapter/") and key.endswith(".A")
            }
            self._adapters[address] = Adapter(str(address), ALPHA / found.spec.rank, layers)
            while len(self._adapters) > KEPT_ADAPTERS:
                self._adapters.popitem(last=False)
        self._adapters.move_to_end(address)
        return self._adapters[address]


def _told(error: Exception) -> Exception:
    """Pass a user's error on; log any other, which is the server's own."""
    if not isinstance(error, UserError):
        traceback.print_exception(error, file=sys.stderr)
    return error
