"""The Tinker protocol over HTTP: every call of the `tinker` SDK that training, sampling and checkpoints need.

Work is queued and answered at once with a request id; `retrieve_future` waits for the answer. What is wrong with a
request is told at once with a status of 4xx, which the SDK raises as its own exception, or where it shows only while
the work is done, as a failed future of the category "user". Knows nothing of torch.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from . import wire
from .connections import Connections
from .engine import Engine, Outcome, Work
from .futures import Futures
from .models import Models, Version
from .records import Samples, TrainBatch, Trained, UserError
from .sessions import Model, SamplerEntry, Sessions
from .store import EPHEMERAL, SAMPLER_WEIGHTS, WEIGHTS, Address
from .transport import KeyCheck, http_error, read_body, read_fields, reply, user_error
from .wire import Fields

POLL_PATIENCE = 20.0  # seconds that retrieve_future waits; the SDK gives up a call after 45
SWEEP_PERIOD = 5.0  # seconds between looks for sessions that ended
PROTOBUF = "application/x-protobuf"


def make_app(models: Models, engine: Engine, key: str, patience: float) -> ASGIApp:
    """Return the ASGI app. key: what clients must send as X-API-Key. patience: sessions end after this silence."""
    sessions = Sessions(patience)
    api, connections = _Api(models, engine, sessions, Futures()), Connections(models, sessions)
    posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "asample": api.asample,
        "retrieve_future": api.retrieve_future,
        "forward_backward": api.forward_backward,
        "forward": api.forward,
        "optim_step": api.optim_step,
        "session_heartbeat": connections.session_heartbeat,
        "telemetry": connections.telemetry,
        "client/config": connections.client_config,
        "client/dynamic_config": connections.client_dynamic_config,
        "create_session": connections.create_session,
        "create_model": api.create_model,
        "unload_model": api.unload_model,
        "get_info": api.get_info,
        "create_sampling_session": api.create_sampling_session,
        "save_weights": api.save_weights,
        "save_weights_for_sampler": api.save_weights_for_sampler,
        "load_weights": api.load_weights,
        "weights_info": api.weights_info,
    }
    routes = [Route(f"/api/v1/{path}", handler, methods=["POST"]) for path, handler in posts.items()]
    routes += [
        Route("/api/v1/get_server_capabilities", connections.get_server_capabilities, methods=["GET"]),
        Route("/api/v1/samplers/{id}", api.get_sampler, methods=["GET"]),
        Route("/api/v1/healthz", connections.healthz, methods=["GET"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={UserError: user_error, HTTPException: http_error},
        lifespan=api.lifespan,
    )
    return KeyCheck(app, key)


class _Api:
    """The endpoints. Each takes a request and returns its answer."""

    def __init__(self, models: Models, engine: Engine, sessions: Sessions, futures: Futures) -> None:
        self._models = models
        self._engine = engine
        self._sessions = sessions
        self._futures = futures

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(self._sweep())
        yield
        sweeper.cancel()

    # -- training ----------------------------------------------------------------------------------------

    async def create_model(self, request: Request) -> Response:
        fields = await read_fields(request)
        session, id, key = self._new_model(fields)
        if known := self._futures.known(key):
            return reply({"request_id": known, "model_id": id})
        base = fields.text("base_model")
        self._models.base(base)
        spec = wire.lora_spec(fields)
        self._sessions.add_model(Model(id, session, base, spec))
        work = _answering({"type": "create_model", "model_id": id}, self._models.create, id, base, spec)
        request_id = self._submit(key, session, id, work)
        return reply({"request_id": request_id, "model_id": id})

    async def unload_model(self, request: Request) -> Response:
        model = self._sessions.model((await read_fields(request)).text("model_id"))
        self._sessions.drop_model(model.id)
        work = _answering({"type": "unload_model", "model_id": model.id}, self._models.release, model.id)
        return reply({"request_id": self._submit(("unload", model.id), model.session, model.id, work)})

    async def get_info(self, request: Request) -> Response:
        model = self._sessions.model((await read_fields(request)).text("model_id"))
        base = self._models.base(model.base)
        data = {"arch": base.architecture, "model_name": model.base, "tokenizer_id": str(base.folder)}
        return reply(
            {
                "type": "get_info",
                "model_id": model.id,
                "model_data": data,
                "model_name": model.base,
                "is_lora": True,
                "lora_rank": model.spec.rank,
            }
        )

    async def forward_backward(self, request: Request) -> Response:
        body = await read_body(request)
        if PROTOBUF in request.headers.get("content-type", ""):
            model_id, seq_id, batch = wire.train_batch_from_proto(body)
            return self._train(self._sessions.model(model_id), seq_id, batch)
        return self._train_from_json(body, "forward_backward_input", backward=True)

    async def forward(self, request: Request) -> Response:
        return self._train_from_json(await read_body(request), "forward_input", backward=False)

    def _train_from_json(self, body: bytes, name: str, backward: bool) -> Response:
        fields = Fields.parse(body)
        model = self._sessions.model(fields.text("model_id"))
        return self._train(
            model, fields.integer("seq_id"), wire.train_batch_from_json(fields.inner(name), backward)
        )

    def _train(self, model: Model, seq_id: int, batch: TrainBatch) -> Response:
        self._models.base(model.base).limits.check_train(batch)
        return self._do(model, seq_id, partial(self._models.train, model.id, batch))

    async def optim_step(self, request: Request) -> Response:
        fields = await read_fields(request)
        model = self._sessions.model(fields.text("model_id"))
        adam = wire.adam_step(fields)

        def work() -> Outcome:
            return {"type": "optim_step", "metrics": self._models.step(model.id, adam)}

        return self._do(model, fields.integer("seq_id"), work)

    # -- checkpoints -------------------------------------------------------------------------------------

    async def save_weights(self, request: Request) -> Response:
        fields = await read_fields(request)
        model = self._sessions.model(fields.text("model_id"))
        address = Address(model.id, WEIGHTS, fields.text("path"))
        save = partial(self._models.save, overwrite=fields.flag("overwrite", False), expires=_expiry(fields))
        answer = {"type": "save_weights", "path": str(address)}
        return self._do(
            model, fields.integer("seq_id"), _answering(answer, save, model.id, address, optimizer=True)
        )

    async def save_weights_for_sampler(self, request: Request) -> Response:
        """Under a name, to be sampled from by its path; or without one, as a sampling session of its own."""
        fields = await read_fields(request)
        model = self._sessions.model(fields.text("model_id"))
        if fields.has("kind") and fields.text("kind") != "snapshot":
            raise UserError(f"this server has snapshots only, not {fields.text('kind')!r}")
        seq_id = fields.integer("seq_id")
        if known := self._futures.known((model.id, seq_id)):
            return reply({"request_id": known})
        named = fields.has("path")
        id = uuid.uuid4().hex
        address = (
            Address(model.id, SAMPLER_WEIGHTS, fields.text("path"))
            if named
            else Address(model.id, EPHEMERAL, id)
        )
        answer: dict[str, Any] = {"type": "save_weights_for_sampler"}
        answer |= {"path": str(address)} if named else {"sampling_session_id": id}
        save = partial(self._models.save, optimizer=False, expires=_expiry(fields))
        if not named:
            version = Version(self._models.base(model.base), address)
            self._sessions.add_sampler(SamplerEntry(id, model.session, model.base, version))
        return self._do(model, seq_id, _answering(answer, save, model.id, address))

    async def load_weights(self, request: Request) -> Response:
        """Into a model that is there; or, told a session instead, into a new one of the checkpoint's shape."""
        fields = await read_fields(request)
        address = Address.parse(fields.text("path"))
        optimizer = fields.flag("optimizer", False)
        found = self._models.store.describe(address)
        answer: dict[str, Any] = {"type": "load_weights", "path": str(address)}
        if not fields.has("session_id"):
            model = self._sessions.model(fields.text("model_id"))
            work = _answering(answer, self._models.load, model.id, address, optimizer)
            return self._do(model, fields.integer("seq_id"), work)
        session, id, key = self._new_model(fields)
        if known := self._futures.known(key):
            return reply({"request_id": known, "model_id": id})
        base = fields.text("base_model") if fields.has("base_model") else found.base_model
        self._models.base(base)
        self._sessions.add_model(Model(id, session, base, found.spec))
        answer["model_id"] = id
        work = _answering(answer, self._models.create_from, id, base, address, optimizer)
        return reply({"request_id": self._submit(key, session, id, work), "model_id": id})

    async def weights_info(self, request: Request) -> Response:
        found = self._models.store.describe(Address.parse((await read_fields(request)).text("tinker_path")))
        return reply(
            {
                "base_model": found.base_model,
                "is_lora": True,
                "lora_rank": found.spec.rank,
                "train_attn": found.spec.train_attn,
                "train_mlp": found.spec.train_mlp,
                "train_unembed": found.spec.train_unembed,
            }
        )

    # -- sampling ----------------------------------------------------------------------------------------

    async def create_sampling_session(self, request: Request) -> Response:
        fields = await read_fields(request)
        session = self._sessions.hear(fields.text("session_id"))
        id = f"{session.id}:sample:{fields.integer('sampling_session_seq_id')}"
        base, version = self._version(fields)
        self._sessions.add_sampler(SamplerEntry(id, session.id, base, version))
        return reply({"type": "create_sampling_session", "sampling_session_id": id})

    async def get_sampler(self, request: Request) -> Response:
        sampler = self._sessions.sampler(request.path_params["id"])
        answer = {"sampler_id": sampler.id, "base_model": sampler.base}
        if sampler.version.address is not None:
            answer["model_path"] = str(sampler.version.address)
        return reply(answer)

    async def asample(self, request: Request) -> Response:
        fields = await read_fields(request)
        sampler = self._sessions.sampler(fields.text("sampling_session_id"))
        key = (sampler.id, fields.integer("seq_id"))
        job = wire.sample_job(fields)
        request_id = self._futures.known(key)
        if request_id is None:
            sampler.version.base.limits.check_sample(job)
            request_id = self._futures.open(key, sampler.session)
            self._engine.sample(sampler.version, job, self._finisher(request_id))
        ids = [f"{request_id}-{n}" for n in range(job.num_samples)]
        return reply({"request_id": request_id, "sample_sequence_ids": ids})

    def _version(self, fields: Fields) -> tuple[str, Version]:
        """Return what is to be sampled from, and its base model's name."""
        if not fields.has("model_path"):
            name = fields.text("base_model")
            return name, Version(self._models.base(name), None)
        address = Address.parse(fields.text("model_path"))
        name = self._models.store.describe(address).base_model
        return name, Version(self._models.base(name), address)

    # -- futures -----------------------------------------------------------------------------------------

    async def retrieve_future(self, request: Request) -> Response:
        request_id = (await read_fields(request)).text("request_id")
        try:
            outcome = await self._futures.fetch(request_id, POLL_PATIENCE)
        except KeyError:
            told = f"unknown request {request_id}: its answer was fetched long ago, or its session has ended"
            return reply({"error": told, "category": "user"})
        if outcome is None:
            return reply({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)
        if isinstance(outcome, UserError):
            return reply({"error": str(outcome), "category": "user"})
        if isinstance(outcome, Exception):
            told = f"{type(outcome).__name__}: {outcome} (the server's log has more)"
            return reply({"error": told, "category": "server"})
        if isinstance(outcome, (Samples, Trained)):
            if PROTOBUF in request.headers.get("accept", ""):
                return Response(wire.encode_proto(outcome), media_type=PROTOBUF)
            return reply(wire.encode_json(outcome))
        return reply(outcome)

    def _new_model(self, fields: Fields) -> tuple[str, str, Hashable]:
        """Return a new model's session, its id, and the key by which a repeated request is known."""
        session = self._sessions.hear(fields.text("session_id")).id
        # The SDK derives the id in the same way where it isn't told one.
        id = f"{session}:train:{fields.integer('model_seq_id')}"
        return session, id, ("new", id)

    def _do(self, model: Model, seq_id: int, work: Work) -> Response:
        """Queue work of a model, unless it is a request that was sent before."""
        key = (model.id, seq_id)
        request_id = self._futures.known(key) or self._submit(key, model.session, model.id, work)
        return reply({"request_id": request_id})

    def _submit(self, key: Hashable, session: str, model: str, work: Work) -> str:
        request_id = self._futures.open(key, session)
        self._engine.submit(model, work, self._finisher(request_id))
        return request_id

    def _finisher(self, request_id: str) -> Callable[[Outcome], None]:
        loop = asyncio.get_running_loop()

        def finish(outcome: Outcome) -> None:
            with suppress(RuntimeError):  # the loop is closed: the server stops
                loop.call_soon_threadsafe(self._futures.finish, request_id, outcome)

        return finish

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_PERIOD, self._sessions.patience))
            for session, models in self._sessions.end_silent():
                self._futures.drop(session.id)
                for model in models:
                    work = _answering({}, self._models.release, model.id)
                    self._engine.submit(model.id, work, lambda outcome: None)


def _answering(answer: dict[str, Any], work: Callable[..., None], *args: Any, **options: Any) -> Work:
    """Return work that gives this answer once the call is done."""

    def call() -> Outcome:
        work(*args, **options)
        return answer

    return call


def _expiry(fields: Fields) -> float | None:
    if not fields.has("ttl_seconds"):
        return None
    seconds = fields.integer("ttl_seconds")
    if seconds < 1:
        raise UserError(f"ttl_seconds must be at least 1, not {seconds}")
    return time.time() + seconds
