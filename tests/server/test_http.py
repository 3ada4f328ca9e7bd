"""The wire itself: requests that are sent twice, other encodings, limits, and answers that are still to come."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from tinker.proto import tinker_public_pb2 as pb

from swegym_tutorial.server.process import LocalServer
from swegym_tutorial.server.transport import BODY_LIMIT

TOKENS = list(range(2, 14))


class Wire:
    """Plain calls, as a client without an SDK would make them."""

    def __init__(self, server: LocalServer) -> None:
        self.http = httpx.Client(
            base_url=f"{server.url}/api/v1", headers={"X-API-Key": server.key}, timeout=60, trust_env=False
        )

    def post(self, path: str, **fields: Any) -> dict[str, Any]:
        answer = self.http.post(path, json=fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def result(self, answer: dict[str, Any]) -> dict[str, Any]:
        while True:
            told = self.http.post("retrieve_future", json={"request_id": answer["request_id"]})
            if told.status_code != 408:
                return told.json()

    def model(self) -> str:
        session = self.post("create_session", tags=[], sdk_version="none")["session_id"]
        config = {"rank": 4, "seed": 1}
        answer = self.post(
            "create_model", session_id=session, model_seq_id=0, base_model="tiny", lora_config=config
        )
        assert self.result(answer)["model_id"] == answer["model_id"]
        return answer["model_id"]

    def forward_backward(self, model: str, seq_id: int) -> dict[str, Any]:
        inputs = {"target_tokens": {"data": TOKENS[1:], "dtype": "int64", "shape": [11]}}
        datum = {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:-1]}]},
            "loss_fn_inputs": inputs,
        }
        given = {"data": [datum], "loss_fn": "cross_entropy"}
        return self.post("forward_backward", model_id=model, seq_id=seq_id, forward_backward_input=given)

    def sampler(self) -> str:
        session = self.post("create_session")["session_id"]
        told = self.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="tiny"
        )
        return told["sampling_session_id"]

    def sample(self, sampler: str, seq_id: int, num_samples: int = 1, **parameters: Any) -> dict[str, Any]:
        return self.post(
            "asample",
            sampling_session_id=sampler,
            seq_id=seq_id,
            prompt={"chunks": [{"type": "encoded_text", "tokens": TOKENS}]},
            sampling_params={"max_tokens": 5, **parameters},
            num_samples=num_samples,
        )


@pytest.fixture(scope="module")
def wire(server: LocalServer) -> Iterator[Wire]:
    wire = Wire(server)
    yield wire
    wire.http.close()


def test_a_request_that_is_sent_twice_is_done_once(wire: Wire) -> None:
    model = wire.model()
    assert wire.forward_backward(model, 1) == wire.forward_backward(model, 1)
    adam = {"learning_rate": 0.1}
    first = wire.post("optim_step", model_id=model, seq_id=2, adam_params=adam)
    norm = wire.result(first)["metrics"]["grad_norm"]
    assert wire.post("optim_step", model_id=model, seq_id=2, adam_params=adam) == first
    other = wire.model()
    wire.forward_backward(other, 1)
    once = wire.post("optim_step", model_id=other, seq_id=2, adam_params=adam)
    assert wire.result(once)["metrics"]["grad_norm"] == norm  # and not that of two gradients
    sampler = wire.sampler()
    assert wire.sample(sampler, 1) == wire.sample(sampler, 1) != wire.sample(sampler, 2)


def test_an_answer_can_be_fetched_again(wire: Wire) -> None:
    answer = wire.sample(wire.sampler(), 1)
    assert wire.result(answer) == wire.result(answer)


def test_json_and_protobuf_say_the_same(wire: Wire) -> None:
    answer = wire.sample(wire.sampler(), 1, num_samples=2, seed=3, stop=[])
    assert len(answer["sample_sequence_ids"]) == 2
    plain = wire.result(answer)
    told = wire.http.post(
        "retrieve_future",
        json={"request_id": answer["request_id"]},
        headers={"Accept": "application/x-protobuf"},
    )
    assert told.headers["content-type"] == "application/x-protobuf"
    message = pb.SampleResponse.FromString(told.content)
    for sequence, given in zip(message.sequences, plain["sequences"], strict=True):
        assert np.frombuffer(sequence.tokens, np.int32).tolist() == given["tokens"]
        assert np.frombuffer(sequence.logprobs, np.float32).tolist() == pytest.approx(given["logprobs"])
    model = wire.model()
    spoken = wire.result(wire.forward_backward(model, 1))
    request = pb.ForwardBackwardRequest(model_id=model, seq_id=2, loss_fn="cross_entropy")
    datum = request.data.add()
    for part in (TOKENS[:4], TOKENS[4:-1]):
        datum.model_input.add().encoded_text.tokens = np.array(part, np.int32).tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.array(TOKENS[1:]).tobytes(), pb.DTYPE_INT64
    body = zstandard.ZstdCompressor().compress(request.SerializeToString())
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
    packed = wire.result(wire.http.post("forward_backward", content=body, headers=headers).json())
    assert packed == spoken
    assert len(spoken["loss_fn_outputs"][0]["logprobs"]["data"]) == 11


def test_what_is_not_understood_is_a_clear_error_and_never_a_500(wire: Wire) -> None:
    model, headers = wire.model(), {"Content-Type": "application/x-protobuf"}
    bodies: list[tuple[str, bytes, dict[str, str], int, str]] = [
        ("optim_step", b"{", {}, 400, "not valid JSON"),
        ("optim_step", b"[]", {}, 400, "must be a JSON object"),
        ("optim_step", b"{}", {}, 400, "lacks model_id"),
        ("optim_step", json.dumps({"model_id": model, "seq_id": "x", "adam_params": {}}).encode(), {}, 400, "whole number"),
        ("optim_step", json.dumps({"model_id": "gone", "seq_id": 1}).encode(), {}, 404, "without a heartbeat"),
        ("forward_backward", b"\xff\xff\xff", headers, 400, "not a valid ForwardBackwardRequest"),
        ("forward_backward", b"x", {"Content-Encoding": "zstd"}, 400, "not valid zstd"),
        ("forward_backward", b"x", {"Content-Encoding": "br"}, 415, "takes zstd"),
        ("asample", b"0" * (BODY_LIMIT + 1), {}, 413, "larger than 64 MiB"),
        ("asample", zstandard.compress(b"0" * (BODY_LIMIT + 1)), {"Content-Encoding": "zstd"}, 413, "unpacks to more"),
        ("nothing", b"", {}, 404, "has no POST /api/v1/nothing"),
        ("session_heartbeat", json.dumps({"session_id": "gone"}).encode(), {}, 410, "unknown session"),
    ]  # fmt: skip
    for path, body, more, status, told in bodies:
        answer = wire.http.post(path, content=body, headers=more)
        assert (answer.status_code, told in answer.json()["detail"]) == (status, True), answer.text
    told = wire.result({"request_id": uuid.uuid4().hex})
    assert told["category"] == "user" and "unknown request" in told["error"]
    assert wire.http.get("samplers/none").status_code == 404


def test_options_that_the_server_lacks_are_refused(wire: Wire) -> None:
    sampler = wire.sampler()
    for name, value in (
        ("topk_sample_logprobs", 2),
        ("prompt_alt_tokens_k", 1),
        ("record_stability_info", True),
    ):
        fields = {
            "sampling_session_id": sampler,
            "seq_id": 1,
            "prompt": {"chunks": []},
            "sampling_params": {},
        }
        answer = wire.http.post("asample", json=fields | {name: value})
        assert answer.status_code == 400 and f"does not support {name}" in answer.json()["detail"]
    model = wire.model()
    answer = wire.http.post(
        "optim_step", json={"model_id": model, "seq_id": 1, "optimizer_params": {"type": "dimuon"}}
    )
    assert answer.status_code == 400 and "adamw" in answer.json()["detail"]
    image = {"type": "image", "data": "", "format": "png"}
    fields = {
        "sampling_session_id": sampler,
        "seq_id": 1,
        "prompt": {"chunks": [image]},
        "sampling_params": {},
    }
    answer = wire.http.post("asample", json=fields)
    assert answer.status_code == 400 and "tokens only" in answer.json()["detail"]


def test_without_the_key_nothing_is_answered(wire: Wire) -> None:
    for key in ("", "tml-other", "\N{SNOWMAN}".encode()):
        answer = wire.http.get("healthz", headers={"X-API-Key": key})
        assert answer.status_code == 401 and "TINKER_API_KEY" in answer.json()["detail"]
    assert wire.http.get("healthz").status_code == 200


def test_a_model_is_unloaded_and_its_id_is_gone(wire: Wire) -> None:
    model = wire.model()
    assert wire.result(wire.post("unload_model", model_id=model))["type"] == "unload_model"
    answer = wire.http.post("get_info", json={"model_id": model})
    assert answer.status_code == 404 and model in answer.json()["detail"]
