"""A training server that answers at once with what it was told to, and computes nothing; memory.py's own.

Prints its port. It looks at no more of a prompt than its length.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker.proto import tinker_public_pb2 as proto

PATIENCE = 20.0  # seconds that an answer is waited for: the SDK gives a call up after 45


class Sink:
    def __init__(self) -> None:
        self.turn: list[int] = [1]
        self.final: list[int] = [1]
        self.last = 10**9  # tokens: a longer prompt is the last of its attempt
        self.keep = 10**9  # tokens: a longer prompt is not answered; 0: nor is forward_backward
        self.numbers = itertools.count()
        self.asked: dict[str, tuple[str, int]] = {}  # request -> what, tokens of its prompt

    def kept(self, what: str, tokens: int) -> bool:
        return tokens > self.keep if what == "sample" else what == "forward_backward" and not self.keep

    async def script(self, request: Request) -> Response:
        for name, value in (await request.json()).items():
            setattr(self, name, value)
        return JSONResponse(
            {"asked": next(self.numbers), "kept": sum(self.kept(*a) for a in self.asked.values())}
        )

    def note(self, what: str, tokens: int = 0, **more: Any) -> Response:
        name = f"r{next(self.numbers)}"
        self.asked[name] = what, tokens
        return JSONResponse({"request_id": name, "sample_sequence_ids": [name], **more})

    async def post(self, request: Request) -> Response:
        call, body = request.path_params["call"], await request.body()
        if call == "asample":
            tokens = body[: body.index(b"]")].count(b",", body.index(b"[", body.index(b'"tokens"'))) + 1
            return self.note(
                "logprobs" if re.search(rb'"prompt_logprobs": ?true', body) else "sample", tokens
            )
        if call == "retrieve_future":
            return await self.answer(json.loads(body)["request_id"])
        if call == "create_model":
            return self.note("model", model_id="m")
        if call in ("forward_backward", "optim_step"):
            return self.note(call)
        number = next(self.numbers)
        plain: dict[str, dict[str, Any]] = {
            "create_session": {"type": "create_session", "session_id": f"s{number}"},
            "session_heartbeat": {"type": "session_heartbeat"},
            "telemetry": {"status": "accepted"},
            "create_sampling_session": {"type": "create_sampling_session", "sampling_session_id": f"p{number}"},
            "get_info": {
                "type": "get_info", "model_id": "m", "model_data": {"model_name": "kept", "tokenizer_id": "kept"},
                "is_lora": True, "lora_rank": 32, "model_name": "kept",
            },
        }  # fmt: skip
        return JSONResponse(plain.get(call, {}))

    async def get(self, request: Request) -> Response:
        return JSONResponse({"supported_models": [{"model_name": "kept"}], "status": "ok"})

    async def answer(self, name: str) -> Response:
        what, tokens = self.asked[name]
        for _ in range(int(PATIENCE / 0.1)):
            if not self.kept(what, tokens):
                break
            await asyncio.sleep(0.1)
        else:
            return JSONResponse({"type": "try_again", "queue_state": "active"}, 408)
        del self.asked[name]
        if what == "model":
            return JSONResponse({"type": "create_model", "model_id": "m"})
        message = proto.SampleResponse()
        if what == "logprobs":
            message.prompt_logprobs = np.linspace(-1, -0.1, tokens, dtype=np.float32).tobytes()
        said = self.turn if tokens < self.last else self.final
        sequence = message.sequences.add()
        sequence.tokens = np.array(said, np.int32).tobytes()
        sequence.logprobs = np.linspace(-1, -0.1, len(said), dtype=np.float32).tobytes()
        return Response(message.SerializeToString(), media_type="application/x-protobuf")


def main() -> None:
    sink = Sink()
    routes = [
        Route("/script", sink.script, methods=["POST"]),
        Route("/api/v1/{call:path}", sink.post, methods=["POST"]),
        Route("/api/v1/{call:path}", sink.get),
    ]
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(listening.getsockname()[1], flush=True)
    config = uvicorn.Config(Starlette(routes=routes), log_level="error", timeout_keep_alive=600)
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main()
