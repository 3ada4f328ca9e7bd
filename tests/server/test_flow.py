"""The server through the real SDK: training, sampling, checkpoints, several clients at once, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from swegym_tutorial.server.process import LocalServer

from .conftest import CONTEXT, EOS, VOCAB

WITHIN = 90  # seconds in which the SDK must have raised; its own retries go on for minutes


def tokens_of(size: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, len(VOCAB), size).tolist()


def prompt_of(size: int, seed: int = 0) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens_of(size, seed))


def datum(size: int = 12, seed: int = 0, **values: Any) -> types.Datum:
    """A supervised datum; values take the place of its loss's inputs or join them."""
    tokens = tokens_of(size + 1, seed)
    inputs: dict[str, Any] = {
        "target_tokens": np.array(tokens[1:]),
        "weights": np.ones(size, np.float32),
    } | values
    arrays = {name: types.TensorData.from_numpy(np.asarray(v)) for name, v in inputs.items() if v is not None}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=arrays)


def client_of(service: tinker.ServiceClient, **options: Any) -> tinker.TrainingClient:
    return service.create_lora_training_client("tiny", **{"rank": 4, "seed": 1, **options})


def train(client: tinker.TrainingClient, seed: int = 0, rate: float = 0.01) -> float:
    """One step on one datum; returns the loss before it."""
    loss = client.forward_backward([datum(seed=seed)], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=rate)).result()
    return loss.result().metrics["loss:sum"]


def loss_of(client: tinker.TrainingClient, seed: int = 0) -> float:
    return client.forward([datum(seed=seed)], "cross_entropy").result().metrics["loss:sum"]


def score(sampler: tinker.SamplingClient, seed: int = 0) -> float:
    """The same loss, from the log-probabilities of the prompt."""
    return -sum(sampler.compute_logprobs(prompt_of(13, seed)).result()[1:])


# -- what holds -----------------------------------------------------------------------------------------


def test_capabilities_and_info(service: tinker.ServiceClient, folders: dict[str, Any]) -> None:
    models = {m.model_name: m for m in service.get_server_capabilities().supported_models}
    assert set(models) == {"tiny", "tiny/alias", "other"} and models["tiny"].max_context_length == CONTEXT
    client = client_of(service)
    info = client.get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == ("tiny", True, 4)
    assert info.model_data.tokenizer_id == str(folders["qwen3"])
    assert client.get_tokenizer().decode([2, 3]) == "ab"


def test_log_probabilities_are_those_of_transformers(
    service: tinker.ServiceClient, folders: dict[str, Any]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["qwen3"], dtype=torch.float32).eval()
    tokens = torch.tensor([tokens_of(13)])
    with torch.no_grad():
        expected = (
            torch.log_softmax(model(tokens).logits[0], -1)[:-1].gather(1, tokens[0, 1:, None])[:, 0].numpy()
        )
    sampler = service.create_sampling_client(base_model="tiny")
    assert np.abs(np.array(sampler.compute_logprobs(prompt_of(13)).result()[1:]) - expected).max() < 1e-4
    answer = client_of(service).forward_backward([datum()], "cross_entropy").result()
    assert np.abs(answer.loss_fn_outputs[0]["logprobs"].to_numpy() - expected).max() < 1e-4


def test_samples_stops_and_seeds(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="tiny/alias")
    endless = types.SamplingParams(max_tokens=40, seed=2, stop=[])
    answer = sampler.sample(prompt_of(5), 2, endless).result()
    assert [(len(s.tokens), s.stop_reason) for s in answer.sequences] == [(40, "length")] * 2
    again = sampler.sample(prompt_of(5), 2, endless).result()
    assert [s.tokens for s in again.sequences] == [s.tokens for s in answer.sequences]
    first = answer.sequences[0]
    whole = types.ModelInput.from_ints(tokens_of(5) + list(first.tokens))
    assert np.abs(np.array(sampler.compute_logprobs(whole).result()[5:]) - first.logprobs).max() < 1e-3
    stop = first.tokens[7]
    stopped = (
        sampler.sample(prompt_of(5), 1, types.SamplingParams(max_tokens=40, seed=2, stop=[stop]))
        .result()
        .sequences[0]
    )
    assert stopped.tokens == first.tokens[: first.tokens.index(stop) + 1] and stopped.stop_reason == "stop"
    by_default = (
        sampler.sample(prompt_of(5), 40, types.SamplingParams(max_tokens=60, seed=2)).result().sequences
    )
    assert all(
        (s.stop_reason == "stop") == (s.tokens[-1] == EOS) and EOS not in s.tokens[:-1] for s in by_default
    )
    top = sampler.sample(
        prompt_of(5), 1, endless, include_prompt_logprobs=True, topk_prompt_logprobs=2
    ).result()
    assert (
        top.topk_prompt_logprobs[0] is None
        and [len(best) for best in top.topk_prompt_logprobs[1:]] == [2] * 4
    )


def test_clients_train_side_by_side_and_keep_apart(service: tinker.ServiceClient) -> None:
    clients = [client_of(service, rank=rank) for rank in (2, 4, 8)]
    base = loss_of(clients[0])

    def steps(n: int) -> list[float]:
        return [train(clients[n], seed=n) for _ in range(5)]

    with ThreadPoolExecutor() as pool:
        curves = list(pool.map(steps, range(3)))
    for curve in curves:
        assert curve[-1] < curve[0] - 1
    alone = client_of(service, rank=8)
    assert [train(alone, seed=2) for _ in range(5)] == pytest.approx(curves[2], abs=1e-3)
    assert loss_of(client_of(service)) == pytest.approx(base, abs=1e-3)


def test_calls_that_are_not_waited_for_keep_their_order(service: tinker.ServiceClient) -> None:
    waited, piled = client_of(service), client_of(service)
    expected = [train(waited, seed=n) for n in range(6)]
    futures = []
    for n in range(6):
        futures.append(piled.forward_backward([datum(seed=n)], "cross_entropy"))
        piled.optim_step(types.AdamParams(learning_rate=0.01))
    assert [future.result().metrics["loss:sum"] for future in futures] == pytest.approx(expected, abs=1e-4)


def test_a_call_that_the_sdk_splits_is_one_gradient(service: tinker.ServiceClient) -> None:
    """It sends at most 1,024 data at once."""
    data = [datum(size=2, seed=n) for n in range(1030)]
    whole, parts = client_of(service), client_of(service)
    answer = whole.forward_backward(data, "cross_entropy").result()
    assert len(answer.loss_fn_outputs) == 1030
    losses = [
        parts.forward_backward(data[n::2], "cross_entropy").result().metrics["loss:sum"] for n in range(2)
    ]
    assert answer.metrics["loss:sum"] == pytest.approx(sum(losses), rel=1e-5)
    norms = [client.optim_step(types.AdamParams()).result().metrics["grad_norm"] for client in (whole, parts)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_snapshots_stay_while_training_goes_on(service: tinker.ServiceClient) -> None:
    client = client_of(service)
    base = service.create_sampling_client(base_model="tiny")
    before = score(base)
    samplers, losses = [], []
    for n in range(3):
        train(client)
        losses.append(loss_of(client))
        path = client.save_weights_for_sampler(name=f"step-{n}").result().path
        samplers += [
            service.create_sampling_client(model_path=path),
            client.save_weights_and_get_sampling_client(),
        ]
    assert path.startswith("tinker://") and path.endswith("/sampler_weights/step-2")
    with ThreadPoolExecutor() as pool:  # all versions at once
        scores = list(pool.map(score, [base, *samplers, *samplers, base]))
    expected = [before, *np.repeat(losses, 2), *np.repeat(losses, 2), before]
    assert scores == pytest.approx(expected, abs=1e-3) and losses[2] < losses[0] < before
    with pytest.raises(tinker.RequestFailedError, match="step-2 is there already"):
        client.save_weights_for_sampler(name="step-2").result(WITHIN)


def test_a_state_continues_exactly(service: tinker.ServiceClient) -> None:
    client = client_of(service)
    train(client)
    path = client.save_state("after-one").result().path
    expected = [train(client), train(client), loss_of(client)]
    resumed = service.create_training_client_from_state_with_optimizer(path)
    assert [train(resumed), train(resumed), loss_of(resumed)] == expected
    client.load_state_with_optimizer(path).result()
    assert [train(client), train(client), loss_of(client)] == expected
    afresh = service.create_training_client_from_state(path)
    assert train(afresh) == expected[0] and train(afresh) != expected[1]
    with pytest.raises(tinker.RequestFailedError, match="after-one is there already"):
        client.save_state("after-one").result(WITHIN)
    client.save_state("after-one", overwrite=True).result()
    assert loss_of(service.create_training_client_from_state(path)) == expected[2]


def test_another_architecture_trains_and_samples(service: tinker.ServiceClient) -> None:
    client = service.create_lora_training_client("other", rank=4)
    curve = [train(client) for _ in range(4)]
    assert curve[-1] < curve[0] - 1
    assert score(client.save_weights_and_get_sampling_client()) == pytest.approx(loss_of(client), abs=1e-3)


# -- what goes wrong ------------------------------------------------------------------------------------


def test_a_wrong_key_is_told_at_once(server: LocalServer) -> None:
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-wrong")
    with ThreadPoolExecutor() as pool, pytest.raises(tinker.AuthenticationError, match="TINKER_API_KEY"):
        pool.submit(service.create_sampling_client, base_model="tiny").result(WITHIN)


def test_what_is_not_there(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.NotFoundError, match="unknown model 'nope': this server has tiny"):
        service.create_lora_training_client("nope", rank=4)
    with pytest.raises(tinker.NotFoundError, match="unknown model 'nope'"):
        service.create_sampling_client(base_model="nope")
    for path in (
        "tinker://none/sampler_weights/x",
        "tinker://../weights/x",
        "tinker://a/b",
        "tinker://a/weights/../x",
    ):
        with pytest.raises(tinker.NotFoundError, match=r"x'|/x|a/b|no model's id"):
            service.create_sampling_client(model_path=path)
        with pytest.raises(tinker.NotFoundError):
            client_of(service).load_state(path).result(WITHIN)
    with pytest.raises(tinker.NotFoundError, match="never saved here"):
        service.create_training_client_from_state("tinker://none/weights/x")


def test_adapters_that_cannot_be_made(service: tinker.ServiceClient) -> None:
    for rank in (0, -3, 100_000):
        with pytest.raises(tinker.BadRequestError, match="rank must lie between 1 and"):
            service.create_lora_training_client("tiny", rank=rank)
    client, other = client_of(service), client_of(service, rank=8)
    path = client.save_state("four").result().path
    with pytest.raises(tinker.RequestFailedError, match="another rank"):
        other.load_state(path).result(WITHIN)
    sampler_path = client.save_weights_for_sampler(name="four").result().path
    with pytest.raises(tinker.RequestFailedError, match="no optimizer state"):
        client.load_state_with_optimizer(sampler_path).result(WITHIN)
    for name in ("../up", "a/b", "", "x" * 200):
        with pytest.raises(tinker.BadRequestError, match="can't be a checkpoint's name"):
            client.save_state(name).result(WITHIN)


@pytest.mark.parametrize(
    "told, size, parameters",
    [
        (f"context holds {CONTEXT}", CONTEXT + 1, {"max_tokens": 1}),
        (f"context holds {CONTEXT}", 60, {"max_tokens": 60}),
        ("prompt is empty", 0, {"max_tokens": 1}),
        ("max_tokens must be at least 1", 3, {"max_tokens": 0}),
        ("temperature must be", 3, {"max_tokens": 1, "temperature": -1.0}),
        ("top_p must lie", 3, {"max_tokens": 1, "top_p": 0.0}),
        ("top_k must be", 3, {"max_tokens": 1, "top_k": 0}),
        ("stop tokens must lie in the vocabulary", 3, {"max_tokens": 1, "stop": [100_000]}),
        ("empty stop string", 3, {"max_tokens": 1, "stop": [""]}),
    ],
)
def test_samples_that_cannot_be_drawn(
    service: tinker.ServiceClient, told: str, size: int, parameters: dict[str, Any]
) -> None:
    sampler = service.create_sampling_client(base_model="tiny")
    with pytest.raises(tinker.BadRequestError, match=told):
        sampler.sample(prompt_of(size), 1, types.SamplingParams(**parameters)).result(WITHIN)


def test_tokens_outside_the_vocabulary(service: tinker.ServiceClient) -> None:
    for token in (-1, len(VOCAB)):
        wrong = types.ModelInput.from_ints([3, token])
        with pytest.raises(tinker.BadRequestError, match=f"token {token} is not in the vocabulary"):
            service.create_sampling_client(base_model="tiny").compute_logprobs(wrong).result(WITHIN)


def make(**values: Any) -> Callable[[], list[types.Datum]]:
    return lambda: [datum(seed=1), datum(**values)]


RL = {"weights": None, "logprobs": np.zeros(12, np.float32), "advantages": np.ones(12, np.float32)}


@pytest.mark.parametrize(
    "told, data, loss, config",
    [
        ("datum 1: weights has values that are not finite", make(weights=np.full(12, np.nan, np.float32)), "cross_entropy", None),
        ("datum 0: advantages has values that are not finite", lambda: [datum(**RL | {"advantages": np.full(12, np.inf, np.float32)})], "ppo", None),
        ("datum 1: weights has shape", make(weights=np.ones(11, np.float32)), "cross_entropy", None),
        ("datum 1: weights: one value a position", make(weights=np.ones((12, 2), np.float32)), "cross_entropy", None),
        (f"datum 1: target_tokens: token {len(VOCAB)} is not", make(target_tokens=np.full(12, len(VOCAB))), "cross_entropy", None),
        ("datum 1: target_tokens must be whole numbers", make(target_tokens=np.ones(12, np.float32)), "cross_entropy", None),
        ("datum 1: loss_fn_inputs lacks target_tokens", make(target_tokens=None), "cross_entropy", None),
        ("datum 0: ppo takes .* not weights", make(), "ppo", None),
        ("datum 0: importance_sampling needs logprobs", lambda: [datum(**RL | {"logprobs": None})], "importance_sampling", None),
        (f"datum 1 has {CONTEXT + 1} tokens", make(size=CONTEXT + 1), "cross_entropy", None),
        ("datum 1 is empty", make(size=0, target_tokens=np.empty(0, np.int64)), "cross_entropy", None),
        ("unknown loss_fn 'cispo'", lambda: [datum(**RL)], "cispo", None),
        ("'clip' is no setting of ppo", lambda: [datum(**RL)], "ppo", {"clip": 1.0}),
        ("'clip_low_threshold' is no setting of cross_entropy", make(), "cross_entropy", {"clip_low_threshold": 1.0}),
        ("clip_low_threshold <= clip_high_threshold", lambda: [datum(**RL)], "ppo", {"clip_low_threshold": 2.0}),
    ],
)  # fmt: skip
def test_data_that_cannot_be_trained_on(
    service: tinker.ServiceClient, told: str, data: Callable[[], list[types.Datum]], loss: Any, config: Any
) -> None:
    client = client_of(service)
    with pytest.raises(tinker.BadRequestError, match=told):
        client.forward_backward(data(), loss, loss_fn_config=config).result(WITHIN)
    with pytest.raises(tinker.RequestFailedError, match="without a gradient"):
        client.optim_step(types.AdamParams()).result(WITHIN)
    assert train(client) > 0  # and goes on


def test_what_shows_only_while_it_is_computed(service: tinker.ServiceClient) -> None:
    client = client_of(service)
    far = datum(**RL | {"logprobs": np.full(12, -500, np.float32)})
    with pytest.raises(tinker.RequestFailedError, match="ratio is not finite") as raised:
        client.forward_backward([far], "ppo").result(WITHIN)
    assert raised.value.category is types.RequestErrorCategory.User
    with pytest.raises(tinker.BadRequestError, match="learning_rate must be"):
        client.optim_step(types.AdamParams(learning_rate=-1.0)).result(WITHIN)
