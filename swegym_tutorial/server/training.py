"""LoRA adapters of one base model: gradients, optimizer steps, and their state as tensors.

One peft model carries a named adapter a client; each has its own AdamW. The model stays in eval mode: no dropout,
so that the log-probabilities of training are those of sampling. Used by one thread. Knows nothing of files or
HTTP.
"""

from __future__ import annotations

import math
import re
import secrets
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from .losses import LossInputs, clipped_tokens, token_losses
from .records import ALPHA, AdamStep, Datum, LoraSpec, LossName, TrainBatch, Trained, UserError

MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}  # padded tokens that go through the model at once,
MICRO_BATCH_LOGITS = 2**27  # and the logits that they may make
_KINDS = ("train_attn", "train_mlp", "train_unembed")
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_MLP = re.compile(r"mlp|ffn|feed_forward|expert|moe|^fc\d$", re.IGNORECASE)
_ROUTER = re.compile(r"^(gate|router)$", re.IGNORECASE)


def trainable_layers(model: Any) -> dict[str, list[str]]:
    """Return the names of the linear layers for each kind of training, told by their type and name."""
    head = model.get_output_embeddings()
    found: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for name, module in model.named_modules():
        parts = name.split(".")
        if module is head:
            found["train_unembed"].append(name)
        elif not isinstance(module, (torch.nn.Linear, Conv1D)) or _ROUTER.match(parts[-1]):
            continue
        elif any(_ATTENTION.search(part) for part in parts):
            found["train_attn"].append(name)
        elif any(_MLP.search(part) for part in parts):
            found["train_mlp"].append(name)
    return found


@dataclass
class _Client:
    spec: LoraSpec
    parameters: dict[str, torch.nn.Parameter]  # "<layer>.A" (rank, inputs) and "<layer>.B" (outputs, rank)
    optimizer: torch.optim.AdamW


class Trainer:
    """All adapters of one base model. Their names may be any texts without a dot."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._vocab: int = model.get_input_embeddings().weight.shape[0]
        self._layers = trainable_layers(model)
        self._peft: Any = None  # made with the first adapter
        self._clients: dict[str, _Client] = {}

    def create(self, name: str, spec: LoraSpec) -> None:
        """Add an adapter that changes nothing yet (B is zero). The same seed gives the same A.

        Raises UserError where the architecture lacks the layers that are to be trained.
        """
        import peft  # takes seconds, which a server that only samples doesn't need

        layers = []
        for kind in _KINDS:
            if getattr(spec, kind):
                if not self._layers[kind]:
                    told = type(self._model).__name__
                    raise UserError(f"{kind}: {told} has no layers that are recognised as such")
                layers += self._layers[kind]
        config = peft.LoraConfig(r=spec.rank, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=layers)
        seed = secrets.randbits(63) if spec.seed is None else spec.seed
        with torch.random.fork_rng(), warnings.catch_warnings():
            # An adapter on an output layer that shares the embedding's weights is meant; it is never merged here.
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            torch.manual_seed(seed)
            if self._peft is None:
                self._peft = peft.get_peft_model(self._model, config, adapter_name=name).eval()
            else:
                self._peft.add_adapter(name, config)
        parameters = {}
        for layer in layers:
            module = self._model.get_submodule(layer)
            parameters[f"{layer}.A"] = module.lora_A[name].weight
            parameters[f"{layer}.B"] = module.lora_B[name].weight
        optimizer = torch.optim.AdamW(list(parameters.values()))
        self._clients[name] = _Client(spec, parameters, optimizer)

    def delete(self, name: str) -> None:
        if self._clients.pop(name, None):
            self._peft.delete_adapter(name)

    def run(self, name: str, batch: TrainBatch) -> Trained:
        """Compute log-probabilities and loss, and add the gradient of the loss to what earlier calls left.

        A batch counts as a whole or not at all. Raises UserError where the loss isn't finite.
        """
        client = self._clients[name]
        self._peft.set_adapter(name)
        parameters = list(client.parameters.values())
        before = [parameter.grad for parameter in parameters]
        if batch.backward:
            client.optimizer.zero_grad(set_to_none=True)
        logprobs: list[np.ndarray] = [np.empty(0, np.float32)] * len(batch.data)
        loss, clipped = 0.0, 0
        try:
            with torch.set_grad_enabled(batch.backward):
                for chosen in self._micro_batches(batch.data):
                    data = [batch.data[n] for n in chosen]
                    values = self._logprobs(data)
                    given = self._loss_inputs(data)
                    total = token_losses(batch, values, given).sum()
                    if not torch.isfinite(total):
                        raise UserError(
                            "the loss is not finite: the data's numbers are too large, or the weights have diverged"
                        )
                    if batch.backward:
                        total.backward()
                    loss += float(total.detach())
                    values = values.detach()
                    if batch.loss is LossName.PPO:
                        clipped += clipped_tokens(batch, values, given)
                    pieces = values.cpu().split([datum.tokens.size for datum in data])
                    for n, piece in zip(chosen, pieces, strict=True):
                        logprobs[n] = piece.numpy()
        except BaseException:
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad
            raise
        if batch.backward:
            for parameter, grad in zip(parameters, before, strict=True):
                if grad is not None:
                    parameter.grad = grad if parameter.grad is None else grad + parameter.grad
        metrics = {"loss:sum": loss, "tokens:sum": float(sum(datum.tokens.size for datum in batch.data))}
        if batch.loss is LossName.PPO:
            metrics["clipped_tokens:sum"] = float(clipped)
        return Trained(logprobs, metrics)

    def step(self, name: str, adam: AdamStep) -> dict[str, float]:
        """Update the adapter with the gradient so far, and forget it. Returns its norm before clipping, and the rate.

        Raises UserError where no gradient was computed since the last step, or it isn't finite.
        """
        client = self._clients[name]
        parameters = list(client.parameters.values())
        if all(parameter.grad is None for parameter in parameters):
            raise UserError("optim_step without a gradient: call forward_backward first")
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, adam.grad_clip_norm or math.inf))
        if not math.isfinite(norm):
            client.optimizer.zero_grad(set_to_none=True)
            raise UserError("the gradient is not finite; it was dropped and the weights are as before")
        for group in client.optimizer.param_groups:
            group.update(
                lr=adam.learning_rate,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
            )
        client.optimizer.step()
        client.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "learning_rate": adam.learning_rate}

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """Return a copy of the adapter: "<layer>.A" and "<layer>.B", on the CPU."""
        return {key: p.detach().cpu().clone() for key, p in self._clients[name].parameters.items()}

    def optimizer_state(self, name: str) -> dict[str, torch.Tensor]:
        """Return a copy of AdamW's averages by parameter and kind; empty before the first step."""
        client = self._clients[name]
        state = client.optimizer.state
        return {
            f"{key}/{kind}": torch.as_tensor(value).detach().cpu().clone()
            for key, parameter in client.parameters.items()
            for kind, value in state.get(parameter, {}).items()
        }

    def load(
        self, name: str, weights: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor] | None
    ) -> None:
        """Take over an adapter's weights and optimizer state (None: start AdamW afresh); drops the gradient.

        Raises UserError where the adapter's shape is another.
        """
        client = self._clients[name]
        shapes = {key: tuple(value.shape) for key, value in client.parameters.items()}
        if shapes != {key: tuple(value.shape) for key, value in weights.items()}:
            raise UserError(
                f"the checkpoint's adapter has another rank, other layers or another base model than "
                f"this client's, which has {client.spec}"
            )
        client.optimizer = torch.optim.AdamW(list(client.parameters.values()))
        client.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for key, parameter in client.parameters.items():
                parameter.copy_(weights[key])
        for key, value in (optimizer or {}).items():
            parameter_name, _, kind = key.rpartition("/")
            parameter = client.parameters[parameter_name]
            # AdamW keeps its step count on the CPU.
            client.optimizer.state[parameter][kind] = value.clone() if kind == "step" else value.to(parameter)

    def _micro_batches(self, data: Sequence[Datum]) -> Iterator[list[int]]:
        """Yield the data's numbers, sorted by length so that little of a micro-batch is padding."""
        tokens = MICRO_BATCH_TOKENS[self._model.device.type]
        limit = max(1, min(tokens, MICRO_BATCH_LOGITS // self._vocab))
        chosen: list[int] = []
        for n in sorted(range(len(data)), key=lambda n: data[n].tokens.size, reverse=True):
            if chosen and (len(chosen) + 1) * data[chosen[0]].tokens.size > limit:
                yield chosen
                chosen = []
            chosen.append(n)
        yield chosen

    def _logprobs(self, data: list[Datum]) -> torch.Tensor:
        """Return the targets' log-probabilities, all data behind each other, float32 (tokens,).

        Padding goes to the right, where no earlier position sees it, so no attention mask is needed.
        """
        width = max(datum.tokens.size for datum in data)
        tokens = np.zeros((len(data), width), np.int64)
        real = np.zeros((len(data), width), bool)
        for row, datum in enumerate(data):
            tokens[row, : datum.tokens.size] = datum.tokens
            real[row, : datum.tokens.size] = True
        logits = self._peft(input_ids=self._tensor(tokens), use_cache=False).logits[self._tensor(real)]
        targets = self._tensor(np.concatenate([datum.targets for datum in data]))
        return -torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")

    def _loss_inputs(self, data: list[Datum]) -> LossInputs:
        def joined(name: str) -> torch.Tensor | None:
            arrays = [getattr(datum, name) for datum in data]
            if all(values is None for values in arrays):
                return None
            ones = [
                np.ones(d.tokens.size, np.float32) if a is None else a
                for d, a in zip(data, arrays, strict=True)
            ]
            return self._tensor(np.concatenate(ones))

        return LossInputs(joined("weights"), joined("logprobs"), joined("advantages"))

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._model.device)
