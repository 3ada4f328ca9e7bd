"""The whole flow through a `tinker` SDK, whichever this interpreter has: `python sdk_flow.py URL KEY MODEL`.

Imports only tinker and numpy, so that it runs in an environment with another release than the tests' own. Prints
"ok <release>" when everything held.
"""

import sys

import numpy as np
import tinker
from tinker import types


def tensor(values, dtype):
    return types.TensorData.from_numpy(np.asarray(values, dtype))


def datum(tokens, **values):
    inputs = {"target_tokens": tensor(tokens[1:], np.int64)}
    inputs |= {name: tensor(given, np.float32) for name, given in values.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def logprobs_of(answer):
    return [output["logprobs"].to_numpy() for output in answer.loss_fn_outputs]


def settled(client):
    """Newer releases hand back the future of a client where older ones hand back the client."""
    return client.result() if hasattr(client, "result") else client


def main(url, key, model):
    service = tinker.ServiceClient(base_url=url, api_key=key)
    assert model in [m.model_name for m in service.get_server_capabilities().supported_models]
    trainer = settled(
        service.create_lora_training_client(base_model=model, rank=4, seed=7, train_unembed=False)
    )
    assert trainer.get_info().model_data.model_name == model

    prompt = list(range(3, 23))
    base = settled(service.create_sampling_client(base_model=model))
    parameters = types.SamplingParams(max_tokens=8, temperature=1.0, seed=3, stop=[])
    answer = base.sample(types.ModelInput.from_ints(prompt), 2, parameters).result()
    assert [len(s.tokens) for s in answer.sequences] == [8, 8] and answer.sequences[0].stop_reason == "length"
    tokens = prompt + list(answer.sequences[0].tokens)
    sampled = np.array(answer.sequences[0].logprobs)
    scored = np.array(base.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:], np.float32)
    assert np.abs(scored[-8:] - sampled).max() < 1e-3

    ones = np.ones(len(tokens) - 1)
    supervised = [datum(tokens, weights=ones)]
    fresh = logprobs_of(trainer.forward(supervised, "cross_entropy").result())[0]
    assert np.abs(fresh - scored).max() < 1e-3
    reinforced = [datum(tokens, logprobs=fresh, advantages=ones / 10)]
    first = trainer.forward_backward(supervised, "cross_entropy").result()
    assert abs(first.metrics["loss:sum"] + fresh.sum()) < 1e-2
    trainer.forward_backward(reinforced, "importance_sampling").result()
    clip = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
    trainer.forward_backward(reinforced, "ppo", loss_fn_config=clip).result()
    stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)).result()
    assert stepped.metrics["grad_norm"] > 0
    trained = logprobs_of(trainer.forward(supervised, "cross_entropy").result())[0]
    assert trained.sum() > fresh.sum()

    named = trainer.save_weights_for_sampler(name="named").result()
    for sampler in (
        settled(service.create_sampling_client(model_path=named.path)),
        settled(trainer.save_weights_and_get_sampling_client()),
    ):
        told = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
        assert np.abs(np.array(told[1:], np.float32) - trained).max() < 1e-3

    state = trainer.save_state("state").result()
    trainer.forward_backward(supervised, "cross_entropy").result()
    trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    further = logprobs_of(trainer.forward(supervised, "cross_entropy").result())[0]
    trainer.load_state_with_optimizer(state.path).result()
    assert (
        np.abs(logprobs_of(trainer.forward(supervised, "cross_entropy").result())[0] - trained).max() < 1e-6
    )
    resumed = settled(service.create_training_client_from_state_with_optimizer(state.path))
    resumed.forward_backward(supervised, "cross_entropy").result()
    resumed.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    assert (
        np.abs(logprobs_of(resumed.forward(supervised, "cross_entropy").result())[0] - further).max() < 1e-6
    )
    begun = settled(service.create_training_client_from_state(state.path))
    assert np.abs(logprobs_of(begun.forward(supervised, "cross_entropy").result())[0] - trained).max() < 1e-6

    try:
        base.sample(types.ModelInput.from_ints([1] * 100_000), 1, types.SamplingParams(max_tokens=4)).result()
    except tinker.TinkerError as error:
        assert "context" in str(error)
    else:
        raise AssertionError("a prompt of 100,000 tokens was taken")
    print("ok", tinker.__version__)


if __name__ == "__main__":
    main(*sys.argv[1:])
