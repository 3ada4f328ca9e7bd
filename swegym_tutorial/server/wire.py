"""Between the wire and the records: JSON and protobuf requests in, JSON and protobuf answers out.

The messages are those of the installed `tinker` SDK's own protobuf module. Knows nothing of HTTP or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from tinker.proto import tinker_public_pb2 as pb

from .records import (
    AdamStep,
    Datum,
    LoraSpec,
    LossName,
    SampledSequence,
    SampleJob,
    Samples,
    TrainBatch,
    Trained,
    UserError,
)

MASKED = -99999.0  # the SDK's mark for "no log-probability here" in a top-k matrix
_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
# Each loss's inputs beside target_tokens; cross_entropy's weights may be left out.
_INPUTS = {
    LossName.CROSS_ENTROPY: {"weights"},
    LossName.IMPORTANCE_SAMPLING: {"logprobs", "advantages"},
    LossName.PPO: {"logprobs", "advantages"},
}
_SAMPLE_EXTRAS = (
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "record_stability_info",
)


class Fields:
    """A JSON object whose fields are read by type. Raises UserError that names the field."""

    def __init__(self, values: Any, what: str = "the request") -> None:
        if not isinstance(values, dict):
            raise UserError(f"{what} must be a JSON object")
        self.values: dict[str, Any] = values
        self._what = what

    @classmethod
    def parse(cls, body: bytes) -> Fields:
        try:
            return cls(orjson.loads(body) if body else {})
        except orjson.JSONDecodeError as error:
            raise UserError(f"the request is not valid JSON: {error}") from error

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def text(self, name: str) -> str:
        return self._read(name, str, "a text", None)

    def integer(self, name: str, default: int | None = None) -> int:
        return self._read(name, int, "a whole number", default)

    def number(self, name: str, default: float | None = None) -> float:
        return float(self._read(name, (int, float), "a number", default))

    def flag(self, name: str, default: bool | None = None) -> bool:
        return self._read(name, bool, "true or false", default)

    def inner(self, name: str) -> Fields:
        return Fields(self.values.get(name), f"{self._what}'s {name}")

    def items(self, name: str) -> list[Any]:
        return self._read(name, list, "a list", None)

    def _read(self, name: str, kind: Any, told: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise UserError(f"{self._what} lacks {name}")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"{self._what}'s {name} must be {told}, not {value!r}")
        return value


# -- requests ------------------------------------------------------------------------------------------


def lora_spec(fields: Fields) -> LoraSpec:
    """Read create_model's adapter. Raises UserError for what the server can't honour."""
    if not fields.has("lora_config"):
        raise UserError("lora_config is missing: this server trains LoRA adapters only")
    if fields.has("optimizer_config") and fields.inner("optimizer_config").text("type") != "adamw":
        raise UserError("this server has one optimizer, adamw")
    config = fields.inner("lora_config")
    return LoraSpec(
        rank=config.integer("rank"),
        train_attn=config.flag("train_attn", True),
        train_mlp=config.flag("train_mlp", True),
        train_unembed=config.flag("train_unembed", True),
        seed=config.integer("seed") if config.has("seed") else None,
    )


def adam_step(fields: Fields) -> AdamStep:
    if fields.has("optimizer_params"):
        raise UserError("this server has one optimizer, adamw, whose parameters are adam_params")
    given = fields.inner("adam_params")
    defaults = AdamStep()
    names = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
    return AdamStep(**{name: given.number(name, getattr(defaults, name)) for name in names})


def sample_job(fields: Fields) -> SampleJob:
    for name in _SAMPLE_EXTRAS:
        if fields.values.get(name):
            raise UserError(f"this server does not support {name}")
    given = fields.inner("sampling_params")
    stop = given.values.get("stop")
    stops = [stop] if isinstance(stop, str) else stop
    tokens: frozenset[int] | None = None
    strings: tuple[str, ...] = ()
    if stops is not None:
        if not isinstance(stops, list):
            raise UserError("stop must be a text, a list of texts or a list of tokens")
        strings = tuple(s for s in stops if isinstance(s, str))
        tokens = frozenset(s for s in stops if isinstance(s, int))
        if (strings and tokens) or len(strings) + sum(isinstance(s, int) for s in stops) != len(stops):
            raise UserError("stop must be a text, a list of texts or a list of tokens")
    return SampleJob(
        prompt=_json_tokens(fields.inner("prompt")),
        max_tokens=given.integer("max_tokens") if given.has("max_tokens") else None,
        num_samples=fields.integer("num_samples", 1),
        temperature=given.number("temperature", 1.0),
        top_k=given.integer("top_k", -1),
        top_p=given.number("top_p", 1.0),
        seed=given.integer("seed") if given.has("seed") else None,
        # Stop strings come on top of the end of the sequence; given tokens, even none, take its place.
        stop_tokens=None if strings else tokens,
        stop_strings=strings,
        prompt_logprobs=fields.flag("prompt_logprobs", False),
        topk_prompt_logprobs=fields.integer("topk_prompt_logprobs", 0),
        prompt_logprobs_last_n=(
            fields.integer("prompt_logprobs_last_n") if fields.has("prompt_logprobs_last_n") else None
        ),
    )


def train_batch_from_json(given: Fields, backward: bool) -> TrainBatch:
    data = []
    loss = _loss_name(given.text("loss_fn"))
    for n, values in enumerate(given.items("data")):
        datum = Fields(values, f"datum {n}")
        inputs = datum.inner("loss_fn_inputs")
        arrays = {name: _json_array(inputs.inner(name), f"datum {n}: {name}") for name in inputs.values}
        data.append(_datum(n, _json_tokens(datum.inner("model_input")), arrays, loss))
    config = given.inner("loss_fn_config").values if given.has("loss_fn_config") else {}
    return _train_batch(data, loss, config, backward)


def train_batch_from_proto(body: bytes) -> tuple[str, int, TrainBatch]:
    """Return the request's model_id, seq_id and batch."""
    try:
        message = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise UserError(f"the request is not a valid ForwardBackwardRequest: {error}") from error
    loss = _loss_name(message.loss_fn)
    data = []
    for n, given in enumerate(message.data):
        pieces = []
        for chunk in given.model_input:
            if chunk.WhichOneof(chunk.DESCRIPTOR.oneofs[0].name) != "encoded_text":
                raise UserError(f"datum {n}: this server takes tokens only, no images or sound")
            pieces.append(np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32))
        tokens = np.concatenate(pieces).astype(np.int64) if pieces else np.empty(0, np.int64)
        arrays = {name: _proto_array(t, f"datum {n}: {name}") for name, t in given.loss_fn_inputs.items()}
        data.append(_datum(n, tokens, arrays, loss))
    config = dict(message.loss_fn_config)
    # Newer SDKs send the configuration a second time in field 7, where alone it can hold texts.
    second = sum(field.field_number == 7 for field in UnknownFieldSet(message))
    if second > len(config):
        raise UserError("this server takes numbers in loss_fn_config, no texts")
    return message.model_id, message.seq_id, _train_batch(data, loss, config, not message.forward_only)


def _loss_name(name: str) -> LossName:
    if name not in set(LossName):
        raise UserError(f"unknown loss_fn {name!r}: this server has {', '.join(LossName)}")
    return LossName(name)


def _train_batch(data: list[Datum], loss: LossName, config: Mapping[str, Any], backward: bool) -> TrainBatch:
    known = (
        {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"} if loss is LossName.PPO else {}
    )
    for name, value in config.items():
        if name not in known:
            told = f"which has {', '.join(known)}" if known else "which has none"
            raise UserError(f"loss_fn_config: {name!r} is no setting of {loss}, {told}")
        if not isinstance(value, (int, float)):
            raise UserError(f"loss_fn_config: {name} must be a number, not {value!r}")
    return TrainBatch(data, loss, backward=backward, **{known[k]: float(v) for k, v in config.items()})


def _datum(n: int, tokens: np.ndarray, arrays: dict[str, np.ndarray], loss: LossName) -> Datum:
    targets = arrays.pop("target_tokens", None)
    if targets is None:
        raise UserError(f"datum {n}: loss_fn_inputs lacks target_tokens")
    if targets.dtype.kind != "i":
        raise UserError(f"datum {n}: target_tokens must be whole numbers")
    expected = _INPUTS[loss]
    if unknown := set(arrays) - expected:
        raise UserError(
            f"datum {n}: {loss} takes target_tokens, {', '.join(sorted(expected))}, not {', '.join(sorted(unknown))}"
        )
    if loss is not LossName.CROSS_ENTROPY and (missing := expected - set(arrays)):
        raise UserError(f"datum {n}: {loss} needs {', '.join(sorted(missing))}")
    with np.errstate(over="ignore"):
        floats = {name: values.astype(np.float32) for name, values in arrays.items()}
    return Datum(tokens, targets.astype(np.int64), **floats)


def _json_tokens(model_input: Fields) -> np.ndarray:
    tokens: list[int] = []
    for values in model_input.items("chunks"):
        chunk = Fields(values, "a chunk")
        if chunk.values.get("type", "encoded_text") != "encoded_text":
            raise UserError("this server takes tokens only, no images or sound")
        tokens += chunk.items("tokens")
    return _array(tokens, np.int64, "model_input")


def _json_array(tensor: Fields, what: str) -> np.ndarray:
    if tensor.has("sparse_crow_indices"):
        raise UserError(f"{what}: this server takes no sparse tensors")
    dtype = tensor.text("dtype")
    if dtype not in ("float32", "int64"):
        raise UserError(f"{what}: unknown dtype {dtype!r}")
    values = _array(tensor.items("data"), np.dtype(dtype), what)
    return _shaped(values, tensor.items("shape") if tensor.has("shape") else None, what)


def _proto_array(tensor: pb.Tensor, what: str) -> np.ndarray:
    if tensor.HasField("sparse_csr"):
        raise UserError(f"{what}: this server takes no sparse tensors")
    if tensor.dtype not in _DTYPES:
        raise UserError(f"{what}: unknown dtype {tensor.dtype}")
    dtype = np.dtype(_DTYPES[tensor.dtype])
    if len(tensor.dense) % dtype.itemsize:
        raise UserError(f"{what}: {len(tensor.dense)} bytes are no whole number of {dtype} values")
    return _shaped(np.frombuffer(tensor.dense, dtype=dtype), list(tensor.shape) or None, what)


def _array(values: list[Any], dtype: Any, what: str) -> np.ndarray:
    try:
        return np.asarray(values, dtype=dtype).reshape(-1)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{what} must be a flat list of numbers: {error}") from error


def _shaped(values: np.ndarray, shape: list[Any] | None, what: str) -> np.ndarray:
    if shape is None:
        return values
    if not all(isinstance(size, int) for size in shape) or int(np.prod(shape)) != values.size:
        raise UserError(f"{what}: {values.size} values don't fill the shape {shape}")
    if len(shape) != 1:
        raise UserError(f"{what}: one value a position is needed, and the shape is {shape}")
    return values


# -- answers -------------------------------------------------------------------------------------------


def encode_proto(result: Samples | Trained) -> bytes:
    return (
        _samples_proto(result) if isinstance(result, Samples) else _trained_proto(result)
    ).SerializeToString()


def encode_json(result: Samples | Trained) -> dict[str, Any]:
    """The older encoding, for clients that don't accept protobuf. NaN becomes null."""
    if isinstance(result, Trained):
        outputs = [
            {"logprobs": {"data": values.tolist(), "dtype": "float32", "shape": [len(values)]}}
            for values in result.logprobs
        ]
        return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": result.metrics}
    answer: dict[str, Any] = {"type": "sample", "sequences": [_sequence_json(s) for s in result.sequences]}
    if result.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [None if np.isnan(v) else v for v in result.prompt_logprobs.tolist()]
    if result.topk_ids is not None and result.topk_logprobs is not None:
        rows = zip(result.topk_ids.tolist(), result.topk_logprobs.tolist(), strict=True)
        answer["topk_prompt_logprobs"] = [
            None if values[0] == MASKED else list(zip(ids, values, strict=True)) for ids, values in rows
        ]
    return answer


def _sequence_json(sequence: SampledSequence) -> dict[str, Any]:
    return {
        "tokens": sequence.tokens.tolist(),
        "logprobs": sequence.logprobs.tolist(),
        "stop_reason": "stop" if sequence.stopped else "length",
    }


def _samples_proto(result: Samples) -> Any:
    message = pb.SampleResponse()
    for given in result.sequences:
        sequence = message.sequences.add()
        sequence.tokens = given.tokens.tobytes()
        sequence.logprobs = given.logprobs.tobytes()
        sequence.stop_reason = pb.STOP_REASON_STOP if given.stopped else pb.STOP_REASON_LENGTH
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs.tobytes()
    if result.topk_ids is not None and result.topk_logprobs is not None:
        topk = message.topk_prompt_logprobs
        topk.token_ids = result.topk_ids.tobytes()
        topk.logprobs = result.topk_logprobs.tobytes()
        topk.k = result.topk_ids.shape[1]
        # Called prompt_length by older SDKs and length by newer ones.
        setattr(topk, topk.DESCRIPTOR.fields_by_number[4].name, result.topk_ids.shape[0])
    return message


def _trained_proto(result: Trained) -> Any:
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in result.metrics.items():
        message.metrics[name] = value
    record = message.loss_fn_outputs.add()
    record.num_datums = len(result.logprobs)
    tensor = record.fields["logprobs"]
    tensor.dtype = pb.DTYPE_FLOAT32
    tensor.data = np.concatenate(result.logprobs).astype(np.float32).tobytes()
    sizes = np.array([0, *(values.nbytes for values in result.logprobs)], dtype=np.int64)
    tensor.offsets = np.cumsum(sizes).astype(np.int64).tobytes()
    return message
